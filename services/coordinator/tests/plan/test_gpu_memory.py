"""A GPU that trainer and generator share is divided before either starts; what cannot fit is refused by its keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.plan import gpu_memory, memory_lines, size_limits
from flotilla_coordinator.plan.batching_choice import chosen_batching
from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.gpu_memory import GIB, SharedGpu
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import (
    HostMemory,
    TrainerMemory,
    frozen_bytes,
    microbatch_tokens,
    resident_bytes,
)
from flotilla_coordinator.plan.update_lines import MicroBatches, spare_budget_warnings
from flotilla_core.config import BatchingConfig, RunConfig, StackConfig
from flotilla_core.errors import FailedPrecondition

H200 = 141 * 1000**3
H100 = 80 * GIB
SMALL_GPU = 24 * GIB
QWEN3_600M = {
    "parameters": 596_049_920,
    "outer_parameters": 155_583_488,
    "layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "heads": 16,
    "query_size": 2048,
    "key_value_size": 2048,
}
QWEN3_8B = {
    "parameters": 8_190_735_360,
    "outer_parameters": 1_244_663_808,
    "layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "heads": 32,
    "query_size": 4096,
    "key_value_size": 2048,
}


def facts(**sizes: int) -> ModelFacts:
    return ModelFacts(
        folder=Path("model"),
        normalizes_heads=True,
        vocabulary_size=151_936,
        longest_sequence=40_960,
        matrices={},
        shape={},
        **sizes,
    )


def stack_of(**values: Any) -> StackConfig:
    sections = {"trainer": {"dtype": "bfloat16"}, "generator": {"dtype": "bfloat16"}}
    sections = {name: section | values.pop(name, {}) for name, section in sections.items()}
    return StackConfig.model_validate({"model": "/model", "placement": "colocated", **sections, **values})


def run_of(**changes: Any) -> RunConfig:
    rollout = {"prompts_per_step": 32, "samples_per_prompt": 8, "sampling": {"max_response_tokens": 512}}
    described = {
        "name": "run",
        "steps": 10,
        "data": {"train": "x.jsonl"},
        "rewards": [{"reward": "exact"}],
        "rollout": rollout,
    }
    return RunConfig.model_validate(described | changes)


def problems(
    config: RunConfig, stack: StackConfig, model: ModelFacts, rank: int, gpu: int, kept: int = 0
) -> tuple[list[str], list[str]]:
    """Return errors and warnings of a rank that takes so many bytes, of which some stay between updates."""
    need = TrainerMemory(0, 0, 0, 0, activations=rank - kept, logits=0, reference=kept)
    found = Chapter.of(gpu_memory.gpu_problems(config, stack, model, need, gpu))
    return found.errors, found.warnings


def test_a_small_model_leaves_an_h200_to_a_large_cache_and_a_run_of_many_tokens() -> None:
    shared = SharedGpu.required(facts(**QWEN3_600M), stack_of(), H200)
    assert shared.resident < 12 * GIB and shared.generator < 6 * GIB
    in_flight = 256 * 1024 * gpu_memory.token_bytes(facts(**QWEN3_600M), stack_of().generator)
    assert shared.kv_cache > in_flight
    config = run_of(batching={"tokens_per_microbatch": 16_384})
    need = TrainerMemory.of(facts(**QWEN3_600M), config, stack_of().trainer, 1024).total
    assert shared.resident < need < shared.rank_room


@pytest.mark.parametrize("total", [SMALL_GPU, H200])
def test_the_parts_of_both_and_what_is_set_aside_are_the_whole_gpu(total: int) -> None:
    shared = SharedGpu.required(facts(**QWEN3_600M), stack_of(generator={"max_model_tokens": 2048}), total)
    aside = total - shared.rank_room - shared.generator - shared.kv_cache
    assert 5 * GIB < aside < 5 * GIB + 0.05 * total, "with 2 GiB of buckets"
    assert shared.resident <= shared.rank_room


def test_buckets_of_both_ends_are_set_aside_by_their_size() -> None:
    embedding = 151_936 * 4096
    largest = dataclasses.replace(facts(**QWEN3_8B), largest_tensors=(embedding, embedding, 12_288 * 4096))
    one_end = gpu_memory.sync_bytes(largest, stack_of())
    assert one_end == 2 * 2 * embedding + (512 << 20), "embedding and head have buckets of their own"
    with_buckets = SharedGpu.of(largest, stack_of(), H200).aside
    assert with_buckets > 3 * GIB + int(0.04 * H200) + 2 * one_end
    float32 = stack_of(trainer={"dtype": "float32"})
    assert gpu_memory.sync_bytes(largest, float32) > 1.8 * one_end
    room = gpu_memory.rank_room(run_of(), largest, stack_of(placement="separate"), H200)
    assert room == H200 - 3 * GIB - int(0.04 * H200) - one_end


def test_a_cache_is_no_larger_than_its_samples_can_fill() -> None:
    model, generator = facts(**QWEN3_600M), {"max_model_tokens": 1024, "max_running_samples": 16}
    shared = SharedGpu.of(model, stack_of(generator=generator), H200)
    assert shared.kv_cache == 16 * shared.least_kv_cache


def test_a_model_whose_state_does_not_fit_beside_a_generator_fits_over_two_gpus() -> None:
    model = facts(**QWEN3_8B)
    one = SharedGpu.required(model, stack_of(), H200)
    assert not one.learns and one.frozen < one.rank_room < one.resident, "adapters can learn on it"
    with pytest.raises(FailedPrecondition, match=r"do not fit on one GPU.*raise trainer\.nproc"):
        SharedGpu.required(model, stack_of(), SMALL_GPU)
    assert SharedGpu.of(model, stack_of(trainer={"nproc": 2}, generator={"replicas": 2}), H200).learns


def test_the_stack_is_started_with_a_cache_of_a_fixed_size_and_is_divided_alike_again() -> None:
    model, stack = facts(**QWEN3_600M), stack_of()
    shared = SharedGpu.of(model, stack, H200)
    applied = shared.applied(model, stack)
    assert applied.generator.kv_cache_gib == pytest.approx(shared.kv_cache / GIB)
    assert applied.generator.memory_fraction < 0.6
    again = SharedGpu.of(model, applied, H200)
    assert again == shared and again.applied(model, applied) == applied


def test_a_run_whose_rank_has_no_room_beside_the_generator_is_refused_by_its_keys() -> None:
    model, stack, config = facts(**QWEN3_600M), stack_of(), run_of()
    shared = SharedGpu.of(model, stack, SMALL_GPU)
    assert problems(config, stack, model, shared.rank_room, SMALL_GPU) == ([], [])
    errors, (warning,) = problems(config, stack, model, shared.rank_room + GIB, SMALL_GPU)
    assert not errors and "beside the generator" in warning and "generator.kv_cache_gib = " in warning
    (error,), _ = problems(config, stack, model, 3 * shared.rank_room, SMALL_GPU)
    assert "batching.tokens_per_microbatch = 8192" in error


def asleep(**generator: Any) -> StackConfig:
    return stack_of(generator={"sleep_while_training": True, **generator})


@pytest.mark.parametrize("total", [SMALL_GPU, H200])
def test_a_cache_that_sleeps_and_activations_are_counted_by_the_larger_of_both(total: int) -> None:
    model = facts(**QWEN3_600M)
    short = {"max_model_tokens": 2048}
    beside = SharedGpu.of(model, stack_of(generator=short), total)
    sleeper = SharedGpu.required(model, asleep(**short), total)
    assert sleeper.kv_cache >= beside.kv_cache and sleeper.rank_room == beside.rank_room + beside.kv_cache
    at_rest = sleeper.resident + gpu_memory.CHECK_BYTES
    assert sleeper.aside + sleeper.generator + max(sleeper.rank_room, at_rest + sleeper.kv_cache) <= total
    again = SharedGpu.of(model, sleeper.applied(model, asleep(**short)), total)
    assert again == sleeper


def test_generators_that_a_run_does_not_have_sleep_for_nobody() -> None:
    model, stack = facts(**QWEN3_600M), asleep()
    shared = SharedGpu.of(model, stack, H200)
    given = run_of(algorithm={"type": "sft"}, rewards=[])
    assert gpu_memory.rank_room(run_of(), model, stack, H200) == shared.rank_room
    assert gpu_memory.rank_room(given, model, stack, H200) == shared.room_beside
    _, (warning,) = problems(given, stack, model, shared.room_beside + GIB, H200)
    assert "stays" in warning and f"set {gpu_memory.SLEEP} in stack.yaml to false" in warning


def test_a_rank_that_keeps_more_between_updates_than_the_cache_leaves_is_refused() -> None:
    model, config, stack = facts(**QWEN3_600M), run_of(), asleep(kv_cache_gib=80)
    shared = SharedGpu.of(model, stack, H200)
    need = TrainerMemory.of(model, config, stack.trainer, 1024)
    assert need.kept < shared.resident < need.total
    assert problems(config, stack, model, need.total, H200, kept=need.kept) == ([], [])
    _, (warning,) = problems(config, stack, model, need.total, H200, kept=shared.room_beside)
    assert "between updates" in warning and "lower generator.kv_cache_gib" in warning
    (error,), _ = problems(config, stack, model, need.total, H200, kept=3 * shared.room_beside)
    assert error.partition(":")[0] == warning.partition(":")[0].replace(
        gpu_memory.shown_bytes(shared.room_beside), gpu_memory.shown_bytes(3 * shared.room_beside), 1
    )


def test_a_long_sample_that_fits_only_alternately_is_refused_by_that_key_with_its_arithmetic() -> None:
    model, longest = facts(**QWEN3_600M), {"max_model_tokens": 40_960, "max_running_samples": 1}
    sizes = (gib * GIB for gib in range(10, 40))
    total = next(size for size in sizes if SharedGpu.of(model, asleep(**longest), size).learns)
    with pytest.raises(
        FailedPrecondition, match=r"set generator\.sleep_while_training to true.*KV cache has \d"
    ):
        SharedGpu.required(model, stack_of(generator=longest), total)
    SharedGpu.required(model, asleep(**longest), total)


def test_a_rank_that_fits_only_alternately_is_told_the_key_and_what_it_would_have() -> None:
    model, config = facts(**QWEN3_600M), run_of()
    shared = SharedGpu.of(model, stack_of(), SMALL_GPU)
    need = shared.rank_room + GIB
    _, (warning,) = problems(config, stack_of(), model, need, SMALL_GPU)
    assert f"set {gpu_memory.SLEEP} in stack.yaml, with which it has" in warning
    _, (warning,) = problems(run_of(loop="client"), stack_of(), model, need, SMALL_GPU)
    assert gpu_memory.SLEEP not in warning, "nobody knows when such a run needs samples"
    assert problems(config, asleep(), model, need, SMALL_GPU) == ([], [])
    room = SharedGpu.of(model, asleep(), SMALL_GPU).rank_room
    _, (warning,) = problems(config, asleep(), model, room + GIB, SMALL_GPU)
    assert "sleeps meanwhile" in warning and gpu_memory.SLEEP not in warning


QWEN_72B = {
    "parameters": 72_706_203_648,
    "outer_parameters": 2_491_424_768,
    "layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "heads": 64,
    "query_size": 8192,
    "key_value_size": 2048,
}


@pytest.mark.parametrize(("workers", "total"), [(8, H200), (8, 80 * 1000**3), (4, H200)])
def test_a_model_of_70b_has_a_standby_of_each_workers_part_beside_a_cache_on_its_gpus(
    workers: int, total: int
) -> None:
    model = facts(**QWEN_72B)
    generator: dict[str, Any] = {"tensor_parallel_size": workers}
    stack = stack_of(placement="separate", generator=generator)
    share = gpu_memory.share_beside_standby(model, stack, total)
    stack = stack_of(placement="separate", generator=generator | {"memory_fraction": share})
    cache = gpu_memory.kv_cache_bytes(model, stack, total)
    assert cache > 2 * gpu_memory.longest_sample_bytes(model, stack.generator)
    assert cache + gpu_memory.generator_bytes(model, stack.generator) < total - 4 * GIB, (
        "both copies and the cache"
    )


def test_an_eager_engine_on_a_gpu_is_warned_of() -> None:
    eager = stack_of(placement="separate", generator={"enforce_eager": True})
    _, (warning,) = problems(run_of(), eager, facts(**QWEN3_600M), GIB, H200)
    assert "generator.enforce_eager is true" in warning


def test_an_engine_that_leaves_no_room_for_the_weights_that_arrive_is_warned_of() -> None:
    stack = stack_of(placement="separate", generator={"memory_fraction": 0.9})
    assert problems(run_of(), stack, facts(**QWEN3_600M), GIB, H200) == ([], [])
    _, (warning,) = problems(run_of(), stack, facts(**QWEN3_8B), GIB, H200)
    assert "stalls decoding for longer; lower it to 0.8" in warning
    adapters = run_of(lora={"rank": 8})
    assert problems(adapters, stack, facts(**QWEN3_8B), GIB, H200) == ([], [])


def test_a_cache_that_cannot_hold_the_samples_in_flight_is_warned_of() -> None:
    model, config = facts(**QWEN3_600M), run_of()
    separate = stack_of(placement="separate")

    def warned(kv_cache: int) -> list[str]:
        return Chapter.of(gpu_memory.kv_cache_warnings(config, separate, model, 100, kv_cache)).warnings

    # 256 samples of half of 512 tokens, and 32 prompts of 100 tokens, with 112 KiB each.
    need = (256 * 256 + 32 * 100) * 28 * 2048 * 2
    assert not warned(need) and "256 samples in flight" in warned(need - 1)[0]
    assert not warned(gpu_memory.kv_cache_bytes(model, separate, H200))
    assert warned(gpu_memory.kv_cache_bytes(model, separate, None)), (
        "a CPU has 1 GiB unless the stack says more"
    )


def test_a_micro_batch_has_no_more_tokens_than_a_step() -> None:
    config = run_of(rollout={"prompts_per_step": 2, "samples_per_prompt": 4})
    trainer = stack_of().trainer
    assert microbatch_tokens(config, trainer, 280) == 2240
    assert microbatch_tokens(config, trainer, 4000) == 8192
    assert microbatch_tokens(config, trainer.model_copy(update={"nproc": 8}), 280) == 280


def test_a_budget_that_was_set_above_what_a_step_has_is_warned_of() -> None:
    cut = MicroBatches.of(sequences=8, longest=281, budget=16_384, ranks=1)

    def warned(**batching: int) -> list[str]:
        return Chapter.of(spare_budget_warnings(run_of(batching=batching), cut, 1)).warnings

    (warning,) = warned(tokens_per_microbatch=16_384)
    assert "16,384 is more than the 2,240 tokens of a step" in warning
    assert not warned() and not warned(tokens_per_microbatch=2240)


@pytest.mark.parametrize(
    ("flags", "dtype", "warned"),
    [("fpu avx2", "bfloat16", True), ("fpu avx2", "float32", False), ("fpu avx512_bf16", "bfloat16", False)],
)
def test_bfloat16_on_a_processor_without_it_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str, warned: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name : any\nflags : {flags} sse\n")
    monkeypatch.setattr(size_limits, "_CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(size_limits, "_GPUS", tmp_path / "none")
    found = list(
        size_limits.bfloat16_warnings(stack_of(trainer={"dtype": dtype}, generator={"dtype": dtype}))
    )
    assert [text.split(" are ")[0] for text in found] == ["trainer.dtype and generator.dtype"] * warned


@pytest.mark.parametrize(
    ("sizes", "stack", "gpu", "tokens", "recompute"),
    [
        (QWEN3_600M, {"placement": "separate"}, H200, 32_768, False),
        (QWEN3_600M, {"placement": "separate"}, SMALL_GPU, 8192, "selective"),
        (QWEN3_8B, {"placement": "separate", "trainer": {"nproc": 2}}, H200, 8192, False),
        (
            QWEN3_8B,
            {"placement": "separate", "trainer": {"nproc": 2, "compile": "off"}},
            H200,
            16_384,
            "selective",
        ),
    ],
)
def test_open_batching_is_the_largest_that_fits_the_gpu(
    sizes: dict[str, int], stack: dict[str, Any], gpu: int, tokens: int, recompute: bool | str
) -> None:
    model, config, placed = facts(**sizes), run_of(), stack_of(**stack)
    chosen = chosen_batching(config, placed, model, 612, gpu)
    assert (chosen.tokens_per_microbatch, chosen.activation_checkpointing) == (tokens, recompute)
    assert not chosen.sets("tokens_per_microbatch")


def test_what_a_user_set_is_not_chosen_again() -> None:
    model, placed = facts(**QWEN3_8B), stack_of(placement="separate")
    config = run_of(batching={"tokens_per_microbatch": 512, "activation_checkpointing": False})
    assert chosen_batching(config, placed, model, 612, H200) == config.batching


def test_without_a_known_gpu_micro_batches_are_those_of_the_trainer_itself() -> None:
    model, placed = facts(**QWEN3_600M), stack_of(placement="separate")
    chosen = chosen_batching(run_of(), placed, model, 612, None)
    assert chosen.tokens_per_microbatch == BatchingConfig().microbatch_budget
    assert chosen.activation_checkpointing is False


def test_a_rank_whose_state_does_not_fit_is_told_the_key_that_puts_it_on_the_host() -> None:
    model, config = facts(**QWEN3_8B), run_of()
    stack = stack_of(placement="separate", trainer={"dtype": "bfloat16"})
    away = stack_of(placement="separate", trainer={"dtype": "bfloat16", "cpu_offload": True})

    def told(of: StackConfig) -> list[str]:
        need = TrainerMemory.of(model, config, of.trainer, 1024)
        chapter = Chapter.of(gpu_memory.gpu_problems(config, of, model, need, H100))
        return [each for each in chapter.errors + chapter.warnings if "a trainer rank needs" in each]

    (refused,) = told(stack)
    assert "less than the 122 GiB of its weights, gradients and moments: set trainer.cpu_offload" in refused
    assert not any("cpu_offload" in each for each in told(away))


def test_what_is_not_on_the_gpu_is_on_the_host_in_blocks_of_powers_of_two() -> None:
    model, config = facts(**QWEN3_8B), run_of(batching={"activation_checkpointing": True})
    here, away = (stack_of(trainer={"dtype": "bfloat16", "cpu_offload": on}).trainer for on in (False, True))
    visiting = TrainerMemory.of(model, config, away, 1024)
    part = model.outer_parameters * 4
    assert (visiting.masters, visiting.gradients, visiting.moments) == (part, part, 0)
    assert resident_bytes(model, here) - resident_bytes(model, away) == model.parameters * 16 - 2 * part
    assert frozen_bytes(model, here) - frozen_bytes(model, away) == model.parameters * 2
    assert HostMemory.of(model, config, here).total == 0
    host = HostMemory.of(model, config, away)
    assert (host.pinned, host.moments) == (model.parameters * 8 + 2 * part, model.parameters * 8)
    # 12,288 rows of 4,096 numbers take 192 MiB, for which torch pins 256.
    rounded = dataclasses.replace(model, shapes={(12_288, 4096): 60, (4096, 4096): 400})
    assert HostMemory.of(rounded, config, away).pinned == 2 * (60 * 256 + 400 * 64 << 20) + 2 * part
    halves = stack_of(trainer={"nproc": 2, "dtype": "bfloat16", "cpu_offload": True}).trainer
    half = HostMemory.of(rounded, config, halves)
    assert (half.pinned, half.moments) == (
        2 * (60 * 128 + 400 * 32 << 20) + part,
        -(-model.parameters // 2) * 8,
    )
    adapters = run_of(lora={"rank": 8})
    frozen = HostMemory.of(rounded, adapters, away)
    assert (frozen.total, frozen.moments) == (60 * 128 + 400 * 32 << 20, 0)
    gloo = stack_of(placement="separate", trainer={"backend": "gloo", "cpu_offload": True}).trainer
    assert HostMemory.of(model, config, gloo).total == 0, "a CPU is its own host"


def test_what_rests_on_the_host_is_shown_and_refused_where_the_host_has_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, stack = facts(**QWEN3_600M), stack_of(trainer={"dtype": "bfloat16", "cpu_offload": True})
    config = run_of(optimizer={"offload": True})
    host = HostMemory.of(model, config, stack.trainer)
    ((name, value, explanation),) = Chapter.of(memory_lines.host_lines("trainer", host, offload=True)).lines
    assert (name, value) == ("host memory of a trainer rank", "10 GiB")
    assert (
        "pinned weights and gradients 5.6 GiB, AdamW 4.44 GiB; optimizer.offload changes nothing"
        in explanation
    )
    assert not list(memory_lines.host_lines("trainer", HostMemory(0, 0, 0), offload=True))
    kept = memory_lines.kept_on_host(stack, host, HostMemory(0, 0, 0))
    assert kept == {"trainer": host.total}
    monkeypatch.setattr(size_limits, "has_gpus", lambda: True)
    assert not list(size_limits.host_errors(kept, host.total))
    (error,) = Chapter.of(size_limits.host_errors(kept, host.total - 1)).errors
    assert "(trainer 10 GiB)" in error and "set trainer.cpu_offload to false, use lora, or spread" in error


def test_a_micro_batch_leaves_room_for_whole_weights_that_would_come_from_the_host() -> None:
    config = run_of(batching={})
    stack = stack_of(placement="separate", trainer={"dtype": "bfloat16", "cpu_offload": True})

    def left(model: ModelFacts) -> int:
        """Return what the chosen micro-batch leaves of the GPU."""
        tried = config.model_copy(update={"batching": chosen_batching(config, stack, model, 4096, H100)})
        need = TrainerMemory.of(model, tried, stack.trainer, 4096, compiled=True)
        return gpu_memory.rank_room(config, model, stack, H100) - need.total

    for sizes in (QWEN3_600M, QWEN3_8B):
        assert 0.9 * left(facts(**sizes)) > sizes["parameters"] * (2 + 4)
    assert 0 < left(facts(**QWEN_72B)) < 72e9 * (2 + 4), "the most that fits at all"


def test_a_critic_that_cannot_compute_in_its_turn_is_refused_by_its_keys() -> None:
    model = facts(**QWEN3_600M)
    stack = stack_of(critic={"replicas": 1, "placement": "colocated", "dtype": "bfloat16"})
    policy = TrainerMemory.of(model, run_of(), stack.trainer, 1024)

    def found(critic: int, stack: StackConfig = stack) -> tuple[list[str], list[str]]:
        need = TrainerMemory(0, 0, 0, 0, activations=critic, logits=0, reference=0)
        chapter = Chapter.of(gpu_memory.critic_problems(run_of(), stack, model, policy, need, H200))
        return chapter.errors, chapter.warnings

    room = gpu_memory.rank_room(run_of(), model, stack, H200) - policy.kept
    kept = 12 * model.parameters
    assert found(room + kept) == ([], [])
    (error,) = found(3 * (room + kept))[0]
    assert "critic.placement: separate" in error and found(room + 2 * kept)[1]
    assert found(3 * H200, stack_of(critic={"replicas": 1})) == ([], []), "on GPUs of its own"
