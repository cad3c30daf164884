"""`make demo`: a small model learns to add, through the whole fleet.

Makes the model and the data if they are not there, starts the fleet, teaches the untrained model about half of the
sums by imitation, then trains it by rewards alone. Everything goes through the `flotilla` command, as a user would do
it. Exits with 0 only when held-out accuracy rises from at most 0.65 to at least 0.93 (0.90 with adapters or another
algorithm, or with experts: `--moe`); with `--control`, where rewards are shuffled, only when it ends at or below its
start.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commands import ROOT, DemoFailed, chapter, fleet, flotilla, make, told, train

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.relative_to(ROOT)
FILES = {"topr": ("stack.yaml", "topr.yaml"), "ppo": ("stack-ppo.yaml", "ppo.yaml")}
FILES_OF_OTHERS = ("stack.yaml", "grpo.yaml")
"""The stack and the run of an algorithm; those that `FILES` does not name share the last two."""
MOE_STACK, MOE_MODEL = "stack-moe.yaml", HERE / "model-moe"
WITHOUT_RATIO = ("gpg", "opo", "reinforce", "remax", "rloo")
"""Algorithms whose loss does not know how far the policy is from the one that sampled."""
WITHOUT_REWARDS = ("sft", "dpo", "reward_model")
"""Algorithms that learn from answers or pairs, so that this story does not fit them."""

HIGHEST_START = 0.65
LOWEST_END = 0.93
LOWEST_END_OF_OTHERS = 0.90
"""With adapters, with experts, or with another algorithm than the demo's own."""
DEFAULT = "topr"


def demo(seed: int, algorithm: str, *, lora: bool, moe: bool, control: bool) -> None:
    """The whole story; raises `DemoFailed` where it ends otherwise."""
    if moe and not MOE_MODEL.is_dir():  # `flotilla up` makes the rest of the example.
        make(HERE / "make_model.py", "--moe")
    file = MOE_STACK if moe else FILES.get(algorithm, FILES_OF_OTHERS)[0]
    stack = stack_of(file)
    chapter(1, f"fleet: generator, trainer, rewards and coordinator on this machine ({file})")
    with fleet(stack):
        chapter(2, f"warm-up: imitation, until held-out accuracy is 0.5 or more (seed {seed})")
        start = warm_up(stack, seed)
        if control:
            chapter(3, "control: the training of the demo on shuffled rewards, which must not teach anything")
        else:
            learner = "adapters beside the warmed-up weights" if lora else "from the warmed-up weights"
            chapter(3, f"{algorithm}: {learner}, by rewards alone")
        run = learn(stack, start, seed, algorithm, lora=lora, control=control)
        timeline = Path(run["directory"]) / "timeline.json"
        flotilla("timeline", run["run_id"], "-o", str(timeline), *stack)
    chapter(4, "what came of it")
    report(run, timeline)
    judge(run["metrics"], lowest_end(algorithm, moe=moe), control=control)


def stack_of(file: str) -> tuple[str, ...]:
    """Return what names a stack of this example to a command."""
    return ("--stack", str(EXAMPLE / file))


def warm_up(stack: tuple[str, ...], seed: int) -> str:
    """Teach the untrained model by imitation; returns the folder of the weights that came of it."""
    return str(train(stack, [EXAMPLE / "sft.yaml"], f"seed={seed}")["directory"]) + "/model"


def learn(
    stack: tuple[str, ...],
    start: str,
    seed: int,
    algorithm: str,
    *,
    lora: bool = False,
    control: bool = False,
) -> dict[str, Any]:
    """Train the weights in the folder `start` by rewards alone; returns the run."""
    file = FILES.get(algorithm, FILES_OF_OTHERS)[1]
    files = [file, *laid_over(algorithm, lora=lora), *["control.yaml"] * control]
    overrides = (f"seed={seed}", f"initial_weights={start}", f"algorithm.type={algorithm}")
    return train(stack, [EXAMPLE / name for name in files], *overrides)


def laid_over(algorithm: str, *, lora: bool) -> list[str]:
    """Return the files that are laid over the one of the run."""
    if lora:
        return ["longer.yaml", "lora.yaml"]
    if algorithm in FILES:
        return []
    return ["steady.yaml", *["once.yaml"] * (algorithm in WITHOUT_RATIO)]


def report(run: dict[str, Any], timeline: Path) -> None:
    """What a user wants to open next."""
    directory = Path(run["directory"])
    print(f"held-out accuracy before  {run['metrics']['eval/accuracy_before']:.3f}")
    print(f"held-out accuracy after   {run['metrics']['eval/accuracy']:.3f}")
    print(f"reward curve              {directory / 'plots' / 'reward.png'}")
    print(f"timeline                  {timeline}  (open it in https://ui.perfetto.dev)")
    print(f"everything else           {directory}", flush=True)


def lowest_end(algorithm: str, *, moe: bool = False) -> float:
    """Return the accuracy that a run must reach."""
    return LOWEST_END if algorithm == DEFAULT and not moe else LOWEST_END_OF_OTHERS


def judge(metrics: dict[str, float], lowest: float, *, control: bool = False) -> None:
    """Raise unless the run showed what it should."""
    before, after = metrics["eval/accuracy_before"], metrics["eval/accuracy"]
    if control:
        if after > before:
            raise DemoFailed(
                f"the control rose from {before:.3f} to {after:.3f}: something but the rewards teaches"
            )
        return
    if before > HIGHEST_START:
        raise DemoFailed(f"accuracy before is {before:.3f}, above {HIGHEST_START}: nothing is left to learn")
    if after < lowest:
        raise DemoFailed(f"accuracy after is {after:.3f}, below {lowest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (%(default)s)")
    parser.add_argument(
        "--algorithm", help=f"a preset of docs/algorithms.md to train with ({DEFAULT}, with --lora grpo)"
    )
    parser.add_argument("--lora", action="store_true", help="train adapters, the weights stay")
    parser.add_argument("--moe", action="store_true", help="a model with 8 experts in each layer")
    parser.add_argument("--control", action="store_true", help="shuffle the rewards: must not learn")
    arguments = parser.parse_args()
    if arguments.algorithm in WITHOUT_REWARDS:
        parser.error(
            f"{arguments.algorithm} learns without rewards: start examples/arithmetic/{arguments.algorithm}.yaml "
            "by hand, as README.md says"
        )
    algorithm = arguments.algorithm or ("grpo" if arguments.lora else DEFAULT)
    return told(
        lambda: demo(
            arguments.seed, algorithm, lora=arguments.lora, moe=arguments.moe, control=arguments.control
        )
    )


if __name__ == "__main__":
    sys.exit(main())
