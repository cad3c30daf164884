"""Makes the data of this example: additions of two numbers from 0 to 99, in three files, and two of them as pairs.

Invariants: the three files hold each of the 10,000 additions exactly once; a held-out addition is in no training
file, not even with its operands swapped; the same seed always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPERANDS = range(100)
HELD_OUT = 500
SFT_SHARE = 0.5

MISTAKES = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""How far off a rejected sum is: a digit that was not read, or carried."""

Pair = tuple[int, int]


def split_pairs(seed: int) -> dict[str, list[Pair]]:
    """Return all pairs, shuffled and divided into `heldout`, `sft` and `rl`."""
    order = random.Random(seed)
    unordered = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    order.shuffle(unordered)
    held_out: list[Pair] = []
    rest: list[Pair] = []
    for a, b in unordered:
        both = [(a, b)] if a == b else [(a, b), (b, a)]
        (held_out if len(held_out) + len(both) <= HELD_OUT else rest).extend(both)
    order.shuffle(held_out)
    order.shuffle(rest)
    cut = round(len(rest) * SFT_SHARE)
    return {"sft": rest[:cut], "rl": rest[cut:], "heldout": held_out}


def write_jsonl(path: Path, pairs: Iterable[Pair]) -> None:
    rows = (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs)
    path.write_text("".join(rows), encoding="utf-8")


def write_preferences(path: Path, pairs: Iterable[Pair], seed: int) -> None:
    """Each addition with the right sum, and a wrong one that is rejected."""
    draw = random.Random(seed)
    lines = []
    for a, b in pairs:
        wrong = draw.choice([a + b + mistake for mistake in MISTAKES if a + b + mistake >= 0])
        row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def make_data(out: Path, *, seed: int = 0) -> None:
    """Write `sft.jsonl`, `rl.jsonl` and `heldout.jsonl` to `out`, and pairs for the last two of them."""
    out.mkdir(parents=True, exist_ok=True)
    split = split_pairs(seed)
    for name, pairs in split.items():
        write_jsonl(out / f"{name}.jsonl", pairs)
    write_preferences(out / "preferences.jsonl", split["rl"], seed)
    write_preferences(out / "heldout-preferences.jsonl", split["heldout"], seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split (%(default)s)")
    arguments = parser.parse_args()
    make_data(arguments.out, seed=arguments.seed)
    print(json.dumps({"data": str(arguments.out), "seed": arguments.seed}))


if __name__ == "__main__":
    main()
