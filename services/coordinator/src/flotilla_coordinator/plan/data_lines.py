"""Where the prompts of a run come from, as lines of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flotilla_coordinator.data.training_sets import LoadedSet
from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.rollouts.draws import issued_per_step, most_prompts_per_step
from flotilla_core.config import PolicyConfig, RolloutConfig, RunConfig

ORDERS = {"shuffled": "shuffled", "as_written": "in file order", "by_field": "ascending by {field}"}


def draw_lines(rollout: RolloutConfig) -> Iterator[Line]:
    """How many prompts a step may draw, where that is not what it trains."""
    if rollout.dynamic_sampling is None and not rollout.over_issue:
        return
    extra = []
    if rollout.dynamic_sampling is not None:
        extra.append("; groups of equal rewards are replaced")
    if rollout.over_issue:
        extra.append(f"; what is left over waits within max_staleness {rollout.max_staleness}")
    yield (
        "prompts drawn for a step",
        f"at most {most_prompts_per_step(rollout)}",
        f"{issued_per_step(rollout)} under way at first for a batch of {rollout.prompts_per_step}{''.join(extra)}",
    )


def greedy_lines(config: RunConfig) -> Iterator[Line]:
    """What is generated beside the samples, where the run compares with it."""
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyConfig) and algorithm.advantage.needs_greedy_reward:
        yield (
            "greedy responses",
            "1 a prompt",
            f"generated beside its {config.rollout.samples_per_prompt} samples and scored by the same rewards, "
            f"never trained: {algorithm.advantage.type} compares with it",
        )


def draw_warnings(config: RunConfig) -> Iterator[str]:
    """Draws that do not fit what the run learns by."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.over_issue and rollout.max_staleness == 0:
        yield (
            "rollout.over_issue gives up whatever has not ended when a batch is full, for nothing may wait at "
            "rollout.max_staleness = 0: long responses are lost; set it to 1"
        )
    if (
        rollout.dynamic_sampling is not None
        and isinstance(algorithm, PolicyConfig)
        and algorithm.advantage.needed_group_samples < 2
    ):
        yield (
            f"rollout.dynamic_sampling drops groups of equal rewards, from which advantage {algorithm.advantage.type} "
            "would learn as well: leave it out"
        )


def data_lines(config: RunConfig, sets: Sequence[LoadedSet], longest: int) -> Iterator[Line]:
    """All of `data.train`, then each data set where there are several."""
    steps, prompts = config.steps, config.rollout.prompts_per_step
    draws, rows = steps * prompts, sum(len(one.file.prompts) for one in sets)
    order = ORDERS[config.data.order].format(field=config.data.difficulty_field)
    least, rest = "", ""
    if rest_epochs := config.data.rest_epochs:
        least, rest = "at least ", f"; solved prompts rest for up to {rest_epochs} epochs"
    epochs = f" = {least}{draws / rows:.2f} epochs" if len(sets) == 1 else ""
    yield (
        "data",
        f"{rows:,} prompts",
        f"longest {longest} tokens; {steps} steps x {prompts} prompts{epochs}, {order}{rest}",
    )
    if len(sets) == 1:
        return
    for one in sets:
        own = len(one.file.prompts)
        yield (
            f"data set {one.name}",
            f"{own:,} prompts",
            f"{one.share:.1%} of the draws, about {draws * one.share / own:.2f} epochs; {one.path}",
        )
