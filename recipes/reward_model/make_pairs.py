"""Makes the pairs of this recipe: each sum of the arithmetic example's training files against several wrong ones.

Each wrong sum is one that a policy may come to: both neighbours of the right one, other sums close to it, sums that are
off by tens, broken ones, and what a policy wrote itself in the runs of `--samples`.

Invariants: no held-out sum is in a pair to learn from; the same seed and runs always write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flotilla_data.samples import read_samples

HERE = Path(__file__).resolve().parent
SUMS = HERE.parents[1] / "examples" / "arithmetic" / "data"
FILES = ("sft.jsonl", "rl.jsonl")
TENS = (-100, -20, -11, -10, 10, 11, 20, 100)
"""How far off a sum is where a digit was not read, or not carried."""
CLOSE_EACH, OWN_EACH = 2, 4
"""How many other close sums, and how many of the policy's own, each right one is compared with."""


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
    made = {text[:-2] + text[:-3:-1], text[:at] + text[at + 1 :], text + digit, digit + text, digit}
    return sorted(made - {text, ""})


def wrong_ones(draw: random.Random, right: int, own: list[str]) -> list[str]:
    """Return the wrong sums that a right one is compared with."""
    neighbours = [str(right + by) for by in (-1, 1) if right + by >= 0]
    tens = [str(right + by) for by in TENS if right + by >= 0]
    made = [
        *neighbours,
        *draw.sample(close_ones(right), CLOSE_EACH),
        draw.choice(tens),
        draw.choice(broken_ones(draw, right)),
        *draw.sample(own, min(len(own), OWN_EACH)),
    ]
    return list(dict.fromkeys(made))


def one_close(draw: random.Random, right: int, own: list[str]) -> list[str]:
    """Return one wrong sum that looks right."""
    return [draw.choice(close_ones(right))]


def own_answers(runs: Iterable[Path]) -> Mapping[str, list[str]]:
    """Return the wrong answers that runs sampled, by their prompts."""
    found: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for sample in read_samples(run, "step"):
            if sample["response"] not in ("", sample["answer"]):
                found[sample["prompt"]].add(sample["response"])
    return {prompt: sorted(answers) for prompt, answers in found.items()}


def make_pairs(
    files: list[Path],
    out: Path,
    seed: int,
    wrong_of: Callable[[random.Random, int, list[str]], list[str]],
    own: Mapping[str, list[str]],
) -> None:
    """Write the pairs, in a drawn order."""
    draw = random.Random(seed)
    lines = []
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        for wrong in wrong_of(draw, int(row["answer"]), own.get(row["prompt"], [])):
            pair = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong}
            lines.append(json.dumps(pair) + "\n")
    draw.shuffle(lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines))
    print(f"{len(lines)} pairs in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", type=Path, default=SUMS, help="folder of the example's data (%(default)s)")
    parser.add_argument(
        "--samples", type=Path, nargs="*", default=[], help="runs whose wrong answers become pairs"
    )
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the wrong sums (%(default)s)")
    asked = parser.parse_args()
    training = [asked.sums / name for name in FILES]
    make_pairs(training, asked.out / "pairs.jsonl", asked.seed, wrong_ones, own_answers(asked.samples))
    make_pairs([asked.sums / "heldout.jsonl"], asked.out / "heldout.jsonl", asked.seed, one_close, {})
