"""A small model learns to call a calculator, through the whole fleet, on two CPU cores.

Makes the model and the data, warms the model up by imitation of made conversations, and trains it with episodes of
several turns. Shows the share of held-out sums that it answers rightly by greedy episodes, before and after. Exits with
0 only when that share rises from at most 0.5 to at least 0.9.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, DemoFailed, learn_to_act, say, told

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)
HIGHEST_START, LOWEST_END = 0.5, 0.9


def story(seed: int, overrides: list[str]) -> None:
    """Tell all of it; raises `DemoFailed` where it ends otherwise."""
    directory = learn_to_act(RECIPE, seed, overrides)
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    first, last = (line["eval/reward_mean"] for line in (lines[0], lines[-1]))
    say(f"held-out sums answered rightly: {first:.3f} to {last:.3f}")
    say(f"curves, conversations and the model: {directory}")
    if first > HIGHEST_START or last < LOWEST_END:
        raise DemoFailed(f"at most {HIGHEST_START} before and at least {LOWEST_END} after were wanted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the second run")
    asked = parser.parse_args()
    return told(lambda: story(asked.seed, asked.overrides))


if __name__ == "__main__":
    sys.exit(main())
