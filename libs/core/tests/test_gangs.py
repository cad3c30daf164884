"""Gangs of a stack: their roles, their slots, and where the file describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import StackConfig, dump_yaml, load_text
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.gangs import gang_of, model_of, roles_of, slots_of_role, started
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
