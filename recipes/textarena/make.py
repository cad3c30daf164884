"""Makes the model and the data of this recipe: games of GuessTheNumber, and a model that knows their words.

Invariants: training and held-out games have no seed in common; the same seed always writes the same bytes. Three of
five games of imitation count up from 1, whatever the game says; the others guess any number that its hints leave.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from flotilla_environment import Task, Turn
from flotilla_environment.builtin.textarena import TextArena

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "arithmetic"))

from make_model import make_model

HERE = Path(__file__).resolve().parent
GAME = "GuessTheNumber-v0"
LARGEST = 20
OPTIONS = {"max_number": LARGEST, "max_turns": 4}
"""As in grpo.yaml. The game ends after one guess more than `max_turns`."""
GAMES = {"sft": 4000, "rl": 1000, "heldout": 200}
COUNTED = 0.6
"""Share of the games of imitation that count up."""
HINTS = ("The target number is higher.", "The target number is lower.")
TEMPLATE = """\
{%- for message in messages %}{{ message.content }}
{%- if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}
{%- endfor %}"""


def played(seed: int, counts: bool, draw: random.Random) -> tuple[list[dict[str, Any]], float]:
    """Return a game as a conversation that ends with its last guess, and its score."""
    game = TextArena(GAME, options=OPTIONS)
    said = str(game.begin(Task([], seed=seed)).messages)
    low, high, guess = 1, LARGEST, 0
    chat: list[dict[str, Any]] = []
    while True:
        guess = guess + 1 if counts else draw.randint(low, high)
        turn = f"[{guess}]"
        chat += [{"role": "user", "content": said}, {"role": "assistant", "content": turn}]
        reply = game.reply(Turn(turn))
        if reply.done:
            return chat, reply.rewards["score"]
        said = str(reply.messages)
        low, high = (guess + 1, high) if said == HINTS[0] else (low, guess - 1)


def make(out: Path) -> None:
    """Write `model/` and `data/` into `out`."""
    draw = random.Random(0)
    (out / "data").mkdir(parents=True, exist_ok=True)
    first = 0
    for name, size in GAMES.items():
        seeds = range(first, first + size)
        first += size
        rows: list[dict[str, Any]] = [{"prompt": str(seed), "seed": seed} for seed in seeds]
        if name == "sft":
            rows = [{"messages": played(seed, draw.random() < COUNTED, draw)[0]} for seed in seeds]
        lines = (json.dumps(row) + "\n" for row in rows)
        (out / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    begins = str(TextArena(GAME, options=OPTIONS).begin(Task([])).messages)
    guesses = [f"[{number}]" for number in range(1, LARGEST + 1)]
    # Whole texts and guesses are one token each, so that a game is two dozen tokens.
    make_model(out / "model", phrases=(begins, *HINTS, *guesses), alphabet="0123456789", template=TEMPLATE)


if __name__ == "__main__":
    make(HERE)
    print(json.dumps({"model": str(HERE / "model"), "data": str(HERE / "data")}))
