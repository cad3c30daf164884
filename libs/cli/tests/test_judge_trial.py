"""`flotilla reward test` and `run plan` ask the judges of a run, with their keys, and tell how far they agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers

from flotilla_testing.scripted_judge import Request, Said, ScriptedJudge, scripted_judge

Command = Callable[..., tuple[int, str, str]]
KEY = "sk-Qz7-veryNearlySecret-000"


def script(request: Request) -> Said:
    """A judge that likes responses of one digit, and knows one key."""
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return Said(status=401, body=json.dumps({"error": {"message": f"not {request.headers}"}}))
    response = request.user.partition("<<<response ")[2].splitlines()[1]
    return Said(json.dumps({"verdict": "yes" if len(response) == 1 else "no"}))


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedJudge]:
    """A run with a judge, twenty labelled examples, and a stack whose model has a tokenizer alone."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    words = tokenizers.models.WordLevel({"_": 0}, unk_token="_")
    tokenizers.Tokenizer(words).save("model/tokenizer.json")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = [
        {"prompt": "p", "response": "1" * (1 + n % 2), "label": ("yes", "no")[n % 2]} for n in range(20)
    ]
    Path("labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    Path("short.md").write_text("# Short\n\nIs it short?\n")
    Path("run.yaml").write_text(
        "name: count\nsteps: 1\ndata: {train: train.jsonl}\n"
        "rewards: [{name: short, reward: {judge: j}, rubric: short.md, verdicts: {yes: 1, no: 0},\n"
        "           agreement: {examples: labelled.jsonl, at_least: 0.9}}]\n"
    )
    monkeypatch.setenv("KEY_OF_JUDGE", KEY)
    with scripted_judge(script) as judge:
        Path("stack.yaml").write_text(
            f"model: model\njudges: {{j: {{url: '{judge.url}', model: m, api_key_env: KEY_OF_JUDGE, retries: 0}}}}\n"
        )
        yield judge


def test_a_judge_is_tried_and_its_agreement_is_told(flotilla: Command, judge: ScriptedJudge) -> None:
    code, out, err = flotilla("reward", "test", "run.yaml", "-n", "1", "--response", "4", "--response", "44")
    assert code == 0, err
    assert "short=1" in out and "short[tokens]=42" in out and "# Short" in judge.requests[0].user
    assert "the judge of short agrees by 1.000 (share of equal verdicts over 20 examples, at least 0.9" in err
    assert len(judge.requests) == 2 + 2, "the twenty examples are two questions"
    code, out, err = flotilla("reward", "test", "run.yaml", "-n", "1", "--response", "4", "--json")
    assert json.loads(out)["judges"] == [{"reward": "short", "agreement": 1.0, "at_least": 0.9}]


def test_a_judge_that_agrees_too_little_fails_the_trial(flotilla: Command, judge: ScriptedJudge) -> None:
    rows = [json.loads(line) for line in Path("labelled.jsonl").read_text().splitlines()]
    rows = [row | {"label": ("yes", "no")[place // 10]} for place, row in enumerate(rows)]
    Path("labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = flotilla("reward", "test", "run.yaml", "-n", "1", "--response", "4")
    assert code == 1 and "the judge of short agrees by 0.500" in err


def test_a_plan_has_the_agreement_as_a_line_or_as_the_reason_against_the_run(
    flotilla: Command, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flotilla.coordinator.v1.run_pb2 import Plan

    monkeypatch.setattr("flotilla_cli.run.plan_run", lambda *_: Plan())
    code, out, err = flotilla("run", "plan", "run.yaml")
    assert code == 0, err
    assert "judge of short" in out and "1.000" in out
    monkeypatch.setattr(judge, "script", lambda _: Said('{"verdict": "yes"}'))
    code, _, err = flotilla("run", "plan", "run.yaml")
    assert code != 0 and "error: the judge of reward short agrees by 0.500" in err


def test_a_plan_without_the_key_leaves_the_judge_to_the_start(
    flotilla: Command, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flotilla.coordinator.v1.run_pb2 import Plan

    monkeypatch.setattr("flotilla_cli.run.plan_run", lambda *_: Plan())
    monkeypatch.delenv("KEY_OF_JUDGE")
    code, _, err = flotilla("run", "plan", "run.yaml")
    assert (
        code == 0
        and "the judge of reward short was not asked from here" in err
        and "no variable KEY_OF_JUDGE" in err
    )
    assert judge.requests == []


def test_a_plan_asks_the_other_judges_where_one_cannot_be_asked(
    flotilla: Command, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flotilla.coordinator.v1.run_pb2 import Plan

    monkeypatch.setattr("flotilla_cli.run.plan_run", lambda *_: Plan())
    gone = "{name: gone, reward: {judge: j}, rubric: r, pairs: true, agreement: {examples: gone.jsonl}}"
    run = Path("run.yaml")
    run.write_text(run.read_text().replace("rewards: [", f"rewards: [{gone}, "))
    code, out, err = flotilla("run", "plan", "run.yaml")
    assert code == 0 and "the judge of reward gone was not asked from here" in err
    assert "judge of short" in out and "1.000" in out


def test_a_key_comes_from_where_the_stack_says_and_is_in_no_output(
    flotilla: Command, judge: ScriptedJudge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KEY_OF_JUDGE")
    secret = tmp_path / "secret"
    secret.write_text(KEY + "\n")
    secret.chmod(0o600)
    stack = Path("stack.yaml")
    stack.write_text(stack.read_text() + f"reward: {{environment: {{KEY_OF_JUDGE: {{file: {secret}}}}}}}\n")
    code, out, err = flotilla("reward", "test", "run.yaml", "-n", "1", "--response", "4")
    assert code == 0, err
    secret.write_text(KEY[:-1] + "1\n")
    wrong, out_of_it, err_of_it = flotilla("reward", "test", "run.yaml", "-n", "1", "--response", "4")
    assert wrong == 1 and "not shown: it holds a part of the key" in out_of_it + err_of_it
    shown = flotilla("config", "validate", "stack.yaml")[1:]
    for text in (out, err, out_of_it, err_of_it, *shown):
        assert KEY[:12] not in text


def test_a_run_with_a_judge_that_the_stack_lacks_is_refused_by_the_trial(
    flotilla: Command, judge: ScriptedJudge
) -> None:
    Path("stack.yaml").write_text("model: model\n")
    code, _, err = flotilla("reward", "test", "run.yaml", "-n", "1")
    assert code != 0 and "there is no judge j" in err
