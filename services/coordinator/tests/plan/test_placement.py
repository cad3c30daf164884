"""What a stack file leaves out is decided by the GPUs of the host, and what it says stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.plan import size_limits
from flotilla_coordinator.plan.gpu_memory import SharedGpu, rank_room, token_bytes
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.placement import placed, seat_lines, seats
from flotilla_core.config import RunConfig, StackConfig, dump_yaml, load, load_text
from flotilla_core.errors import FailedPrecondition
from flotilla_launch import gpus as gpus_module
from flotilla_testing.host_tools import write_nvidia_smi
from flotilla_testing.model_folders import write_header

GIB = 1 << 30
Host = Callable[..., None]


def make_model(folder: Path, *, width: int = 8, layers: int = 3, longest: int = 64) -> Path:
    """A model of one square matrix a layer, whose file has no data."""
    folder.mkdir()
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": 20}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
    shapes = {"embed": [20, width]} | {f"model.layers.{n}.w": [width, width] for n in range(layers)}
    write_header(folder, shapes)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host with GPUs, as far as nvidia-smi says."""

    def has(count: int, *, gib: int = 24, capability: str = "9.0") -> None:
        write_nvidia_smi(tmp_path, count, gib << 10, capability)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv(gpus_module.VISIBLE, raising=False)

    return has


def stack_of(model: Path, **sections: Any) -> StackConfig:
    return StackConfig.model_validate({"model": model, **sections})


def test_one_gpu_is_divided_between_both_and_two_generators_do_not_fit_there(model: Path, host: Host) -> None:
    host(1)
    found = placed(stack_of(model))
    assert found.placement == "colocated" and found.generator.kv_cache_gib
    assert (found.trainer.dtype, found.generator.dtype, found.critic.dtype) == ("bfloat16",) * 3
    assert found.ready_timeout_s > placed(stack_of(model, ready_timeout_s=180.0)).ready_timeout_s == 180.0
    with pytest.raises(FailedPrecondition, match="needs 3 GPUs and this host has 1"):
        placed(stack_of(model, generator={"replicas": 2}))


def test_a_host_without_gpus_decides_nothing(
    model: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(2)
    monkeypatch.setenv(gpus_module.VISIBLE, "")
    stack = stack_of(model)
    assert placed(stack) is stack and seats(stack) == ([], [])


def test_both_ends_share_every_gpu_of_a_host_and_a_second_look_changes_nothing(
    model: Path, host: Host
) -> None:
    host(4)
    found = placed(stack_of(model))
    assert (found.trainer.nproc, found.generator.replicas, found.placement) == (4, 4, "colocated")
    assert placed(found) == found
    assert placed(load_text(StackConfig, dump_yaml(found))) == found, "as the launcher reads it"


@pytest.mark.parametrize(
    ("sections", "counts"),
    [
        ({"trainer": {"nproc": 1}}, (1, 1, "separate")),
        ({"generator": {"replicas": 3}}, (1, 3, "separate")),
        ({"placement": "separate"}, (2, 2, "separate")),
        ({"generator": {"tensor_parallel_size": 2}}, (2, 1, "separate")),
        ({"reference": {"replicas": 1}}, (4, 4, "colocated")),
        ({"reference": {"replicas": 1, "placement": "separate"}}, (3, 3, "colocated")),
        ({"trainer": {"replicas": 2}}, (2, 4, "colocated")),
        ({"trainer": {"backend": "gloo"}}, (1, 1, "separate")),
        ({"autoscale": {}}, (1, 1, "separate")),
    ],
)
def test_what_the_file_says_of_four_gpus_stays(
    model: Path, host: Host, sections: dict[str, Any], counts: tuple[int, int, str]
) -> None:
    host(4)
    found = placed(stack_of(model, **sections))
    assert (found.trainer.nproc, found.generator.replicas, found.placement) == counts


def test_a_model_too_large_for_one_gpu_gets_more_workers_and_as_many_ranks_as_learning_takes(
    tmp_path: Path, host: Host
) -> None:
    large = make_model(tmp_path / "large", width=32_768, layers=48)  # 103 GB of weights
    host(8, gib=80)
    found = placed(stack_of(large))
    workers = found.generator.tensor_parallel_size
    assert workers in (2, 4) and found.generator.replicas == 1
    standby = 103 * 10**9 / workers
    assert found.generator.memory_fraction * 80 * GIB < 80 * GIB - standby, (
        "the weights that arrive have room"
    )
    assert (found.trainer.nproc, found.placement) == (8 - workers, "separate")
    with pytest.raises(FailedPrecondition, match=r"a generator does not fit.*tensor_parallel_size"):
        placed(stack_of(large, generator={"tensor_parallel_size": 1}))


def test_weights_rest_on_the_host_only_where_all_of_them_cannot_learn_on_the_gpus(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_model(tmp_path / "large", width=16_384, layers=30)  # 8 billion parameters
    host(2, gib=80)
    monkeypatch.setattr(size_limits, "host_memory", lambda: 100 * GIB)
    assert not placed(stack_of(large)).trainer.cpu_offload, "their state takes 122 GiB"
    monkeypatch.setattr(size_limits, "host_memory", lambda: 256 * GIB)
    found = placed(stack_of(large))
    assert (found.placement, found.trainer.nproc, found.generator.replicas) == ("colocated", 2, 2)
    assert found.trainer.cpu_offload and "weights rest on the host" in seats(found)[0][0][1]
    assert not placed(stack_of(large, trainer={"cpu_offload": False})).trainer.cpu_offload
    few = placed(stack_of(large, generator={"max_running_samples": 1}))
    assert few.placement == "colocated", "a small cache suffices where few samples run"
    monkeypatch.setattr(size_limits, "host_memory", lambda: 100 * GIB)
    own = placed(stack_of(large, trainer={"cpu_offload": True}))
    assert own.placement == "colocated", "what the file says is not judged by the memory of the host"
    host(2, gib=141)
    assert not placed(stack_of(large)).trainer.cpu_offload


def test_a_rank_beside_a_generator_has_a_limit_of_memory_that_leaves_the_generators_part(
    model: Path, host: Host
) -> None:
    host(2, gib=80)
    found, total = placed(stack_of(model)), 80 * GIB
    shared = SharedGpu.of(ModelFacts.read(model), found, total)
    limit = found.trainer.memory_fraction
    assert limit is not None
    assert shared.rank_room < limit * total < total - shared.generator - shared.kv_cache - 3 * GIB
    assert placed(stack_of(model, placement="separate")).trainer.memory_fraction is None
    lower = placed(stack_of(model, placement="colocated", trainer={"nproc": 2, "memory_fraction": 0.2}))
    described = {"name": "run", "steps": 1, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
    run = RunConfig.model_validate(described)
    assert lower.trainer.memory_fraction == 0.2
    assert rank_room(run, ModelFacts.read(model), lower, total) < 0.2 * total


def test_a_dtype_that_the_file_says_stays_and_old_gpus_get_float32(model: Path, host: Host) -> None:
    host(2)
    found = placed(stack_of(model, trainer={"dtype": "float32"}))
    assert (found.trainer.dtype, found.generator.dtype) == ("float32", "bfloat16")
    host(2, capability="7.5")
    assert placed(stack_of(model)).generator.dtype == "float32"


def test_a_key_of_a_file_is_told_from_a_default_also_with_its_paths_resolved(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("trainer: {nproc: 1}\n")
    stack = load(StackConfig, [file], resolve_paths=True)
    assert stack.state_dir.is_absolute()
    assert stack.trainer.sets("nproc") and not stack.generator.sets("replicas")


def test_up_and_plan_say_who_sits_where_with_how_much_memory(model: Path, host: Host) -> None:
    host(2)
    stack = placed(stack_of(model))
    found, warnings = seats(stack)
    assert [gpu for gpu, _ in found] == ["0", "1"] and not warnings
    assert found[0][1].startswith("generator-0 (") and ", trainer rank 0 (" in found[0][1]
    assert "KV cache" in found[0][1]
    lines = list(seat_lines(stack, ModelFacts.read(model), 24 * GIB))
    assert [(name, value) for name, value, _ in lines] == [("GPU 0", "24 GiB"), ("GPU 1", "24 GiB")]
    assert [who for _, _, who in lines] == [who for _, who in found]


def test_generators_sleep_where_a_usual_batch_has_no_room_beside_the_rank_and_the_file_does_not_say(
    tmp_path: Path, host: Host
) -> None:
    wide = make_model(tmp_path / "wide", width=16_384, layers=14, longest=1024)  # 3.8 billion parameters
    host(2, gib=80)
    found, total = placed(stack_of(wide)), 80 * GIB
    assert found.placement == "colocated" and found.generator.sleep_while_training
    assert found.generator.apply_weights == "direct", "no room for a second copy"
    assert placed(found) == found
    alternately, _ = seats(found)
    assert "the rank's during updates" in alternately[0][1] and "without that" in alternately[0][1]
    by_hand = placed(stack_of(wide, generator={"sleep_while_training": False}))
    assert not by_hand.generator.sleep_while_training and by_hand.generator.apply_weights == "prefetch"
    facts = ModelFacts.read(wide)
    caches = [SharedGpu.of(facts, stack, total).kv_cache for stack in (by_hand, found)]
    assert caches[1] > 1.25 * caches[0] and caches[0] < 256 * 1024 * token_bytes(facts, found.generator)
    for kept in ({"generator": {"kv_cache_gib": 4}}, {"generator": {"max_running_samples": 8}}):
        assert not placed(stack_of(wide, **kept)).generator.sleep_while_training
    second = placed(stack_of(wide, generator={"apply_weights": "prefetch"}))
    assert second.generator.sleep_while_training and second.generator.apply_weights == "prefetch"
    host(2, gib=600)
    assert not placed(stack_of(wide)).generator.sleep_while_training, "all has room at the same time"


def test_generators_that_sleep_say_whose_memory_their_cache_is_during_updates(
    model: Path, host: Host
) -> None:
    host(2)
    stack = placed(stack_of(model, placement="colocated", generator={"sleep_while_training": True}))
    assert stack.generator.sleep_while_training and stack.generator.replicas == 2
    found, _ = seats(stack)
    assert all("the rank's during updates" in who for _, who in found)


def test_a_generator_that_cannot_fit_is_refused_by_its_keys(model: Path, host: Host) -> None:
    host(2, gib=1)
    with pytest.raises(FailedPrecondition, match=r"a generator does not fit.*tensor_parallel_size"):
        placed(stack_of(model, placement="separate", generator={"memory_fraction": 0.001}))


ALL_ROLES: dict[str, Any] = {
    "critic": {"replicas": 1},
    "reference": {"replicas": 1},
    "teachers": {"math": {"replicas": 1}},
}


@pytest.mark.parametrize("count", [1, 2])
def test_critic_reference_and_teachers_have_the_gpus_of_the_trainer_where_all_have_room(
    model: Path, host: Host, count: int
) -> None:
    host(count)
    found = placed(stack_of(model, **ALL_ROLES))
    assert (found.trainer.nproc, found.generator.replicas, found.placement) == (count, count, "colocated")
    gangs = [found.critic, found.reference, found.teachers["math"]]
    assert [(gang.nproc, gang.shares_gpus, gang.cpu_offload) for gang in gangs] == [(count, True, False)] * 3
    assert placed(found) == found == placed(load_text(StackConfig, dump_yaml(found)))
    who = seats(found)[0]
    assert len(who) == count
    for one in ("critic", "reference", "teacher-math", "trainer", "generator-0"):
        assert one in who[0][1]
    assert "in its turn" in who[0][1]


def test_what_gangs_keep_on_a_shared_gpu_is_counted_and_their_limits_leave_the_generators_part(
    tmp_path: Path, host: Host
) -> None:
    large = make_model(tmp_path / "large", width=16_384, layers=8)  # 2.1 billion parameters
    host(1, gib=141)
    awake: dict[str, Any] = {"generator": {"sleep_while_training": False}}
    alone, found = (placed(stack_of(large, **awake, **roles)) for roles in ({}, ALL_ROLES))
    total = 141 * GIB
    facts = ModelFacts.read(large)
    few, many = (SharedGpu.of(facts, stack, total) for stack in (alone, found))
    kept = facts.parameters * (12 + 4 + 4)
    assert kept < many.aside - few.aside < 1.2 * kept + 3 * GIB
    limits = [found.trainer.memory_fraction, found.critic.memory_fraction, found.reference.memory_fraction]
    trainer, critic, reference = (limit * total for limit in limits if limit is not None)
    engine = many.generator + many.kv_cache
    beside_critic = facts.parameters * (12 + 4 + 4)  # policy, reference, teacher
    assert critic + beside_critic + engine < total and trainer + kept + engine < total
    assert facts.parameters * 4 < reference < critic


def test_weights_of_gangs_rest_on_the_host_where_the_gpus_have_no_room_and_there_are_no_others(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_model(tmp_path / "large", width=16_384, layers=10)  # 2.7 billion parameters
    roles = {"critic": {"replicas": 1}, "reference": {"replicas": 1}}
    monkeypatch.setattr(size_limits, "host_memory", lambda: 256 * GIB)

    def resting(gib: int, count: int = 1, **sections: Any) -> tuple[bool, bool, bool]:
        host(count, gib=gib)
        found = placed(stack_of(large, **(roles | sections)))
        return found.critic.shares_gpus, found.reference.cpu_offload, found.critic.cpu_offload

    assert resting(141) == (True, False, False)
    assert resting(120) == (True, True, False), "a model that only scores is the first to rest"
    assert resting(80) == (True, True, True)
    assert resting(80, 4) == (True, False, False), "a quarter of everything on each"
    assert resting(80, 3, trainer={"nproc": 1}) == (True, True, True)
    assert resting(80, 4, trainer={"nproc": 1}) == (False, False, False), "each has its own"
    kept = {"critic": {"replicas": 1, "cpu_offload": False}}
    assert resting(80, **kept) == (True, True, False), "what the file says stays"
    assert resting(80, 2) == (True, True, False)
    assert not placed(stack_of(large, **roles)).trainer.cpu_offload, "the policy is the last to rest"


def test_a_file_that_counts_ranks_has_gangs_on_gpus_of_their_own_as_long_as_there_are_enough(
    model: Path, host: Host
) -> None:
    counted = {"trainer": {"nproc": 1}, "generator": {"replicas": 1}, "critic": {"replicas": 1}}
    for count, shares in ((3, False), (2, True)):
        host(count)
        found = placed(stack_of(model, **counted))
        assert (found.critic.shares_gpus, found.placement) == (shares, "separate")
        assert len(seats(found)[0]) == count
    host(2)
    two = {"critic": {"replicas": 1, "nproc": 2}, "trainer": {"nproc": 1}, "generator": {"replicas": 1}}
    with pytest.raises(FailedPrecondition, match=r"needs 4 GPUs.*critic takes 2"):
        placed(stack_of(model, **two))
