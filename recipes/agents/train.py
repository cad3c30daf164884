"""A small model learns within an agent that knows nothing of Flotilla, through the whole fleet, on two CPU cores.

Makes the model and the data of the calculator's recipe, warms the model up by imitation, and trains it with the
episodes that the agent plays. Shows the held-out reward before and after. Exits with 0 only when it rises by at least
`--rise`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, chapter, fleet, make, require_rise, told, train

RECIPES = Path(__file__).resolve().parents[1].relative_to(ROOT)
RECIPE = RECIPES / "agents"
AGENTS = ("messages", "chat", "responses")


def story(agent: str, seed: int, rise: float, overrides: list[str]) -> None:
    """Tell all of it; raises `DemoFailed` where it ends otherwise."""
    stack = ("--stack", str(RECIPE / "stack.yaml"))
    chapter(1, "model and data")
    make(ROOT / RECIPE / "make.py")
    chapter(2, "fleet: generator, trainer, environment and coordinator on this machine")
    with fleet(stack):
        chapter(3, f"warm-up by imitation, then GRPO with the agent {agent}.py (seed {seed})")
        imitated = f"data.train={RECIPE}/data/sft.jsonl"
        warm_up = train(stack, [RECIPES / "calculator" / "sft.yaml"], f"seed={seed}", imitated)
        start = f"initial_weights={warm_up['directory']}/model"
        run = train(stack, [RECIPE / f"{agent}.yaml"], f"seed={seed}", start, *overrides)
    chapter(4, "what came of it")
    require_rise(Path(run["directory"]), rise)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agent", nargs="?", default=AGENTS[0], choices=AGENTS, help="the agent (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (%(default)s)")
    parser.add_argument("--rise", type=float, default=0.4, help="least rise of the reward (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the second run")
    asked = parser.parse_args()
    return told(lambda: story(asked.agent, asked.seed, asked.rise, asked.overrides))


if __name__ == "__main__":
    sys.exit(main())
