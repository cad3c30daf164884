"""A chat model learns to call a calculator for problems in words, through the whole fleet, on two CPU cores.

Gets the model, makes the data, warms the model up by imitation of made conversations, and trains it with episodes.
Shows the share of held-out problems that greedy episodes answer rightly, before and after. Exits with 0 only when it
rises by at least 0.2 and by three standard errors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, learn_to_act, require_rise, told

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)
LEAST_RISE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the second run")
    asked = parser.parse_args()
    return told(lambda: require_rise(learn_to_act(RECIPE, asked.seed, asked.overrides), LEAST_RISE))


if __name__ == "__main__":
    sys.exit(main())
