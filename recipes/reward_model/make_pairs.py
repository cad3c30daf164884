"""Makes the pairs of this recipe: each sum of the arithmetic example's training files against several wrong ones.

Invariants: no held-out sum is in a pair, as in the files that it reads; the same seed always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUMS = HERE.parents[1] / "examples" / "arithmetic" / "data"
FILES = ("sft.jsonl", "rl.jsonl")
NEAR = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""How far off most wrong sums are: a digit that was not read, or carried."""
NEAR_EACH, FAR_EACH = 3, 1


def wrong_sums(draw: random.Random, right: int) -> list[int]:
    """Return wrong sums, of which most are near."""
    near = [right + by for by in NEAR if right + by >= 0]
    far = [number for number in range(200) if number != right]
    return draw.sample(near, NEAR_EACH) + draw.sample(far, FAR_EACH)


def make_pairs(sums: Path, out: Path, seed: int) -> None:
    """Write the pairs, in a drawn order."""
    draw = random.Random(seed)
    lines = []
    for row in (json.loads(line) for name in FILES for line in (sums / name).read_text().splitlines()):
        for wrong in wrong_sums(draw, int(row["answer"])):
            pair = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(wrong)}
            lines.append(json.dumps(pair) + "\n")
    draw.shuffle(lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", type=Path, default=SUMS, help="folder of the example's data (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "pairs.jsonl", help="file (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the wrong sums (%(default)s)")
    asked = parser.parse_args()
    make_pairs(asked.sums, asked.out, asked.seed)
