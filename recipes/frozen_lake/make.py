"""Makes the model and the data of this recipe: walks over frozen lakes, and a model that knows their words.

Invariants: training and held-out seeds draw no map in common; the same seed always writes the same bytes. The walks
of imitation are of two kinds: three of five cross every row in turn and look at no hole, which seldom ends well; the
others take a shortest way.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from flotilla_environment import Task, Turn
from flotilla_environment.builtin.frozen_lake import MOVES, RULES, FrozenLake, drawn_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "arithmetic"))

from make_model import make_model

HERE = Path(__file__).resolve().parent
MAPS = {"sft": 2400, "rl": 500, "heldout": 200}
MOST_MOVES = 16
SIDE, HOLES = 4, 0.2
BLIND = 0.6
"""Share of the walks of imitation that look at no hole."""
BEGINNING = RULES.partition("{map}")[0].format(slippery="")
UNREAD = "No move was found in your answer.\n\n"
TEMPLATE = """\
{%- for message in messages %}{{ message.content }}
{%- if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}
{%- endfor %}"""


def seeds() -> dict[str, list[int]]:
    """Return seeds for each file; maps that were drawn before are left out."""
    seen, found = set(), []
    for seed in itertools.count():
        drawn = tuple(drawn_map(SIDE, HOLES, seed))
        if drawn not in seen:
            seen.add(drawn)
            found.append(seed)
        if len(found) == sum(MAPS.values()):
            break
    random.Random(0).shuffle(found)
    cuts = {}
    for name, size in MAPS.items():
        cuts[name], found = found[:size], found[size:]
    return cuts


def blind_move(row: int, column: int) -> str:
    """Return the next move of a walk that crosses each row, from left to right and back again."""
    back = row % 2
    at_end = column == (0 if back else SIDE - 1)
    return "down" if at_end else "left" if back else "right"


def shortest_moves(drawn: list[str]) -> dict[tuple[int, int], str]:
    """Return for each place the first move of a shortest way to the goal."""
    goal = (SIDE - 1, SIDE - 1)
    found, ahead = {goal: ""}, [goal]
    for row, column in ahead:
        for move, (down, right) in MOVES.items():
            place = (row - down, column - right)
            inside = all(0 <= one < SIDE for one in place)
            if inside and place not in found and drawn[place[0]][place[1]] != "H":
                found[place] = move
                ahead.append(place)
    return found


def walk(seed: int, blind: bool) -> list[dict[str, Any]]:
    """Return a walk as a conversation; it ends with its last move."""
    lake = FrozenLake(size=SIDE, holes=HOLES, most_moves=MOST_MOVES)
    said = str(lake.begin(Task([], seed=seed)).messages)
    ways = shortest_moves(drawn_map(SIDE, HOLES, seed))
    row = column = 0
    chat: list[dict[str, Any]] = []
    while True:
        move = blind_move(row, column) if blind else ways[row, column]
        row, column = row + MOVES[move][0], column + MOVES[move][1]
        chat += [{"role": "user", "content": said}, {"role": "assistant", "content": move}]
        reply = lake.reply(Turn(move))
        if reply.done:
            return chat
        said = str(reply.messages)


def make(out: Path) -> None:
    """Write `model/` and `data/` into `out`."""
    draw = random.Random(0)
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, own in seeds().items():
        rows = [{"prompt": f"lake {seed}", "seed": seed} for seed in own]
        if name == "sft":
            rows = [{"messages": walk(seed, draw.random() < BLIND)} for seed in own]
        lines = (json.dumps(row) + "\n" for row in rows)
        (out / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    phrases = (BEGINNING, UNREAD, *MOVES)
    make_model(out / "model", phrases=phrases, alphabet="PGFH\n", template=TEMPLATE, positions=512)


if __name__ == "__main__":
    make(HERE)
    print(json.dumps({"model": str(HERE / "model"), "data": str(HERE / "data")}))
