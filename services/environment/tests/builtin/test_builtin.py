"""The environments that come with the service, played without a worker."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla_environment import Begun, Call, Environment, Reply, Task, Turn
from flotilla_environment.builtin import Dialogue
from flotilla_environment.builtin.calculator import Calculator, calculate
from flotilla_environment.builtin.frozen_lake import MOVES, FrozenLake, drawn_map
from flotilla_environment.builtin.gymnasium import Gymnasium, state_of
from flotilla_environment.builtin.search import Search
from flotilla_environment.builtin.textarena import TextArena
from flotilla_workers.functions import Refusal

SEEDS = range(200)


def last(environment: Environment, *turns: Turn | str) -> Reply:
    """Return the reply to the last turn."""
    for turn in turns:
        reply = environment.reply(Turn(turn) if isinstance(turn, str) else turn)
    return reply


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (12+7)*3 ", "57"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 3", "0.333333333333333"),
        ("2 ** 0.5", "1.4142135623731"),
    ],
)
def test_an_expression_is_calculated(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "10 ** 31",
        "1 / 0",
        "(-8) ** 0.5",
        "(" * 199,
        "1" * 201,
        "__import__('os')",
        "x",
        "1 if 1 else 2",
        "True + 1",
        "1e400",
        "",
    ],
)
def test_what_is_no_bounded_expression_is_refused_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+|division"):
        calculate(expression)


@pytest.mark.parametrize(
    ("answer", "reward"), [("It is 57.", 1.0), ("57 or 58", 0.0), ("5,7", 1.0), ("none", 0.0), ("57.0", 1.0)]
)
def test_the_last_number_of_an_answer_is_judged(answer: str, reward: float) -> None:
    environment = Calculator()
    environment.begin(Task([], answer="57"))
    assert last(environment, answer).rewards == {"correct": reward}


def test_what_the_policy_calls_wrong_is_told_to_it_and_is_no_error() -> None:
    environment = Calculator()
    begun = environment.begin(Task([{"role": "user", "content": "?"}]))
    assert begun.tools[0]["parameters"]["required"] == ["expression"]
    calls = (
        Call("1", "calculate", {"expression": "6 * 7"}),
        Call("2", "calc", {}),
        Call("3", "calculate", {}),
        Call("4", "calculate", {"expression": 5}),
        Call("5", "calculate", {"expression": "1 / 0"}),
    )
    reply = environment.reply(Turn("", calls, unparsed="no JSON"))
    said = [message["content"] for message in reply.messages if isinstance(message, dict)]
    assert said == [
        "error: no JSON",
        "42",
        "error: there is no tool 'calc'; there is calculate",
        "error: calculate: missing a required argument: 'expression'",
        "error: calculate: expression is 5, expected a value of type string",
        "error: division by zero",
    ]
    assert last(environment, "42").metrics == {"tool_calls": 5.0, "tool_errors": 5.0}


def test_a_map_has_a_way_and_is_the_same_for_the_same_seed() -> None:
    maps = [drawn_map(4, 0.4, seed) for seed in SEEDS]
    assert maps == [drawn_map(4, 0.4, seed) for seed in SEEDS] and len({*map(tuple, maps)}) > 100
    for rows in maps:
        environment = FrozenLake(holes=0.4, most_moves=1000)
        environment.begin(Task([], seed=0, info={}))
        environment._map = rows
        assert any(last(environment, *way).rewards == {"success": 1.0} for way in [_way(rows)])


def _way(rows: list[str]) -> list[str]:
    """Return moves from start to goal, found breadth first."""
    ahead: list[tuple[tuple[int, int], list[str]]] = [((0, 0), [])]
    seen = {(0, 0)}
    for (row, column), moves in ahead:
        if rows[row][column] == "G":
            return moves
        for move, (down, right) in MOVES.items():
            place = (row + down, column + right)
            if place in seen or not all(0 <= one < len(rows) for one in place):
                continue
            if rows[place[0]][place[1]] != "H":
                seen.add(place)
                ahead.append((place, [*moves, move]))
    raise AssertionError("there is no way")


def test_samples_of_one_line_walk_on_one_map_and_slip_apart() -> None:
    def walk(seed: int) -> tuple[object, object]:
        environment = FrozenLake(size=8, slippery=True)
        begun = environment.begin(Task([], seed=seed, info={"seed": 5}))
        return begun.messages, last(environment, *["right", "down"] * 3).messages

    walks = [walk(seed) for seed in range(20)]
    assert len({first for first, _ in walks}) == 1 and len({str(end) for _, end in walks}) > 1
    assert walks == [walk(seed) for seed in range(20)]


def test_a_walk_is_in_the_same_state_again_where_it_comes_back() -> None:
    environment = FrozenLake(size=3, holes=0.0)
    states = [environment.begin(Task([])).state]
    states += [environment.reply(Turn(move)).state for move in ("right", "left", "none", "down")]
    assert states == ["PFF\nFFF\nFFG", "FPF\nFFF\nFFG", *["PFF\nFFF\nFFG"] * 2, "FFF\nPFF\nFFG"]


def test_a_hole_the_last_move_and_a_stop_are_no_success() -> None:
    for turns in (["right"], ["up"] * 3):
        environment = FrozenLake(most_moves=3)
        environment.begin(Task([]))
        environment._map = ["FHFF", *["FFFF"] * 2, "FFFG"]
        assert last(environment, *turns) == Reply(
            done=True, rewards={"success": 0.0}, metrics={"moves": float(len(turns)), "unread_moves": 0.0}
        )
    assert environment.stop("max_turns").rewards == {"success": 0.0}


def test_a_search_finds_the_passage_by_its_rare_words(tmp_path: Path) -> None:
    rows = [
        {"title": f"City {number}", "text": f"the city has a river and {number} bridges"}
        for number in range(50)
    ]
    rows.append({"title": "Ulm", "text": "the minster of the city is the tallest one"})
    lines, paragraphs = tmp_path / "corpus.jsonl", tmp_path / "corpus.txt"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paragraphs.write_text("\n\n".join(f"{row['title']}\n{row['text']}" for row in rows))
    for corpus in (lines, paragraphs):
        environment = Search(str(corpus), hits=2)
        environment.begin(Task([], answer="Ulm"))
        assert environment.search("Which city has the tallest minster?").startswith("[1] Ulm\n")
        assert environment.search("42 bridges").startswith("[1] City 42\n")
        assert environment.search("zebra") == "nothing found"
        assert [last(environment, answer).rewards["correct"] for answer in ("It is ulm.", "Ulmer", "")] == [
            1,
            0,
            0,
        ]


@pytest.mark.parametrize(
    ("corpus", "why"),
    [
        ('{"text": "a"}\n\n{"text": ', "line 3 is no JSON: Expecting value at column 10"),
        ("[" * 200_000, "line 1 is no JSON: "),
        ('{"text": "a"}\n["b"]', "line 2 is no object with a text"),
        ('{"title": "a", "text": null}', "line 1 is no object with a text"),
        ("\n", "it has no text"),
        ("\udcff", "can't decode byte 0xff"),
        (None, "No such file"),
    ],
    ids=["broken", "deep", "list", "no text", "empty", "no UTF-8", "gone"],
)
def test_a_corpus_that_cannot_be_read_is_an_error_before_the_first_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str | None, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if corpus is not None:
        Path("corpus.jsonl").write_bytes(corpus.encode(errors="surrogateescape"))
    environment = Search("corpus.jsonl")
    with pytest.raises(Refusal) as failed:
        environment.begin(Task([]))
    assert str(failed.value).startswith(f"corpus {tmp_path / 'corpus.jsonl'} cannot be read: ")
    assert why in str(failed.value)


def test_a_line_of_a_corpus_ends_where_the_file_says(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "one\u2028two"}\r\n{"text": "three"}\n', newline="")
    environment = Search(str(corpus))
    environment.begin(Task([]))
    assert environment.search("two") == "[1] one\u2028two"


@dataclass
class Walk:
    """A game of Gymnasium that gives a reward of 0.5 for each of three steps."""

    steps: int = 0
    action_space = SimpleNamespace(n=2)

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._seen(), {}

    def render(self) -> str:
        return f"at {self.steps}"

    def _seen(self) -> Any:
        return {"at": SimpleNamespace(tolist=lambda: [0, self.steps // 2]), "left": (3,)}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), 0.5, self.steps == 3, False, {}


def test_the_rewards_of_a_game_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda *_, **__: Walk()))
    for turns, returned in ((["1"] * 3, 1.5), (["1", "x"], 0.5)):
        game = Gymnasium("Walk-v0")
        game.begin(Task([]))
        replies = [game.reply(Turn(turn)) for turn in turns]
        end = replies[-1] if replies[-1].done else game.stop("max_turns")
        assert end.rewards == {"return": returned} and {reply.reward for reply in (*replies, end)} == {None}


def test_the_observation_of_a_game_is_the_state_of_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda *_, **__: Walk()))
    game = Gymnasium("Walk-v0")
    begun = game.begin(Task([]))
    states = [begun.state, *(game.reply(Turn(turn)).state for turn in ("x", "1", "0", "1"))]
    assert states == [*['{"at": [0, 0], "left": [3]}'] * 3, '{"at": [0, 1], "left": [3]}', ""]
    assert state_of(object()) == ""


def test_a_dialogue_asks_all_questions_and_needs_an_answer_to_each() -> None:
    environment = Dialogue()
    info = {"questions": ["a?", "b?", "c?"], "answers": ["A", "B", "C"]}
    assert environment.begin(Task([], info=info)) == Begun([{"role": "user", "content": "a?"}])
    assert environment.reply(Turn("it is a")) == Reply("b?")
    assert environment.reply(Turn("no")) == Reply("c?")
    assert environment.reply(Turn("C")) == Reply(done=True, rewards={"correct": 2 / 3})
    with pytest.raises(ValueError, match="3 questions and 2 answers"):
        Dialogue().begin(Task([], info=info | {"answers": ["A", "B"]}))


@pytest.mark.parametrize(("game", "package"), [(Gymnasium, "gymnasium"), (TextArena, "textarena")])
def test_a_game_without_its_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, game: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        game("any")
    assert f"{sys.executable} -m pip install 'flotilla[{package}]'" in str(caught.value)
