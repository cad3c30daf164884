"""Makes the model and the data of this recipe: walks over frozen lakes, and a model that knows their words.

Invariants: training and held-out seeds draw no map in common; the same seed always writes the same bytes. The walks
of imitation go down and right twice as often as up and left, and look at no hole: one of five reaches the goal.
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
MAPS = {"sft": 1500, "rl": 1000, "heldout": 200}
MOST_MOVES = 12
SIDE, HOLES = 4, 0.2
DRIFT = {"down": 2, "right": 2, "left": 1, "up": 1}
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


def walk(seed: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return a walk as a conversation; it ends with its last move."""
    lake = FrozenLake(size=SIDE, holes=HOLES, most_moves=MOST_MOVES)
    said = str(lake.begin(Task([], seed=seed)).messages)
    row = column = 0
    chat: list[dict[str, Any]] = []
    while True:
        ahead = {move: (row + down, column + right) for move, (down, right) in MOVES.items()}
        able = [move for move, place in ahead.items() if all(0 <= one < SIDE for one in place)]
        move = draw.choices(able, [DRIFT[one] for one in able])[0]
        row, column = ahead[move]
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
            rows = [{"messages": walk(seed, draw)} for seed in own]
        lines = (json.dumps(row) + "\n" for row in rows)
        (out / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    phrases = (BEGINNING, UNREAD, *MOVES)
    make_model(out / "model", phrases=phrases, alphabet="PGFH\n", template=TEMPLATE, positions=512)


if __name__ == "__main__":
    make(HERE)
    print(json.dumps({"model": str(HERE / "model"), "data": str(HERE / "data")}))
