"""Makes the data of this example: additions of two numbers from 0 to 99, in three files.

Invariants: the files hold each of the 10,000 additions exactly once; a held-out addition is in no training
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

Pair = tuple[int, int]


def split_pairs(seed: int) -> dict[str, list[Pair]]:
    """All pairs, shuffled and divided into `heldout`, `sft` and `rl`."""
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


def make_data(out: Path, *, seed: int = 0) -> None:
    """Write `sft.jsonl`, `rl.jsonl` and `heldout.jsonl` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, pairs in split_pairs(seed).items():
        write_jsonl(out / f"{name}.jsonl", pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split (%(default)s)")
    arguments = parser.parse_args()
    make_data(arguments.out, seed=arguments.seed)
    print(json.dumps({"data": str(arguments.out), "seed": arguments.seed}))


if __name__ == "__main__":
    main()
