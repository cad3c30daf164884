"""Runs whose samples a judge scores, on a whole fleet: they begin by its agreement, wait for it, and show no key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.runs import written
from flotilla_testing.scripted_judge import Request, Said, ScriptedJudge, scripted_judge
from flotilla_testing.stack import Stack, accepting_trainer, running_stack

pytestmark = pytest.mark.timeout(400)

KEY = "sk-Qz7-veryNearlySecret-000"
Run = Callable[..., dict[str, Any]]


def likes_length(request: Request) -> Said:
    """A judge by the last digit of the response's length."""
    response = (
        request.user.partition("<<<response ")[2].partition(">>>\n")[2].partition("\n<<<end of response")[0]
    )
    return Said(json.dumps({"reason": "its length", "score": len(response) % 10}))


def echoes(request: Request) -> Said:
    told = f"the key {request.headers.get('Authorization')} is wrong"
    return Said(status=401, body=json.dumps({"error": {"message": told}}))


@pytest.fixture(scope="module")
def judge() -> Iterator[ScriptedJudge]:
    with scripted_judge(likes_length) as judge:
        yield judge


@pytest.fixture(scope="module")
def stack(
    judge: ScriptedJudge, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("judged")
    description = {
        "name": "judged",
        "model": str(arithmetic / "model"),
        "generator": {"engine": "sim"},
        "trainer": {"replicas": 0},
        "judges": {"j": {"url": judge.url, "model": "m", "api_key_env": "JUDGE_KEY", "retries": 0}},
        "reward": {"environment": {"JUDGE_KEY": {"environment": "KEY_OF_TEST"}}},
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KEY_OF_TEST", KEY)
        with (
            running_stack(description, directory) as running,
            accepting_trainer("trainer", running.file, directory),
        ):
            yield running


@pytest.fixture
def run(
    stack: Stack, judge: ScriptedJudge, tiny_run: Callable[[str, int], dict[str, Any]], tmp_path: Path
) -> Run:
    """Runs to its end what a judge scores that has agreed with twenty examples."""
    judge.script = likes_length
    rows = [{"prompt": "p", "response": "x" * (n % 10), "label": n % 10} for n in range(20)]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def finished(name: str, at_least: float = 0.9) -> dict[str, Any]:
        term = {
            "name": "quality",
            "reward": {"judge": "j"},
            "rubric": f"How long is it? ({name})",
            "scale": [0, 9],
            "agreement": {"examples": str(tmp_path / "labelled.jsonl"), "at_least": at_least},
        }
        judge.requests.clear()
        return stack.run(written(tmp_path, tiny_run(name, 2) | {"rewards": [term]}))

    return finished


def test_samples_are_scored_by_a_judge_that_agrees_with_its_examples(
    stack: Stack, judge: ScriptedJudge, run: Run
) -> None:
    finished = run("good")
    assert finished["state"] == "succeeded", finished
    steps = stack.metrics(finished)
    asked = sum(step["judge/tokens/quality"] for step in steps) / 42
    assert asked == len(judge.requests) - 10  # the twenty examples are ten questions
    assert all(
        0 <= step["judge/cache_hit_ratio/quality"] < 1 and step["reward/error_rate"] == 0 for step in steps
    )
    assert all(request.headers["Authorization"] == f"Bearer {KEY}" for request in judge.requests)
    (term,) = stack.ok("run", "show", finished["run_id"])["config"]["rewards"]
    assert (term["reward"], term["rubric"]) == ("judge:j", "How long is it? (good)")
    (sample, *_) = stack.ok("samples", finished["run_id"])["samples"]
    assert {"quality", "quality[tokens]", "quality[score]"} <= {
        part["reward"] for part in sample["reward_parts"]
    }


def test_a_run_whose_judge_disagrees_is_refused_with_the_figure_and_draws_nothing(
    stack: Stack, judge: ScriptedJudge, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(request: Request) -> Said:
        score = 9 - json.loads(str(likes_length(request).content))["score"]
        return Said(json.dumps({"reason": "backwards", "score": score}))

    monkeypatch.setattr(judge, "script", backwards)
    finished = run("bad", 0.2)
    assert finished["state"] == "failed"
    assert "the judge of reward quality agrees with its examples by -1.000" in finished["reason"]
    assert stack.metrics(finished) == [] and len(judge.requests) <= 20


def test_samples_wait_for_a_judge_that_is_away_and_none_has_an_error(
    stack: Stack, judge: ScriptedJudge, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = iter(range(3))

    def script(request: Request) -> Said:
        of_run = "\np\n" not in request.user
        return Said(status=503) if of_run and next(away, None) is not None else likes_length(request)

    monkeypatch.setattr(judge, "script", script)
    finished = run("away")
    assert finished["state"] == "succeeded", finished
    assert next(away, None) is None
    assert [step["reward/error_rate"] for step in stack.metrics(finished)] == [0.0, 0.0]


def test_a_key_that_a_server_echoes_is_in_no_file_of_the_stack(
    stack: Stack, judge: ScriptedJudge, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(request: Request) -> Said:
        return likes_length(request) if "\np\n" in request.user else echoes(request)

    monkeypatch.setattr(judge, "script", script)
    finished = run("echo")
    assert finished["state"] == "failed" and "status 401" in finished["reason"]
    texts = [stack.flotilla("run", "show", finished["run_id"]).out, stack.flotilla("doctor").out]
    assert not [text for text in texts if KEY[:12] in text]
    files = [file for file in stack.directory.rglob("*") if file.is_file() and not file.is_symlink()]
    assert len(files) > 10
    assert [str(file) for file in files if KEY[:12].encode() in file.read_bytes()] == []
