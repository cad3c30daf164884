"""Models of a stack that commands look at, and the fleet of an evaluation, which has another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_cli import own_fleet
from flotilla_cli.config import paths_of_stack
from flotilla_cli.stack_checks import stack_checks
from flotilla_core.config import StackConfig, dump_yaml, load_text
from flotilla_core.version import Version
from flotilla_launch import gpus


def test_the_model_folder_of_every_named_teacher_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    teachers = {"math": {"model": tmp_path / "empty"}, "code": {"model": "./absent"}, "same": {}}
    stack = StackConfig.model_validate({"teachers": teachers})
    found = {key: problem for key, _, problem in paths_of_stack(stack) if key.startswith("teachers.")}
    assert found == {
        "teachers.math.model": f"{tmp_path / 'empty'} has no config.json",
        "teachers.code.model": "there is no such folder as ./absent, and a name of the hub is organisation/model",
    }


def test_doctor_looks_at_the_model_of_every_teacher_that_is_started(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = tmp_path / "stack.yaml"
    model = str(tmp_path / "empty")
    teachers = {"math": {"replicas": 1, "model": model}, "idle": {"model": model}}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "teachers": teachers}))
    _, findings = stack_checks(str(file))
    found = {one.code: one.what for one in findings if one.code.startswith("teachers.")}
    assert found == {"teachers.math.model": f"{tmp_path / 'empty'} has no config.json"}


def test_the_fleet_of_an_evaluation_has_no_trainer_to_sleep_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "")
    model = tmp_path / "model"
    model.mkdir()
    generator = {"sleep_while_training": True}
    stack = StackConfig.model_validate(
        {"model": model, "placement": "colocated", "state_dir": tmp_path / "state", "generator": generator}
    )
    fleet = own_fleet.fleet_for(stack, own_fleet.Subject(model, "run", Version(0, 1), ""), "eval")
    assert load_text(StackConfig, dump_yaml(fleet)) == fleet, "as the launcher reads it"
    assert not fleet.generator.sleep_while_training
