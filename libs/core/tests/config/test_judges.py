"""Judges of a stack and their terms in a run: what belongs together, where a rubric comes from, and no key anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import RunConfig, StackConfig, dump_yaml, load_text
from flotilla_core.errors import InvalidConfig

RUN = """
name: polite
steps: 1
data: {train: train.jsonl}
rewards:
  - name: quality
    reward: {judge: helper}
    rubric: RUBRIC
    scale: [1, 10]
    agreement: {examples: labelled.jsonl, at_least: 0.7}
"""
STACK = "judges: {helper: {url: https://api.example.com/v1/, model: big, KEYS}}"


def run(*overrides: str, rubric: str = "'Is it polite?'", **more: Any) -> RunConfig:
    return load_text(RunConfig, RUN.replace("RUBRIC", rubric), overrides=overrides, **more)


def test_a_term_of_a_judge_is_named_by_it_and_reads_back_as_it_was(tmp_path: Path) -> None:
    config = run()
    (term,) = config.rewards
    assert (term.reward, term.shown, term.scale) == ("judge:helper", "quality", (1.0, 10.0))
    assert load_text(RunConfig, dump_yaml(config)) == config
    assert config.judged_terms == (term,)


def test_words_of_a_verdict_may_be_yes_and_no() -> None:
    (term,) = run("rewards.0.scale=null", "rewards.0.verdicts={yes: 1, no: 0}").rewards
    assert term.verdicts == {"yes": 1.0, "no": 0.0}


def test_the_text_of_a_rubric_file_is_part_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "# Polite\n\n" + "Count thanks. " * 400
    Path("polite.md").write_text(text + "\n")
    (term,) = run(rubric="polite.md", resolve_paths=True).rewards
    assert term.rubric == text.strip()
    assert term.agreement is not None and term.agreement.examples == tmp_path / "labelled.jsonl"
    Path("polite.md").write_text(" \n")
    with pytest.raises(InvalidConfig, match="holds no rubric"):
        run(rubric="polite.md", resolve_paths=True)
    with pytest.raises(InvalidConfig, match=r"other\.txt"):
        run(rubric="other.txt", resolve_paths=True)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rewards.0.reward=exact", "rubric is for a judge, and reward names none"),
        ("rewards.0.reward={judge: Big One}", "names no judge"),
        ("rewards.0.reward={judge: [helper]}", r"expected a name, path.py:function, or \{judge: NAME\}"),
        ("rewards.0.reward={model: helper}", "rubric is for a judge"),
        ("rewards.0.rubric=''", "needs a rubric"),
        ("rewards.0.scale=null", "needs one of scale, verdicts and pairs"),
        ("rewards.0.pairs=true", "needs one of scale, verdicts and pairs"),
        ("rewards.0.scale=[10, 1]", "has the scale 10 to 1"),
        ("rewards.0.timeout_s=3", "timeout_s is for a function, .* judges.helper of the stack has its own"),
        ("rewards.0.parameters={a: 1}", "parameters is for a function"),
    ],
)
def test_what_does_not_belong_together_is_refused_by_its_key(override: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        run(override)


@pytest.mark.parametrize("verdicts", ["{yes: 1}", "{yes: 1, Yes: 0}"])
def test_verdicts_are_words_that_differ(verdicts: str) -> None:
    with pytest.raises(InvalidConfig, match="needs two verdicts or more"):
        run("rewards.0.scale=null", f"rewards.0.verdicts={verdicts}")


def test_a_judge_has_one_place_of_its_key_or_none() -> None:
    stack = load_text(StackConfig, STACK.replace("KEYS", "api_key_env: JUDGE_KEY"))
    assert stack.judges["helper"].url == "https://api.example.com/v1"
    assert stack.judges["helper"].api_key_env == "JUDGE_KEY"
    with pytest.raises(InvalidConfig, match="name one of api_key_env and api_key_file"):
        load_text(StackConfig, STACK.replace("KEYS", "api_key_env: JUDGE_KEY, api_key_file: key"))


@pytest.mark.parametrize(
    "wrong",
    [
        STACK.replace("KEYS", "api_key_env: sk-verySecret000"),
        STACK.replace("KEYS", "api_key_env: verySecret000"),
        STACK.replace("KEYS", "api_key_env: A").replace("api.example", "me:verySecret000@api.example"),
        STACK.replace("KEYS", "api_key_env: A").replace("/v1/", "/v1?key=verySecret000"),
        STACK.replace("KEYS", "api_key: verySecret000"),
        STACK.replace("KEYS", "request: {model: verySecret000}"),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_shown(wrong: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        load_text(StackConfig, wrong)
    assert "verySecret000" not in str(raised.value)
