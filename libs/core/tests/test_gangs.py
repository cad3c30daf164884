"""Gangs of a stack: their roles, their slots, and where the file describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import StackConfig, dump_yaml, load_text
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.gangs import (
    agent_name,
    agent_of,
    agents_of,
    gang_of,
    model_of,
    ranks_beside,
    roles_of,
    section_of_process,
    slots_of_role,
    spread_gangs,
    started,
    with_model,
)
from flotilla_core.roles import role_of_process, section_of


def stack_of(**values: Any) -> StackConfig:
    return StackConfig.model_validate({"model": "/model", **values})


@pytest.mark.parametrize(
    ("process", "role", "section"),
    [
        ("trainer", "policy", "trainer"),
        ("trainer-1", "policy", "trainer"),
        ("anything-else", "policy", "trainer"),
        ("critic-a", "critic", "critic"),
        ("teacher", "teacher", "teacher"),
        ("teacher-0", "teacher", "teacher"),
        ("teacher-math", "teacher-math", "teachers.math"),
        ("teacher-math-0", "teacher-math", "teachers.math"),
        ("teacher-code_2-a", "teacher-code_2", "teachers.code_2"),
        ("reward_model-helpful", "reward_model-helpful", "reward_models.helpful"),
        ("reward_model-helpful-0", "reward_model-helpful", "reward_models.helpful"),
        ("reward-0", "policy", "trainer"),
    ],
)
def test_the_name_of_a_process_says_its_role_and_its_section(process: str, role: str, section: str) -> None:
    assert role_of_process(process) == role
    assert section_of(role) == section


def test_every_slot_of_a_named_teacher_says_that_teachers_role() -> None:
    teachers = {"math": {"replicas": 2}, "code": {"replicas": 1}, "idle": {}}
    stack = stack_of(teacher={"replicas": 1}, teachers=teachers)
    assert roles_of(stack)[-4:] == ("teacher", "teacher-math", "teacher-code", "teacher-idle")
    slots = {role: slots_of_role(stack, role) for role in roles_of(stack)}
    assert slots["teacher-math"] == ["teacher-math-0", "teacher-math-1"]
    assert (slots["teacher-code"], slots["teacher-idle"]) == (["teacher-code"], [])
    assert all(role_of_process(slot) == role for role, names in slots.items() for slot in names)
    assert [started(stack, f"teacher-{name}") for name in ("math", "idle", "absent")] == [True, False, False]


def test_a_named_teacher_is_described_as_the_teacher_is(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    text = "teachers:\n  math: {model: large, nproc: 2}\n  code: {attach: 'host:1'}\n"
    stack = load_text(StackConfig, text).with_paths_from(tmp_path)
    assert gang_of(stack, "teacher-math").nproc == 2
    # No folder where the text was read: a name stays as it is.
    assert (model_of(stack, "teacher-math"), model_of(stack, "teacher-code")) == ("large", stack.model)
    known = stack_of(teachers={"math": {"model": tmp_path / "large"}})
    assert model_of(known, "teacher-math") == tmp_path / "large"
    assert load_text(StackConfig, dump_yaml(known)) == known
    assert started(stack, "teacher-code")


def test_the_folder_of_a_named_teacher_is_taken_from_the_directory_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    monkeypatch.chdir(tmp_path)
    stack = load_text(StackConfig, "teachers: {math: {model: large}}", resolve_paths=True)
    assert model_of(stack, "teacher-math") == tmp_path / "large"


def test_a_gang_of_a_teacher_that_the_stack_does_not_name_is_told_so() -> None:
    with pytest.raises(
        FailedPrecondition, match=r"no teacher 'mth'.*it names math, code.*write teachers\.mth"
    ):
        gang_of(stack_of(teachers={"math": {}, "code": {}}), role_of_process("teacher-mth"))


def test_a_reward_model_has_a_model_of_its_own_and_is_started_by_default(tmp_path: Path) -> None:
    stack = stack_of(teachers={"math": {}}, reward_models={"helpful": {"model": tmp_path}})
    role = "reward_model-helpful"
    assert roles_of(stack)[-2:] == ("teacher-math", role)
    assert (slots_of_role(stack, role), started(stack, role), model_of(stack, role)) == (
        [role],
        True,
        tmp_path,
    )
    assert model_of(with_model(stack, role, Path("/copy")), role) == Path("/copy")
    assert load_text(StackConfig, dump_yaml(stack)) == stack
    with pytest.raises(InvalidConfig, match=r"reward_models\.helpful\.model"):
        load_text(StackConfig, "reward_models: {helpful: {}}")
    with pytest.raises(FailedPrecondition, match=r"no reward model 'kind'.*it names helpful"):
        gang_of(stack, role_of_process("reward_model-kind"))


@pytest.mark.parametrize(
    ("teachers", "said"),
    [
        ("{Math: {}}", "teachers.Math: expected a string that should match pattern"),
        ("{math-1: {}}", "teachers.math-1: expected a string that should match pattern"),
        ("{'0': {}}", "teachers.0: expected a string that should match pattern"),
        ("{math: {nprok: 2}}", "unknown key teachers.math.nprok; did you mean teachers.math.nproc"),
        ("{math: {nproc: 0}}", "teachers.math.nproc: expected greater than or equal to 1"),
        ("{math: 3}", "teachers.math: expected a mapping of keys to values, got the number 3"),
        (f"{{{', '.join(f'a{n}: {{}}' for n in range(17))}}}", "at most 16 items"),
    ],
)
def test_what_is_wrong_with_named_teachers_is_said_by_their_key(teachers: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_text(StackConfig, f"teachers: {teachers}", source="stack.yaml")
    assert said in str(caught.value) and str(caught.value).startswith("stack.yaml:1: ")


@pytest.mark.parametrize("role", ["policy", "critic", "teacher", "teacher-math"])
def test_another_folder_takes_the_place_of_the_model_of_a_role(role: str) -> None:
    shared = stack_of(teachers={"math": {}})
    assert model_of(with_model(shared, role, Path("/copy")), role) == Path("/copy")
    own = stack_of(
        critic={"model": "/own"}, teacher={"model": "/own"}, teachers={"math": {"model": "/own"}, "code": {}}
    )
    changed = with_model(own, role, Path("/copy"))
    assert model_of(changed, role) == Path("/copy")
    assert [one for one in roles_of(own) if model_of(changed, one) != model_of(own, one)] == (
        [role] if role != "policy" else ["policy", "reference", "teacher-code"]
    )


HOSTS = [{"name": "a", "ranks": 2}, {"name": "b", "ranks": 1}, {"name": "at-c", "ranks": 1}]


def test_a_gang_on_several_hosts_needs_an_agent_on_each_but_the_first() -> None:
    stack = stack_of(trainer={"nproc": 4, "hosts": HOSTS, "replicas": 2}, critic={"replicas": 1})
    assert agents_of(stack, "critic") == []
    assert agents_of(stack, "policy") == [
        ("trainer-0", "b", 1),
        ("trainer-0", "at-c", 1),
        ("trainer-1", "b", 1),
        ("trainer-1", "at-c", 1),
    ]
    assert stack.trainer.ranks_here == 2


def test_a_front_and_its_agents_share_a_section_and_have_the_ranks_of_their_hosts() -> None:
    section = {"nproc": 4, "hosts": HOSTS, "replicas": 1}
    stack = stack_of(
        trainer={"replicas": 2}, critic={**section, "dtype": "bfloat16"}, teachers={"at": section}
    )
    assert spread_gangs(stack) == [
        ["critic", "critic-at-b", "critic-at-at-c"],
        ["teacher-at", "teacher-at-at-b", "teacher-at-at-at-c"],
    ]
    for front, *agents in spread_gangs(stack):
        assert [ranks_beside(stack, name) for name in (front, *agents)] == [2, 1, 1]
    assert section_of_process(stack, "critic-at-b") == stack.critic
    assert section_of_process(stack, "teacher-at-at-b") == stack.teachers["at"]
    assert ranks_beside(stack, "trainer-1") == 1


@pytest.mark.parametrize("gang", ["trainer", "trainer-1", "teacher-math", "teacher-math-0", "teacher-at"])
def test_the_name_of_an_agent_says_its_gang_and_its_host(gang: str) -> None:
    section = {"nproc": 4, "hosts": HOSTS}
    stack = stack_of(trainer=section, teachers={"math": section, "at": section})
    for host in ("b", "at-c"):
        assert agent_of(stack, agent_name(gang, host)) == (gang, host)


@pytest.mark.parametrize("name", ["trainer", "trainer-at-a", "trainer-at-x", "critic-at-b", "teacher-x-at-b"])
def test_an_agent_that_no_gang_needs_is_told_so(name: str) -> None:
    stack = stack_of(trainer={"nproc": 4, "hosts": HOSTS})
    with pytest.raises(FailedPrecondition, match="no gang of the stack has ranks at"):
        agent_of(stack, name)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("[{name: a, ranks: 1}]", "hosts have 1 ranks together, but nproc is 2"),
        ("[{name: a, ranks: 1}, {name: a, ranks: 1}]", "hosts names one twice: a, a"),
        ("[{name: 0, ranks: 2}]", "trainer.hosts[0].name"),
        ("[{name: a, ranks: 0}, {name: b, ranks: 2}]", "trainer.hosts[0].ranks"),
    ],
)
def test_hosts_that_cannot_hold_the_ranks_are_refused(hosts: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_text(StackConfig, f"trainer: {{nproc: 2, hosts: {hosts}}}", source="stack.yaml")
    assert said in str(caught.value)
