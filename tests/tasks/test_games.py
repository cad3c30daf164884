"""Games of Gymnasium and TextArena are played as environments, and the same seed plays the same game again."""

from __future__ import annotations

import random

import pytest

from flotilla_environment import Reply, Task, Turn
from flotilla_environment.builtin.gymnasium import Gymnasium
from flotilla_environment.builtin.textarena import TextArena

GAMES = (
    "2048",
    "Bandit",
    "Blackjack",
    "Countdown",
    "Crosswords",
    "Cryptarithm",
    "FifteenPuzzle",
    "FrozenLake",
    "GuessTheNumber",
    "LightsOut",
    "LogicPuzzle",
    "Mastermind",
    "Minesweeper",
    "PegJump",
    "RushHour",
    "Secretary",
    "Set",
    "Slitherlink",
    "Sokoban",
    "Sudoku",
    "ThreeCardMonte",
    "TowerOfHanoi",
)
"""Those of TextArena for one player that need no download."""


def played(game: TextArena, seed: int, answers: list[str]) -> list[Reply]:
    game.begin(Task([], seed=seed))
    replies: list[Reply] = []
    while answers and not (replies and replies[-1].done):
        replies.append(game.reply(Turn(answers.pop(0))))
    return replies


@pytest.mark.parametrize("name", GAMES)
def test_a_game_for_one_player_says_what_is_new_and_ends_where_it_is_stopped(name: str) -> None:
    game = TextArena(f"{name}-v0")
    begun = game.begin(Task([], seed=3))
    assert str(begun.messages).strip()
    reply = game.reply(Turn("[1]"))
    assert reply.done or str(begun.messages)[:60] not in str(reply.messages)
    assert game.stop("max_turns").rewards == {"score": 0.0}


def test_guesses_find_the_number_whatever_others_draw_meanwhile() -> None:
    first = played(TextArena("GuessTheNumber-v0"), 5, [f"[{guess}]" for guess in range(1, 12)])
    game = TextArena("GuessTheNumber-v0")
    game.begin(Task([], seed=5))
    random.seed(99)
    mine = [random.random() for _ in range(2)]
    random.seed(99)
    again = []
    for guess in range(1, 1 + len(first)):
        again.append(game.reply(Turn(f"[{guess}]")))
    assert again == first and first[-1].done and "higher" in str(first[0].messages)
    assert [random.random() for _ in range(2)] == mine


def test_a_game_of_two_players_is_refused() -> None:
    with pytest.raises(AssertionError, match="number of players"):
        TextArena("TicTacToe-v0").begin(Task([]))


def test_a_walk_of_gymnasium_reaches_its_goal() -> None:
    lake = Gymnasium("FrozenLake-v1", actions=["left", "down", "right", "up"], options={"is_slippery": False})
    assert "[S]" in str(lake.begin(Task([], seed=1)).messages)
    for move in ("down", "down", "right", "right", "down"):
        assert not lake.reply(Turn(move)).done
    assert lake.reply(Turn("right")).rewards == {"return": 1.0}
    lake.close()
