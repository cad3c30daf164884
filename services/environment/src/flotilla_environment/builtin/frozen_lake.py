"""A walk over a frozen lake whose map is drawn by a seed.

Invariants: a map has a way from start to goal; the same seed draws the same map, and the column `seed` of a line wins
over the seed of the episode, so that the samples of a group walk on one map.
"""

from __future__ import annotations

import random
import re

from flotilla_environment.environment import Begun, Environment, Reply, Task, Turn

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_AROUND = list(MOVES)
_MOVE = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)

RULES = """\
You walk on a frozen lake. P is you, G is the goal, F is ice and H is a hole in it.
You reach the goal to win; in a hole you lose. Answer with one move a turn: left, down, right or up.{slippery}

{map}"""
SLIPPERY = " The ice is slippery: two of three moves go to the side."


def drawn_map(size: int, holes: float, seed: int) -> list[str]:
    """Return the rows of a map with a way from the upper left to the lower right."""
    draw = random.Random(seed)
    while True:
        tiles = [["H" if draw.random() < holes else "F" for _ in range(size)] for _ in range(size)]
        tiles[0][0], tiles[-1][-1] = "F", "G"
        if _has_way(tiles):
            return ["".join(row) for row in tiles]


def _has_way(tiles: list[list[str]]) -> bool:
    seen, ahead = {(0, 0)}, [(0, 0)]
    while ahead:
        row, column = ahead.pop()
        for down, right in MOVES.values():
            place = (row + down, column + right)
            if (
                place not in seen
                and all(0 <= one < len(tiles) for one in place)
                and tiles[place[0]][place[1]] != "H"
            ):
                seen.add(place)
                ahead.append(place)
    return (len(tiles) - 1, len(tiles) - 1) in seen


class FrozenLake(Environment):
    """A walk over a frozen lake to its goal: reward `success` is 1 at the goal, else 0."""

    def __init__(
        self, *, size: int = 4, holes: float = 0.2, slippery: bool = False, most_moves: int = 20
    ) -> None:
        if not 2 <= size <= 20 or not 0 <= holes <= 0.5:
            raise ValueError("size is between 2 and 20, and holes between 0 and 0.5")
        self._size, self._holes, self._slippery, self._most_moves = size, holes, slippery, most_moves
        self._map: list[str] = []
        self._place = (0, 0)
        self._moves = self._unread = 0

    def begin(self, task: Task) -> Begun:
        self._map = drawn_map(self._size, self._holes, int(task.info.get("seed", task.seed)))
        self._draw = random.Random(task.seed)
        rules = RULES.format(slippery=SLIPPERY if self._slippery else "", map=self._shown())
        return Begun(rules, state=self._shown())

    def reply(self, turn: Turn) -> Reply:
        self._moves += 1
        if found := _MOVE.findall(turn.content):
            self._walk(found[-1].lower())
        else:
            self._unread += 1
        tile = self._map[self._place[0]][self._place[1]]
        if tile in "GH" or self._moves >= self._most_moves:
            return self._ended(tile)
        shown = self._shown()
        return Reply(shown if found else f"No move was found in your answer.\n\n{shown}", state=shown)

    def stop(self, ending: str) -> Reply:
        return self._ended("F")

    def _walk(self, move: str) -> None:
        if self._slippery:
            move = _AROUND[(_AROUND.index(move) + self._draw.choice((-1, 0, 1))) % len(_AROUND)]
        down, right = MOVES[move]
        row, column = self._place[0] + down, self._place[1] + right
        if 0 <= row < self._size and 0 <= column < self._size:
            self._place = (row, column)

    def _ended(self, tile: str) -> Reply:
        metrics = {"moves": float(self._moves), "unread_moves": float(self._unread)}
        return Reply(done=True, rewards={"success": float(tile == "G")}, metrics=metrics)

    def _shown(self) -> str:
        row, column = self._place
        rows = [*self._map]
        rows[row] = f"{rows[row][:column]}P{rows[row][column + 1 :]}"
        return "\n".join(rows)
