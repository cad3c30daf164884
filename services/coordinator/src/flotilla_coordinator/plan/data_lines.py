"""Describes the prompts of a run and its evaluations, as lines of its plan.

Invariant: evaluations are counted as the loop makes them: before the first step, every `evaluation.every_steps`, and
after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.training_sets import LoadedSet
from flotilla_coordinator.plan import checks
from flotilla_coordinator.plan.lines import Line
from flotilla_coordinator.rollouts.prompt_queue import issued_per_step, most_prompts_per_step
from flotilla_core.config import EvaluationConfig, PolicyConfig, RolloutConfig, RunConfig

ORDERS = {"shuffled": "shuffled", "as_written": "in file order", "by_field": "ascending by {field}"}


def draw_lines(rollout: RolloutConfig) -> Iterator[Line]:
    """Say how many prompts a step may draw, where it may draw more than it trains."""
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
    """Describe the greedy responses, where the run compares its samples with them."""
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyConfig) and algorithm.advantage.needs_greedy_reward:
        yield (
            "greedy responses",
            "1 a prompt",
            f"generated in addition to its {config.rollout.samples_per_prompt} samples and scored by the same rewards, "
            f"never trained: {algorithm.advantage.type} compares with it",
        )


def draw_warnings(config: RunConfig) -> Iterator[str]:
    """Warn of ways to draw prompts that do not fit the advantage."""
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
    """Describe the whole of `data.train`, then each data set where there are several."""
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


def evaluation_line(config: RunConfig, held_out: PromptFile) -> Line:
    """Describe the number and the size of the evaluations."""
    evaluation = _evaluation_of(config)
    every, steps = evaluation.every_steps, config.steps
    during = steps // every if every else 0
    after = 0 if every and steps % every == 0 else 1
    prompts = min(len(held_out.prompts), evaluation.max_prompts)
    pairs, drawn = config.evaluates_pairs, evaluation.samples_per_prompt
    how = f"at temperature {evaluation.temperature:g}" if evaluation.temperature else "greedy"
    return (
        "evaluations",
        f"{1 + during + after} x {prompts} {'pairs' if pairs else 'prompts'}"
        + (f" x {drawn} samples" if drawn > 1 else ""),
        f"{'ranked' if pairs else how}: before, {f'every {every} steps, ' if every else ''}after",
    )


def evaluation_errors(config: RunConfig, held_out: PromptFile, limit: int) -> list[str]:
    """Refuse an evaluation whose sequences are longer than `limit` tokens."""
    if config.evaluates_pairs:
        return checks.answer_errors(limit, checks.longest_pair(held_out))
    tokens = _evaluation_of(config).max_response_tokens or config.rollout.sampling.max_response_tokens
    longest = checks.longest_prompt(held_out)
    return checks.length_errors(limit, longest, tokens, "evaluation.max_response_tokens")


def _evaluation_of(config: RunConfig) -> EvaluationConfig:
    assert config.evaluation is not None, "there is held-out data only where there is an evaluation"
    return config.evaluation
