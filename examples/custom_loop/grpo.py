"""GRPO in a loop of one's own, against a running fleet: examples/arithmetic/grpo.yaml by hand.

    flotilla up --stack examples/arithmetic/stack.yaml
    python examples/custom_loop/grpo.py --steps 300 initial_weights=<run directory of the warm-up>/model

Sampling, scoring, gradients and weights go through the fleet; what is written here is the algorithm.
"""

from __future__ import annotations

import argparse

import numpy as np

from flotilla_client import Group, SyncLoop, connect

LOSS = {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}


def set_advantages(group: Group) -> None:
    """How much better each sample is than the others of its prompt, in units of their spread."""
    rewards = group.rewards
    for sample, advantage in zip(group.samples, rewards - rewards.mean(), strict=True):
        sample.advantages = float(advantage / (rewards.std(ddof=1) + 1e-6))


def train_step(loop: SyncLoop, prompts_per_step: int, samples_per_prompt: int, learning_rate: float) -> str:
    """One step on fresh samples; the line that tells about it."""
    groups = loop.sample(loop.prompts(prompts_per_step), samples_per_prompt)
    rewards = np.concatenate(loop.score(groups))
    for group in groups:
        group.samples = [sample for sample in group.samples if not sample.failure]
    groups = [group for group in groups if len(group.samples) > 1]
    for group in groups:
        set_advantages(group)

    # Two calls or one: the step is the same, to the last digits.
    half = len(groups) // 2
    for part in (groups[:half], groups[half:]):
        loop.forward_backward(part, LOSS)
    step = loop.optim_step(learning_rate)
    loop.sync()
    norm = step.metrics["grad_norm"]
    return f"version {step.version}  reward {np.nanmean(rewards):.3f}  gradient {norm:.3f}  {step.skipped}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", default="local", help="name of the running stack (%(default)s)")
    parser.add_argument(
        "--state-dir", default=".flotilla", help="where stacks keep their state (%(default)s)"
    )
    parser.add_argument("--config", default="examples/arithmetic/grpo.yaml", help="run file (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="of a step (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-4, help="(%(default)s)")
    parser.add_argument("overrides", nargs="*", help="key.path=value of the run file")
    options = parser.parse_args()
    with (
        connect(options.stack, options.state_dir) as fleet,
        fleet.open_loop(options.config, options.overrides) as loop,
    ):
        for _ in range(options.steps):
            line = train_step(loop, options.prompts, options.samples, options.learning_rate)
            print(f"step {loop.steps_done}  {line}", flush=True)
        print(f"checkpoint {loop.save()}\nmodel {loop.save_model()}")


if __name__ == "__main__":
    main()
