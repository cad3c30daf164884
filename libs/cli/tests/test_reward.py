"""`flotilla reward test`: a user's rewards are tried by the reward service's own code, without a fleet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from flotilla_cli.reward import _response_with
from flotilla_coordinator.data.prompts import Prompt
from flotilla_core.config import RunConfig, load_text
from flotilla_core.generated_tasks import COLUMN
from flotilla_testing.hostile_text import HOSTILE, SEQUENCES, obeyed

Command = Callable[..., tuple[int, str, str]]

REWARDS = """
def shape(prompt, response, answer, info, *, longest=3):
    print("seen", response)
    return float(len(response) <= longest)


def level(prompt, response, answer, info):
    return info["level"]


def slow(prompt, response, answer, info):
    while True:
        pass
"""


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file, its data and rewards, and a stack whose model has a tokenizer alone."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    words = tokenizers.models.WordLevel({"_": 0}, unk_token="_")
    tokenizers.Tokenizer(words).save("model/tokenizer.json")
    Path("stack.yaml").write_text("model: model\n")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(8)]
    rows[2].pop("level")
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(REWARDS)
    Path("run.yaml").write_text(
        "name: count\nsteps: 1\ndata: {train: train.jsonl}\n"
        "rewards: [{reward: exact}, {reward: 'mine.py:shape', weight: 0.5, parameters: {longest: 0}}]\n"
    )


def samples(flotilla: Command, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    ended, out, err = flotilla("reward", "test", *arguments, "--json")
    assert ended == code, err
    found: list[dict[str, Any]] = json.loads(out)["samples"]
    return found


def test_rewards_of_a_run_are_tried_on_answers_and_empty_responses(flotilla: Command) -> None:
    found = samples(flotilla, "run.yaml", "-n", "2")
    assert [(one["row"], one["response"], one["reward"]) for one in found] == [
        (1, "1", 1.0),
        (1, "", 0.5),
        (2, "2", 1.0),
        (2, "", 0.5),
    ]
    parts = [(Path(part["reward"]).name, part["value"]) for part in found[0]["reward_parts"]]
    assert parts == [("exact", 1.0), ("mine.py:shape", 0.0)]


@pytest.mark.parametrize(
    "tags, response",
    [
        ([None], "<answer>4</answer>"),
        ([None, "solution", None], "<answer>4</answer><solution>4</solution>"),
        (["", "answer"], "4"),
        ([], "4"),
    ],
)
def test_the_answer_of_a_generated_task_stands_between_the_tags_of_all_its_terms(
    tags: list[str | None], response: str
) -> None:
    terms = [{"reward": "reasoning_gym", "parameters": {} if tag is None else {"tag": tag}} for tag in tags]
    named = [term | {"name": f"term-{place}"} for place, term in enumerate(terms)]
    text = json.dumps(
        {"name": "a", "steps": 1, "data": {"train": "a"}, "rewards": [*named, {"reward": "exact"}]}
    )
    config = load_text(RunConfig, text, source="test")
    task, other = (Prompt(0, 0, "", np.zeros(0, np.int32), "4", info) for info in ({COLUMN: {}}, {}))
    assert (_response_with(task, config), _response_with(other, config)) == (response, "4")


def test_a_function_of_verl_is_tried_as_it_is_with_its_parts(flotilla: Command) -> None:
    Path("verl.py").write_text(
        "def judge(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'ok/right': solution_str == ground_truth}\n"
    )
    code, out, err = flotilla("reward", "test", "verl.py:judge", "--data", "train.jsonl", "-n", "1")
    assert code == 0, err
    assert "verl.py:judge: called as verl's compute_score" in err
    assert "verl.py:judge=0.5, verl.py:judge[ok/right]=1" in out


def test_a_function_of_groups_sees_the_responses_to_a_row_and_the_verdicts_are_shown(
    flotilla: Command,
) -> None:
    Path("rank.py").write_text(
        "def judge(completions, completion_ids, trainer_state, **columns):\n"
        "    assert len(completion_ids) == 2 and (trainer_state.global_step, trainer_state.max_steps) == (0, 1)\n"
        "    return [{'score': len(one), 'of': len(completions), 'extracted': one} for one in completions]\n"
        "class Unverifiable(Exception): pass\n"
        "def blames(solution_str): raise Unverifiable('endless') if solution_str else ZeroDivisionError\n"
    )
    data = ("--data", "train.jsonl", "-n", "2")
    first, *_ = samples(flotilla, "rank.py:judge", *data)
    (verdict,) = first["verdicts"]
    assert (verdict["parts"], verdict["extracted"], verdict["value"]) == ({"of": 2.0}, "1", 1.0)
    assert verdict["version"].startswith("sha256:") and verdict["seconds"] > 0
    code, _, err = flotilla("reward", "test", "rank.py:judge", *data)
    assert code == 0 and "rank.py:judge is sha256:" in err
    blamed, failed, *_ = samples(flotilla, "rank.py:blames", *data, code=1)
    assert (blamed["reward"], blamed["failure"], blamed["verdicts"][0]["outcome"]) == (
        0.0,
        "",
        "unverifiable",
    )
    assert (failed["verdicts"][0]["outcome"], failed["verdicts"][0]["line"]) == ("error", 5)
    *_, err = flotilla("reward", "test", "rank.py:blames", *data)
    assert "2 of 4 unverifiable: endless" in err


def test_the_table_shows_what_differs_between_the_prompts(flotilla: Command) -> None:
    rows = [
        {"prompt": f"You are a calculator with a long introduction.\n{n}+1=", "level": n} for n in range(2)
    ]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tried = ("reward", "test", "mine.py:level", "--response", "4")
    _, out, _ = flotilla(*tried, "--data", "long.jsonl")
    assert [line.split()[-1] for line in out.splitlines()] == ["PROMPT", "0+1=", "1+1="]
    _, out, _ = flotilla(*tried, "--data", "long.jsonl", "-n", "1")
    assert "You are a calculator" in out


def test_failing_function_is_told_with_its_line_and_traceback(flotilla: Command) -> None:
    code, out, _ = flotilla("reward", "test", "mine.py:level", "--data", "train.jsonl", "--response", "4")
    assert code == 1
    place = Path("mine.py").absolute()
    assert f"1 of 5 failed, row 3 first: reward {place}:level: {place}:8 in level: KeyError: 'level'" in out
    assert 'return info["level"]' in out and "worker.py" not in out


def test_one_reward_keeps_its_parameters_of_the_run(flotilla: Command) -> None:
    found = samples(flotilla, "mine.py:shape", "run.yaml", "-n", "1", "--response", "1")
    assert [one["reward"] for one in found] == [0.0], "longest is 0 there, and its weight 0.5"
    found = samples(flotilla, "mine.py:shape", "--data", "train.jsonl", "-n", "1", "--response", "1")
    assert [one["reward"] for one in found] == [1.0]


def test_what_a_reward_prints_is_shown_as_text_and_up_to_a_limit(flotilla: Command) -> None:
    Path("loud.py").write_text(
        "import os, subprocess\n"
        "def reward(prompt, response, answer, info):\n"
        f"    os.write(2, {(HOSTILE + chr(10)).encode('utf-8', 'surrogatepass')!r})\n"
        "    os.write(2, b'begun ' + b'x' * (3 << 20) + b'unseen\\nlast')\n"
        "    return 1.0\n"
    )
    code, _, err = flotilla("reward", "test", "loud.py:reward", "--data", "train.jsonl", "-n", "1")
    assert code == 0 and "aG9zdGlsZQ==" in err and "begun xxx" in err
    assert not obeyed(err) and not [one for one in SEQUENCES if one in err]
    assert len(err) < 4 << 10 and "unseen" not in err
    assert re.search(r"and [0-9,]{7,} bytes more of what was printed, which are not shown", err)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "it is a named pipe"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40), "consists of holes"),
        (lambda path: path.write_text('{"response": "1"}\n{"response": 1}\n'), 'has no text "response"'),
        (lambda path: path.write_text("9\n"), "not a JSON object"),
        (lambda path: None, "does not exist"),
    ],
    ids=["pipe", "holes", "number", "no object", "missing"],
)
def test_a_file_of_responses_is_read_within_the_bounds_of_data_files(
    flotilla: Command, make: Callable[[Path], object], told: str
) -> None:
    make(Path("responses.jsonl"))
    tried = ("reward", "test", "exact", "--data", "train.jsonl", "--responses", "responses.jsonl")
    code, _, err = flotilla(*tried)
    assert code == 2 and told in err and "next:" in err, err


def test_it_is_told_how_functions_run_and_which_are_trusted(flotilla: Command) -> None:
    trusted = ("rewards=[{reward: 'mine.py:shape', trusted: true}]", "-n", "1")
    outside = "mine.py:shape is trusted, so it runs OUTSIDE OF THE JAIL"
    for unsafe, arguments, told, silent in (
        (False, ("run.yaml", "-n", "1"), "functions of users run at level", "OUTSIDE"),
        (False, ("run.yaml", *trusted), outside, "run at level"),
        (True, ("run.yaml", "-n", "1"), "NOT in a jail, but as the service itself", "OUTSIDE"),
    ):
        Path("stack.yaml").write_text(
            f"model: model\nreward: {{isolation: {{unsafe: {str(unsafe).lower()}}}}}\n"
        )
        code, _, err = flotilla("reward", "test", *arguments)
        assert code == 0 and told in err and silent not in err, err


def test_given_responses_are_scored_row_by_row(flotilla: Command) -> None:
    Path("responses.jsonl").write_text('{"response": "1"}\n{"response": "nine"}\n')
    found = samples(flotilla, "exact", "--data", "train.jsonl", "--responses", "responses.jsonl")
    assert [(one["response"], one["reward"]) for one in found] == [("1", 1.0), ("nine", 0.0)]
    tried = ("reward", "test", "exact", "--data", "train.jsonl", "--responses", "responses.jsonl")
    assert "responses.jsonl has 2 responses: 3 of 5 rows are not scored by it" in flotilla(*tried)[2]
    assert "responses.jsonl has 2 responses: 1 of them are ignored" in flotilla(*tried, "-n", "1")[2]
    assert "responses.jsonl has" not in flotilla(*tried, "-n", "2")[2]


def test_endless_function_ends_at_its_limit(flotilla: Command) -> None:
    (one,) = samples(
        flotilla, "run.yaml", 'rewards=[{reward: "mine.py:slow", timeout_s: 0.2}]', "-n", "1",
        "--response", "", code=1,
    )  # fmt: skip
    assert (
        one["failure"].endswith("mine.py:slow took longer than 0.2 s, by its timeout_s")
        and one["reward"] is None
    )


@pytest.mark.parametrize("returned", ["float('nan')", "None", "'good'", "[][0]"])
def test_the_place_of_each_failure_is_shown_once(flotilla: Command, returned: str) -> None:
    Path("wrong.py").write_text(f"\ndef judge(prompt, response, answer, info):\n    return {returned}\n")
    code, out, _ = flotilla("reward", "test", "wrong.py:judge", "--data", "train.jsonl", "--response", "")
    (told,) = [line for line in out.splitlines() if "failed, row 1 first" in line]
    assert code == 1 and told.count(f"{Path('wrong.py').absolute()}:{3 if '[0]' in returned else 2}") == 1


def test_the_place_of_an_endless_function_is_shown(flotilla: Command) -> None:
    slow = 'rewards=[{reward: "mine.py:slow", timeout_s: 0.2}]'
    code, out, _ = flotilla("reward", "test", "run.yaml", slow, "-n", "1", "--response", "")
    assert (
        code == 1 and f"took longer than 0.2 s, by its timeout_s (at {Path('mine.py').absolute()}:11)" in out
    )


def test_prompts_of_text_are_tried_without_a_stack(flotilla: Command) -> None:
    Path("stack.yaml").unlink()
    found = samples(flotilla, "mine.py:shape", "--data", "train.jsonl", "-n", "1", "--response", "1")
    assert [(one["prompt"], one["reward"]) for one in found] == [("0+1=", 1.0)]
    _, _, err = flotilla("reward", "test", "exact", "--data", "train.jsonl")
    assert "there is no stack file: prompts are taken as they are" in err


def test_rewards_are_listed_without_a_fleet(flotilla: Command) -> None:
    code, out, err = flotilla("reward", "list")
    assert code == 0 and "exact" in out and "no fleet is running" in err, err
    rewards = json.loads(flotilla("reward", "list", "--json")[1])["rewards"]
    assert {"exact", "math"} <= {one["name"] for one in rewards} and not any(
        one["services"] for one in rewards
    )


@pytest.mark.parametrize(
    "command",
    [("reward", "test", "exact", "--data", "chats.jsonl"), ("run", "plan", "run.yaml")],
    ids=" ".join,
)
def test_without_a_stack_no_other_model_is_named(flotilla: Command, command: tuple[str, ...]) -> None:
    Path("stack.yaml").unlink()
    chat = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    Path("chats.jsonl").write_text(json.dumps(chat) + "\n")
    code, _, err = flotilla(*command)
    assert code == 2 and "there is no stack file, which names the model" in err and "--stack FILE" in err
    assert "arithmetic/model" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("exact",), "name a run file, or a data file"),
        (("run.yaml", "rewards=[]", "algorithm={type: sft}"), "the run names no rewards"),
        (("mine.py:nothing", "--data", "train.jsonl"), "has no nothing"),
        (("exakt", "--data", "train.jsonl"), "did you mean exact?"),
        (("exact", "--data", "nowhere.jsonl"), "the data file does not exist"),
    ],
)
def test_what_cannot_be_tried_says_why(flotilla: Command, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = flotilla("reward", "test", *arguments)
    assert (code, words in err) == (2, True), err
