"""A language model learns a task of reasoning_gym, through the whole fleet, on two CPU cores.

Gets SmolLM2-135M-Instruct, trains by rewards alone, and shows the mean reward of greedy answers to 200 held-out
questions before and after. Exits with 0 only when it rises by at least `--rise` (0.2) and by three standard errors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from commands import ROOT, arguments_of_recipe, chapter, fleet, make, require_rise, told, train

from flotilla_core.generated_tasks import package_version

RECIPE = Path(__file__).resolve().parent.relative_to(ROOT)


def story(asked: argparse.Namespace) -> None:
    """Tell all of it; raises `DemoFailed` where it ends otherwise."""
    stack = ("--stack", str(asked.stack))
    chapter(1, f"model, and tasks of reasoning_gym {package_version()}")
    make(ROOT / "examples" / "instruct" / "get_model.py")
    chapter(2, f"fleet: generator, trainer, rewards and coordinator on this machine ({asked.stack})")
    with fleet(stack):
        chapter(3, f"adapters learn from rewards alone (seed {asked.seed})")
        run = train(stack, [RECIPE / "grpo.yaml"], f"seed={asked.seed}", *asked.overrides)
    chapter(4, "what came of it")
    require_rise(Path(run["directory"]), asked.rise)


def main() -> int:
    asked = arguments_of_recipe(__doc__.splitlines()[0], RECIPE / "stack.yaml")
    return told(lambda: story(asked))


if __name__ == "__main__":
    sys.exit(main())
