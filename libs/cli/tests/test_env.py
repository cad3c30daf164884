"""`flotilla env test` plays an episode as the service does, and shows what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]

GUESS = """
import sys
from flotilla_environment import Begun, Environment, Reply

class Guess(Environment):
    def __init__(self, *, largest=10):
        self.largest = largest

    def begin(self, task):
        sys.stdout.write("begun \\x1b[2J\\n")
        self.number = task.seed % self.largest + 1
        return Begun(f"from 1 to {self.largest}")

    def reply(self, turn):
        if int(turn.content) == self.number:
            return Reply(done=True, rewards={"found": 1.0})
        return Reply("\\x1b]0;no\\x07", reward=-0.5)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "stack.yaml").write_text("name: tried\n")
    return tmp_path


def answers(folder: Path, *lines: str) -> tuple[str, str]:
    (folder / "answers.txt").write_text("".join(f"{line}\n" for line in lines))
    return "--answers", "answers.txt"


def test_an_episode_is_played_by_the_answers_of_a_file(flotilla: Command, folder: Path) -> None:
    given = answers(folder, "3", "2")
    code, out, err = flotilla("env", "test", "guess.py:Guess", "largest=7", "--seed", "8", *given)
    assert code == 0 and "\x1b" not in out + err and "begun" in err
    assert out.splitlines()[0] == "user: from 1 to 7" and "reward found: 1" in out
    assert any(f"at level {level}" in err for level in ("namespaces", "landlock"))
    code, out, err = flotilla("env", "test", "guess.py:Guess", "--seed", "8", *given, "--json", "--trusted")
    assert "at level none: NOT in a jail" in err
    told = json.loads(out)
    assert (code, told["ending"], told["turn_rewards"]) == (0, "ENDING_MAX_TURNS", [-0.5, -0.5])


def test_an_error_is_shown_with_its_line_and_exit_code_1(flotilla: Command, folder: Path) -> None:
    code, out, _ = flotilla("env", "test", "guess.py:Guess", *answers(folder, "x"))
    line = GUESS.splitlines().index("        if int(turn.content) == self.number:") + 1
    assert code == 1 and f"guess.py:{line}" in out and "invalid literal for int()" in out


def test_calls_are_written_as_json_and_a_line_of_data_is_played(flotilla: Command, folder: Path) -> None:
    (folder / "data.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1), "level": n}) + "\n" for n in range(3)
        )
    )
    call = json.dumps({"name": "calculate", "arguments": {"expression": "2 + 1"}})
    given = (*answers(folder, call, "3"), "--data", "data.jsonl", "--row", "3")
    code, out, _ = flotilla("env", "test", "calculator", *given)
    assert code == 0 and "user: 2 + 1?" in out and "tool: 3" in out and "reward correct: 1" in out
    code, _, err = flotilla("env", "test", "calculator", *given[:-1], "4")
    assert code == 2 and "has 3 lines" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("gess",), "there is no environment 'gess'"),
        (("guess.py:Gess",), "has no Gess"),
        (("guess.py:Guess", "larges=3"), "unexpected keyword argument"),
        (("guess.py:Guess", "largest"), "write it as key=value"),
    ],
)
def test_what_cannot_be_played_is_refused(flotilla: Command, arguments: tuple[str, ...], why: str) -> None:
    code, _, err = flotilla("env", "test", *arguments)
    assert code == 2 and why in err


def test_environments_are_listed_without_a_fleet(flotilla: Command) -> None:
    code, out, err = flotilla("env", "list")
    assert code == 0 and "frozen_lake" in out and "no fleet is running" in err, err
    found = json.loads(flotilla("env", "list", "--json")[1])["environments"]
    assert {"calculator", "search"} <= {one["name"] for one in found}
    assert not any(one["services"] for one in found)
