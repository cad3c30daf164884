"""How often rewards failed on the samples of a step, and when that ends a run."""

from __future__ import annotations

from collections.abc import Sequence

from flotilla_coordinator.rollouts.group_rollout import FinishedGroup
from flotilla_core.config import RolloutConfig
from flotilla_core.errors import UserCodeError


def failure_rate(finished: Sequence[FinishedGroup], samples_per_prompt: int, *, timed_out: bool) -> float:
    """Share of all samples that ended as a timeout of their reward, or as another failure of it."""
    failed = sum(failure.timed_out == timed_out for item in finished for failure in item.failures)
    return failed / (len(finished) * samples_per_prompt)


def refuse_failing_rewards(
    run_id: str, step: int, finished: Sequence[FinishedGroup], config: RolloutConfig
) -> None:
    """A reward that fails for most samples is a broken reward, not a hard task."""
    failures = [failure for item in finished for failure in item.failures]
    rate = len(failures) / (len(finished) * config.samples_per_prompt)
    trainable = any(item.group.samples for item in finished)
    if failures and (rate > config.max_reward_failure_rate or not trainable):
        raise UserCodeError(
            f"{len(failures)} samples of step {step} could not be scored ({rate:.0%})",
            where=f"run {run_id}, rewards",
            why=failures[0].failure,
            next_step="fix the reward; errors and timeouts are never scores "
            "(limit: rollout.max_reward_failure_rate)",
        )
