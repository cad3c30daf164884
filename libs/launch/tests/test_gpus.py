"""Claims about which process of a stack gets which GPUs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flotilla_core.config import StackConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_launch.gpus import VISIBLE, Gpus
from flotilla_launch.placement import slots_of


def stack_of(**values: object) -> StackConfig:
    return StackConfig.model_validate({"model": "/model", **values})


def placed(gpus: Gpus, stack: StackConfig) -> dict[str, str | None]:
    return {slot.name: gpus.environment(slot, stack).get(VISIBLE) for slot in slots_of(stack)}


def test_trainer_has_the_first_gpus_and_every_replica_its_own_after_them() -> None:
    stack = stack_of(trainer={"nproc": 2}, generator={"replicas": 2, "tensor_parallel_size": 2})
    gpus = Gpus(tuple("01234567"), numbered_by_bus=True)
    gpus.require(stack, 2)
    assert placed(gpus, stack) == {
        "generator-0": "2,3",
        "generator-1": "4,5",
        "trainer": "0,1",
        "coordinator": "",
        "reward-0": "",
    }
    variables = [gpus.environment(slot, stack) for slot in slots_of(stack)]
    assert {environment["CUDA_DEVICE_ORDER"] for environment in variables} == {"PCI_BUS_ID"}


def test_each_of_several_trainers_has_its_own_gpus_and_a_single_one_keeps_its_name() -> None:
    stack = stack_of(trainer={"replicas": 2, "nproc": 2}, critic={"replicas": 2}, generator={"replicas": 1})
    gpus = Gpus(tuple("0123456"))
    gpus.require(stack, 1)
    found = placed(gpus, stack)
    assert [found[f"trainer-{index}"] for index in (0, 1)] == ["0,1", "2,3"]
    assert (found["critic-0"], found["critic-1"], found["generator-0"]) == ("4", "5", "6")
    assert "trainer" in placed(gpus, stack_of()) and "critic" not in placed(gpus, stack_of())
    with pytest.raises(FailedPrecondition, match=r"needs 8 GPUs.*trainer-1 takes 2"):
        gpus.require(stack, 2)


def test_generators_of_judges_have_gpus_after_the_gangs_and_before_the_policys_generators() -> None:
    judges = {
        "careful": {"model": "m/judge", "replicas": 2, "tensor_parallel_size": 2},
        "far": {"url": "https://h/v1", "model": "m"},
    }
    stack = stack_of(critic={"replicas": 1}, judges=judges, generator={"replicas": 1})
    gpus = Gpus(tuple("0123456"))
    gpus.require(stack, 1)
    found = placed(gpus, stack)
    places = [found[name] for name in ("critic", "judge-careful-0", "judge-careful-1", "generator-0")]
    assert places == ["1", "2,3", "4,5", "6"] and "judge-far" not in found
    with pytest.raises(
        FailedPrecondition, match=r"judge-careful-1 takes 2 \(judges.careful.tensor_parallel_size"
    ):
        gpus.require(stack, 2)


def test_a_judge_leaves_the_only_gpu_of_a_host_to_nobody_else() -> None:
    stack = stack_of(judges={"careful": {"model": "m/judge"}})
    assert not Gpus(("0",)).colocates(stack) and Gpus(("0",)).colocates(stack_of())


def test_a_judge_on_vllm_has_its_gpu_beside_generators_that_need_none() -> None:
    stack = stack_of(
        judges={"careful": {"model": "m/judge"}}, generator={"engine": "sim"}, trainer={"replicas": 0}
    )
    assert placed(Gpus(("0",)), stack) == {
        "generator-0": "",
        "judge-careful": "0",
        "coordinator": "",
        "reward-0": "",
    }


def test_named_teachers_have_their_gpus_after_the_teacher_in_the_order_of_the_file() -> None:
    teachers = {"math": {"replicas": 2, "nproc": 2}, "code": {"replicas": 1}, "idle": {}}
    stack = stack_of(teacher={"replicas": 1}, teachers=teachers, generator={"replicas": 1})
    gpus = Gpus(tuple("01234567"))
    gpus.require(stack, 1)
    found = placed(gpus, stack)
    assert [found[name] for name in ("trainer", "teacher", "teacher-math-0", "teacher-math-1")] == [
        "0",
        "1",
        "2,3",
        "4,5",
    ]
    assert (found["teacher-code"], found["generator-0"]) == ("6", "7") and "teacher-idle" not in found
    with pytest.raises(FailedPrecondition, match=r"teacher-math-0 takes 2 \(teachers\.math\.nproc\)"):
        gpus.require(stack, 2)


def test_replicas_that_come_later_move_nobody() -> None:
    few, many = stack_of(generator={"replicas": 1}), stack_of(generator={"replicas": 3})
    gpus = Gpus(tuple("0123"))
    assert placed(gpus, few).items() <= placed(gpus, many).items()
    assert placed(gpus, many)["generator-2"] == "3"


@pytest.mark.parametrize("replicas", [3, 4])
def test_too_few_gpus_are_refused_with_the_numbers(replicas: int) -> None:
    stack = stack_of(trainer={"nproc": 2}, generator={"replicas": 1, "tensor_parallel_size": 2})
    gpus = Gpus(tuple("0123456"))
    gpus.require(stack, 2)
    with pytest.raises(FailedPrecondition) as caught:
        gpus.require(stack, replicas)
    assert f"needs {2 + 2 * replicas} GPUs and this host has 7" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"trainer": {"backend": "gloo", "nproc": 8}}, {"trainer": "", "generator-0": "0"}),
        ({"generator": {"engine": "sim", "replicas": 9}}, {"trainer": "0", "generator-8": ""}),
        ({"trainer": {"attach": "elsewhere:1"}}, {"generator-0": "0"}),
        ({"trainer": {"replicas": 0}}, {"generator-0": "0"}),
    ],
)
def test_who_computes_on_the_cpu_or_elsewhere_takes_no_gpu(
    values: dict[str, object], expected: dict[str, str]
) -> None:
    stack = stack_of(**values)
    gpus = Gpus(("0",) if "generator-8" not in expected else ("0", "1"))
    gpus.require(stack, stack.generator.replicas)
    assert expected.items() <= placed(gpus, stack).items()


def test_the_environment_of_the_launcher_narrows_or_hides_the_gpus() -> None:
    assert Gpus.of_host({VISIBLE: "3, GPU-abc"}) == Gpus(("3", "GPU-abc"))
    for hidden in ("", "-1"):
        gpus = Gpus.of_host({VISIBLE: hidden})
        stack = stack_of(trainer={"nproc": 99})
        gpus.require(stack, 1)
        assert set(placed(gpus, stack).values()) == {None}


def test_the_gpus_of_the_host_are_counted_as_nvidia_smi_lists_them(tmp_path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = [
        f"GPU {n}: NVIDIA H200 (UUID: GPU-{n})\n  MIG 1g.18gb Device 0: (UUID: MIG-{n})" for n in range(3)
    ]
    tool.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Gpus.of_host({}) == Gpus(("0", "1", "2"), numbered_by_bus=True)


def test_colocated_generators_share_the_gpus_of_the_trainer_ranks_with_their_number() -> None:
    stack = stack_of(
        placement="colocated", trainer={"nproc": 2}, reference={"replicas": 1}, generator={"replicas": 2}
    )
    gpus = Gpus(tuple("012"))
    gpus.require(stack, 2)
    found = placed(gpus, stack)
    assert (found["trainer"], found["generator-0"], found["generator-1"], found["reference"]) == (
        "0,1",
        "0",
        "1",
        "2",
    )
    assert gpus.seats(stack) == {
        "0": ["generator-0", "trainer rank 0"],
        "1": ["generator-1", "trainer rank 1"],
        "2": ["reference"],
    }


def test_a_generator_without_a_rank_to_share_with_is_refused() -> None:
    stack = stack_of(placement="colocated", trainer={"nproc": 2}, generator={"replicas": 2})
    with pytest.raises(FailedPrecondition, match="3 generators cannot share the GPUs of 2 trainer ranks"):
        Gpus(tuple("0123")).require(stack, 3)


@pytest.mark.parametrize(
    ("names", "values", "shared"),
    [
        (("0",), {}, True),
        (("0",), {"placement": "separate"}, False),
        (("0",), {"generator": {"replicas": 2}}, False),
        (("0",), {"reference": {"replicas": 1}}, False),
        (("0",), {"trainer": {"backend": "gloo"}}, False),
        (("0", "1"), {}, False),
        (("0", "0"), {}, False),
        (("0", "1"), {"placement": "colocated"}, True),
    ],
)
def test_one_gpu_for_both_roles_is_shared_and_several_are_not_unless_the_stack_says_so(
    names: tuple[str, ...], values: dict[str, object], shared: bool
) -> None:
    assert Gpus(names).colocates(stack_of(**values)) is shared


@pytest.mark.parametrize(
    "values",
    [
        {"generator": {"tensor_parallel_size": 2}, "trainer": {"nproc": 2}},
        {"generator": {"replicas": 2}},
        {"trainer": {"backend": "gloo"}},
        {"trainer": {"attach": "elsewhere:1"}},
    ],
)
def test_a_stack_that_cannot_be_colocated_is_refused_by_its_key(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"generator\.(tensor_parallel_size|replicas) is"):
        stack_of(placement="colocated", **values)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "placement is auto"),
        ({"placement": "separate"}, "placement is separate"),
        ({"placement": "colocated", "trainer": {"replicas": 2}}, "set trainer.replicas to 1"),
    ],
)
def test_generators_sleep_only_where_one_trainer_shares_their_gpus(
    values: dict[str, object], why: str
) -> None:
    with pytest.raises(ValidationError, match=f"generator.sleep_while_training is true.*{why}"):
        stack_of(generator={"sleep_while_training": True}, **values)
    assert stack_of(placement="colocated", generator={"sleep_while_training": True})
