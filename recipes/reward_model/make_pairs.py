"""Makes the pairs of this recipe: each sum of the arithmetic example's training files against several wrong ones.

Invariants: no held-out sum is in a pair to learn from; the same seed always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUMS = HERE.parents[1] / "examples" / "arithmetic" / "data"
FILES = ("sft.jsonl", "rl.jsonl")
TENS = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
"""How far off most wrong sums of the first lesson are: a digit that was not read, or carried."""
TENS_EACH, FAR_EACH = 3, 1
CLOSE_EACH = 5
"""Wrong sums of the second lesson that look right: another last digit, or off by 1 to 9."""


def first_lesson(draw: random.Random, right: int) -> list[str]:
    """Return wrong sums, most of which are off by tens."""
    near = [right + by for by in TENS if right + by >= 0]
    far = [number for number in range(200) if number != right]
    return [str(wrong) for wrong in draw.sample(near, TENS_EACH) + draw.sample(far, FAR_EACH)]


def close_ones(right: int) -> list[str]:
    """Return each sum with another last digit, and each that is off by 1 to 9."""
    tens = right // 10 * 10
    found = {*range(tens, tens + 10), *range(max(0, right - 9), right + 10)} - {right}
    return [str(number) for number in sorted(found)]


def broken_ones(draw: random.Random, right: int) -> list[str]:
    """Return what is no sum of this length: digits swapped, missing, or too many."""
    text = str(right)
    at = draw.randrange(len(text))
    digit = str(draw.randrange(10))
    made = {text[:-2] + text[:-3:-1], text[:at] + text[at + 1 :], text + digit, digit + text}
    return sorted(made - {text, ""})


def second_lesson(draw: random.Random, right: int) -> list[str]:
    """Return wrong sums as a policy makes them."""
    tens = [str(right + by) for by in (-10, 10, -100, 100) if right + by >= 0]
    return [
        *draw.sample(close_ones(right), CLOSE_EACH),
        draw.choice(tens),
        draw.choice(broken_ones(draw, right)),
    ]


def close_pairs(draw: random.Random, right: int) -> list[str]:
    """Return one wrong sum that looks right."""
    return [draw.choice(close_ones(right))]


def make_pairs(
    files: list[Path], out: Path, seed: int, wrong_ones: Callable[[random.Random, int], list[str]]
) -> None:
    """Write the pairs, in a drawn order."""
    draw = random.Random(seed)
    lines = []
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        for wrong in wrong_ones(draw, int(row["answer"])):
            pair = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong}
            lines.append(json.dumps(pair) + "\n")
    draw.shuffle(lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", type=Path, default=SUMS, help="folder of the example's data (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the wrong sums (%(default)s)")
    asked = parser.parse_args()
    training = [asked.sums / name for name in FILES]
    make_pairs(training, asked.out / "tens.jsonl", asked.seed, first_lesson)
    make_pairs(training, asked.out / "close.jsonl", asked.seed, second_lesson)
    make_pairs([asked.sums / "heldout.jsonl"], asked.out / "heldout.jsonl", asked.seed, close_pairs)
