"""How often and on how much a run is evaluated.

Invariant: counted as the loop does it: before the first step, every `evaluation.every_steps`, and after the last one.
"""

from __future__ import annotations

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.plan import checks
from flotilla_coordinator.plan.algorithm import Line
from flotilla_core.config import EvaluationConfig, RunConfig


def evaluation_line(config: RunConfig, held_out: PromptFile) -> Line:
    """Number and size of the evaluations."""
    evaluation = _asked(config)
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
    """What does not fit into sequences of at most `limit` tokens."""
    if config.evaluates_pairs:
        return checks.answer_errors(limit, checks.longest_pair(held_out))
    tokens = _asked(config).max_response_tokens or config.rollout.sampling.max_response_tokens
    longest = checks.longest_prompt(held_out)
    return checks.length_errors(limit, longest, tokens, "evaluation.max_response_tokens")


def _asked(config: RunConfig) -> EvaluationConfig:
    assert config.evaluation is not None, "there is held-out data only where there is an evaluation"
    return config.evaluation
