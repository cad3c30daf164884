"""Rewards, advantages and losses that could not work are refused before a run, and no code of a user's runs here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.plan import functions
from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.functions import file_errors, loading_problems, trusted_warnings
from flotilla_core.config import EnvironmentConfig, EvaluationConfig, IsolationConfig, RunConfig
from flotilla_workers.jail.jail import find

REWARD = "def score(prompt, response, answer, info, scale=1.0):\n    return scale\n"


def run(rewards: list[dict[str, Any]], **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "steps": 3,
            "data": {"train": "a.jsonl"},
            "rewards": rewards,
            "algorithm": {"type": "grpo"} | algorithm,
        }
    )


def all_errors(config: RunConfig) -> list[str]:
    """Return the errors of the files, and those of loading the functions that they define."""
    return Chapter.of(file_errors(config), loading_problems(config, IsolationConfig())).errors


def test_rewards_of_ours_are_asked_for_by_their_service() -> None:
    unknown, parameter = all_errors(
        run([{"reward": "exactt"}, {"reward": "exact", "parameters": {"ignore_cas": True}}])
    )
    assert unknown.startswith("rewards[0].reward: ") and "did you mean exact?" in unknown
    assert parameter.startswith("rewards[1].reward: ") and "unknown parameter ignore_cas" in parameter


def test_a_function_that_runs_outside_of_the_jail_is_warned_of_by_its_key(tmp_path: Path) -> None:
    terms = [{"reward": "a.py:score"}, {"reward": "b.py:score", "trusted": True}]
    config = run(terms).model_copy(
        update={
            "evaluation": EvaluationConfig.model_validate(
                {"data": [{"name": "held", "path": "b.jsonl", "rewards": terms[1:]}]}
            )
        }
    )
    one, other = Chapter.of(trusted_warnings(config)).warnings
    assert one.startswith("rewards[1].reward: b.py:score is trusted, so it runs OUTSIDE OF THE JAIL")
    assert other.startswith("evaluation.data[0].rewards[0].reward: b.py:score is trusted")


WRONG_REWARDS = {
    "syntax": ("def score(prompt:", {}, "is not Python"),
    "name": ("other = 1\n", {}, "defines no function score (it defines other)"),
    "parameter": (REWARD, {"sacle": 2}, "sacle"),
    "signature": ("def score(response):\n    return 1.0\n", {}, "cannot be called with"),
    "import": ("import no_such_module\n" + REWARD, {}, "No module named 'no_such_module'"),
    "raises": ("raise RuntimeError('not today')\n" + REWARD, {}, "not today"),
    "decorated": (f"import functools\n@functools.cache\n{REWARD}", {"sacle": 2}, "sacle"),
    "number": ("score = 5\n", {}, "is not a function but int"),
}


def test_path_that_is_too_long_is_refused_like_a_missing_file() -> None:
    config = run([{"reward": f"{'x/' * 2000}f.py:f"}]).with_paths_from(Path("/y" * 100))
    (error,) = Chapter.of(file_errors(config)).errors
    assert "does not exist" in error


def test_rewards_of_the_users_are_loaded_before_the_run(tmp_path: Path) -> None:
    terms = []
    for name, (content, parameters, _) in WRONG_REWARDS.items():
        (tmp_path / f"{name}.py").write_text(content)
        terms.append({"reward": f"{tmp_path}/{name}.py:score", "parameters": parameters})
    errors = all_errors(run(terms))
    assert len(errors) == len(WRONG_REWARDS)
    for index, (name, (_, _, told)) in enumerate(WRONG_REWARDS.items()):
        key = f"rewards[{index}].reward: "
        assert any(error.startswith(key) and told in error for error in errors), (name, errors)


def test_an_import_that_ends_its_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(3)\n" + REWARD)
    (error,) = all_errors(run([{"reward": f"{tmp_path}/mine.py:score"}]))
    assert error.startswith("rewards[0].reward: ") and "ends the process (code 3)" in error


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("def mine(things, scale=1.0):\n    return things\n", "sacle"),
        ("import no_such_module\ndef mine(things, sacle): ...\n", "no_such_module"),
        ("import torch\nimport no_such_module\ndef mine(things, sacle): ...\n", "imports no_such_module"),
        ("import torch\ndef mine(things): ...\n", "sacle"),
    ],
    ids=["parameter", "import", "import beside torch", "parameter beside torch"],
)
def test_advantages_and_losses_of_the_users_are_checked_before_the_run(
    tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(content)
    mine = {"type": f"{tmp_path}/mine.py:mine", "parameters": {"sacle": 2}}
    advantage, loss = all_errors(run([{"reward": "exact"}], advantage=mine, loss=mine))
    assert advantage.startswith("algorithm.advantage.type: ") and told in advantage
    assert loss.startswith("algorithm.loss.type: ") and told in loss


def test_an_environment_that_does_not_load_is_an_error_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(
        "from flotilla_environment import Environment\n"
        "class Guess(Environment):\n    def __init__(self, *, largest=10): ...\n"
    )

    def errors(name: str, **parameters: Any) -> list[str]:
        environment = {"name": name, "parameters": parameters}
        return all_errors(
            run([{"reward": "exact"}]).model_copy(update={"environment": EnvironmentConfig(**environment)})
        )

    assert errors(f"{file}:Guess", largest=3) == []
    (unknown,), (gone,), (mistyped,) = (
        errors(f"{file}:Guess", larges=3),
        errors(f"{file}:Gues"),
        errors("calculato"),
    )
    assert unknown.startswith("environment.name: ") and "unexpected keyword argument 'larges'" in unknown
    assert "defines no function Gues" in gone and "did you mean calculator?" in mistyped


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("def slove(task): ...\n", "defines no function solve (it defines slove)"),
        ("def solve(task:\n", "is not Python"),
        ("def solve(): ...\n", "cannot be called with"),
        ("from openai import OpenAI\n\nasync def solve(task): ...\n", ""),
    ],
)
def test_the_function_of_an_agent_is_looked_for_in_its_file(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "agent.py").write_text(content)
    agent = EnvironmentConfig(name="agent", parameters={"function": "agent.py:solve"})
    config = run([{"reward": "exact"}]).model_copy(update={"environment": agent}).with_paths_from(tmp_path)
    errors = Chapter.of(file_errors(config)).errors
    assert len(errors) == bool(says) and says in "".join(errors)
    assert not errors or errors[0].startswith("environment.parameters.function: ")


def test_functions_that_work_are_no_problem_and_never_run_here(tmp_path: Path) -> None:
    file = tmp_path / "never_imported_here.py"
    file.write_text("print('told to nobody')\n" + REWARD + "def mine(things, *, scale): ...\n")
    config = run(
        [{"reward": f"{file}:score", "parameters": {"scale": 2}}, {"reward": "exact"}],
        loss={"type": f"{file}:mine", "parameters": {"scale": 2}},
    )
    assert not [*file_errors(config), *loading_problems(config, IsolationConfig())]
    assert not [name for name in sys.modules if "never_imported_here" in name]


@pytest.mark.skipif(not find().level, reason="this host has no jail")
def test_a_file_is_imported_in_the_jail_unless_its_run_trusts_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("open('/etc/passwd').close()\n" + REWARD)
    (error,) = all_errors(run([{"reward": f"{file}:score"}]))
    assert "/etc/passwd" in error
    assert all_errors(run([{"reward": f"{file}:score", "trusted": True}])) == []


@pytest.mark.parametrize(
    "head",
    [
        "solution_str, ground_truth, extra_info=None, scale=1",
        "completions, level, scale, **columns",
        "prompt, responses, answer, info, scale",
    ],
)
def test_functions_of_every_form_that_the_service_takes_are_no_problem(tmp_path: Path, head: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score({head}):\n    return 1.0\n")
    config = run([{"reward": f"{tmp_path}/mine.py:score", "parameters": {"scale": 2}}])
    assert not [*file_errors(config), *loading_problems(config, IsolationConfig())]


def test_an_import_without_an_end_is_a_warning_after_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "LONGEST_CHECK_S", 1.0)
    file = tmp_path / "mine.py"
    file.write_text(REWARD + "while True:\n    pass\n")
    began = time.monotonic()
    found = Chapter.of(loading_problems(run([{"reward": f"{file}:score"}]), IsolationConfig()))
    (warning,) = found.warnings
    assert time.monotonic() - began < 10
    assert found.errors == [] and "took longer than 1 s" in warning and "rewards[0].reward" in warning


def test_a_file_that_changed_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    config = run([{"reward": f"{file}:score"}])
    for content, told in (("1 / 0\n", "division by zero"), ("[][5]\n", "list index out of range")):
        file.write_text(REWARD + content)
        (error,) = all_errors(config)
        assert told in error
