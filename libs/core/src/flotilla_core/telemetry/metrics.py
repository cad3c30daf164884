"""Every metric that a run reports, with its unit, its writer and its meaning.

`docs/reference/metrics.md` is generated from this table.

Invariants: a part in angle brackets stands for a name that the run gives; every metric that trainer or coordinator
writes is in the table, and everything in the table is written (`tests/contract/test_reference.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

Writer = Literal["coordinator", "trainer"]
COORDINATOR: Writer = "coordinator"
TRAINER: Writer = "trainer"


class Metric(NamedTuple):
    """A metric of the reference page."""

    name: str
    unit: str
    writer: Writer
    meaning: str


METRICS = (
    Metric("reward/mean", "reward", COORDINATOR, "Mean reward of the samples of the step."),
    Metric("reward/std", "reward", COORDINATOR, "Standard deviation of these rewards."),
    Metric("reward/uniform_groups", "share", COORDINATOR, "Share of the groups whose rewards are all equal."),
    Metric(
        "reward/greedy_mean", "reward", COORDINATOR, "Mean reward of the greedy responses (with `remax`)."
    ),
    Metric("reward/mean/<data set>", "reward", COORDINATOR, "`reward/mean` of one of several data sets."),
    Metric(
        "reward/uniform_groups/<data set>", "share", COORDINATOR, "`reward/uniform_groups` of one data set."
    ),
    Metric("reward/error_rate", "share", COORDINATOR, "Share of the samples whose reward failed."),
    Metric("reward/timeout_rate", "share", COORDINATOR, "Share of the samples whose reward took too long."),
    Metric(
        "reward/unreadable_rate",
        "share",
        COORDINATOR,
        "Share of the samples whose response broke the reward `math`, or kept it busy until its limit: worth 0.",
    ),
    Metric(
        "data/share/<data set>", "share", COORDINATOR, "Share of the groups from one of several data sets."
    ),
    Metric(
        "data/left_out",
        "count",
        COORDINATOR,
        "Rows that are left out, as far as they were drawn: too long or bad (where `data.streaming` is in force).",
    ),
    Metric("data/resting", "share", COORDINATOR, "Share of all prompts that rest (with `data.rest_epochs`)."),
    Metric("samples/dropped", "samples", COORDINATOR, "Samples of the step that were not trained."),
    Metric("samples/retried", "samples", COORDINATOR, "Samples of the step that were issued again."),
    Metric(
        "samples/rejected", "samples", COORDINATOR, "Samples of generators that were rejected on arrival."
    ),
    Metric(
        "samples/rejected_<kind>", "samples", COORDINATOR, "The same by kind: unasked, stale or unreadable."
    ),
    Metric("rollout/ended_groups", "groups", COORDINATOR, "Groups that ended (with `dynamic_sampling`)."),
    Metric("rollout/uniform_groups", "groups", COORDINATOR, "Of these, groups whose rewards are all equal."),
    Metric("rollout/carried", "groups", COORDINATOR, "Groups kept for the next step (with `over_issue`)."),
    Metric("rollout/tails", "groups", COORDINATOR, "Groups that were given up (with `over_issue`)."),
    Metric("generator/<name>/samples", "samples", COORDINATOR, "Samples of the step from one generator."),
    Metric(
        "staleness/mean",
        "updates",
        COORDINATOR,
        "Mean updates between the oldest token of a sample and the step.",
    ),
    Metric("staleness/max", "updates", COORDINATOR, "Largest such distance."),
    Metric("tokens/response_mean", "tokens", COORDINATOR, "Mean length of a response."),
    Metric("tokens/response_total", "tokens", COORDINATOR, "Tokens of all responses."),
    Metric(
        "tokens/truncated_rate", "share", COORDINATOR, "Share of the samples that `max_response_tokens` cut."
    ),
    Metric("tokens/trained", "tokens", TRAINER, "Trained tokens, all passes over the update together."),
    Metric("tokens/counted_share", "share", TRAINER, "Share of the trained tokens that the loss counts."),
    Metric(
        "tokens/fresh_share",
        "share",
        TRAINER,
        "Share of the tokens in samples that the trained version began.",
    ),
    Metric("tokens/fed", "tokens", TRAINER, "Tokens that the forward passes get, padding included."),
    Metric("tokens/padding_share", "share", TRAINER, "Share of padding in these tokens."),
    Metric("tokens_per_s", "tokens/s", COORDINATOR, "Response tokens over the seconds of the step."),
    Metric("microbatches", "count", TRAINER, "Micro-batches of the update."),
    Metric("loss", "", TRAINER, "Loss of the update."),
    Metric("grad_norm", "", TRAINER, "Norm of the gradient before the clip."),
    Metric("learning_rate", "", TRAINER, "Learning rate of the update."),
    Metric("optimizer/steps", "count", TRAINER, "Optimizer steps that were made."),
    Metric("entropy", "nats", TRAINER, "Mean entropy of the policy at a trained token."),
    Metric("clip_fraction", "share", TRAINER, "Share of the trained tokens that the loss clips."),
    Metric("ratio_mean", "", TRAINER, "Mean ratio of the policy to the one that the loss compares with."),
    Metric("advantages/std", "", TRAINER, "Standard deviation of the advantages of the tokens that count."),
    Metric(
        "probs_diff/mean", "probability", TRAINER, "Mean difference between rollout and trainer, by token."
    ),
    Metric("probs_diff/max", "probability", TRAINER, "Largest such difference."),
    Metric(
        "probs_diff/fresh",
        "probability",
        TRAINER,
        "Mean difference over tokens in samples that the trained version began.",
    ),
    Metric(
        "logprob_diff/mean", "nats", TRAINER, "Mean difference of log-probabilities of rollout and trainer."
    ),
    Metric("logprob_diff/max", "nats", TRAINER, "Largest such difference."),
    Metric(
        "rollout_kl", "nats", TRAINER, "Mean estimate (k3) of the divergence between rollout and trainer."
    ),
    Metric(
        "rollout_correlation", "", TRAINER, "Correlation of the token probabilities of rollout and trainer."
    ),
    Metric("correction/weight_mean", "", TRAINER, "Mean weight that `algorithm.correction` gives a token."),
    Metric(
        "correction/left_out", "share", TRAINER, "Share of the tokens that `algorithm.correction` leaves out."
    ),
    Metric("correction/normalized_by", "", TRAINER, "Mean weight that `normalize_importance` divides by."),
    Metric("kl/mean", "nats", TRAINER, "Mean divergence from the reference, by token (with `algorithm.kl`)."),
    Metric("kl/coefficient", "", TRAINER, "Coefficient of the divergence in this update."),
    Metric(
        "teacher/divergence", "nats", TRAINER, "Mean divergence from the teacher (with `algorithm.teacher`)."
    ),
    Metric(
        "teacher/mass", "probability", TRAINER, "Mean probability of the teacher's likeliest tokens together."
    ),
    Metric("critic/<metric>", "", TRAINER, "The metric of this name, of the update of the critic."),
    Metric("critic/value_mean", "reward", TRAINER, "Mean value that the critic expected."),
    Metric("critic/return_mean", "reward", TRAINER, "Mean return that the critic learns."),
    Metric(
        "critic/explained_variance",
        "share",
        TRAINER,
        "Share of the variance of the returns that values explain.",
    ),
    Metric("preference/accuracy", "share", TRAINER, "Share of the pairs whose preferred answer is ahead."),
    Metric("preference/margin", "reward", TRAINER, "Mean lead of the preferred answer."),
    Metric("preference/chosen_reward", "reward", TRAINER, "Mean reward of the preferred answers."),
    Metric("preference/rejected_reward", "reward", TRAINER, "Mean reward of the other answers."),
    Metric(
        "preference/chosen_logprob", "nats", TRAINER, "Mean log-probability of a preferred answer (`dpo`)."
    ),
    Metric(
        "preference/rejected_logprob", "nats", TRAINER, "Mean log-probability of the other answer (`dpo`)."
    ),
    Metric(
        "eval/accuracy", "share", COORDINATOR, "Share of right held-out answers in the newest evaluation."
    ),
    Metric("eval/accuracy_stderr", "share", COORDINATOR, "Its standard error, over prompts."),
    Metric("eval/reward_mean", "reward", COORDINATOR, "Mean reward of the same answers."),
    Metric("eval/reward_stderr", "reward", COORDINATOR, "Its standard error, over prompts."),
    Metric(
        "eval/accuracy_before", "share", COORDINATOR, "Accuracy of the first evaluation (`run show` alone)."
    ),
    Metric(
        "eval/reward_mean_before",
        "reward",
        COORDINATOR,
        "Mean reward of the first evaluation (`run show` alone).",
    ),
    Metric("eval/step", "steps", COORDINATOR, "Steps before the newest evaluation (`run show` alone)."),
    Metric("eval/mean@<n>", "share", COORDINATOR, "Share of right answers among n to each prompt."),
    Metric("eval/pass@<k>", "share", COORDINATOR, "Chance that one of k answers to a prompt is right."),
    Metric(
        "eval/maj@<n>", "share", COORDINATOR, "Share of prompts whose most frequent of n answers is right."
    ),
    Metric("eval/<set>/<figure>", "", COORDINATOR, "The same figure of one of several held-out sets."),
    Metric("sync/bytes", "bytes", COORDINATOR, "Size of the weights that were sent."),
    Metric("sync/stage_s", "seconds", COORDINATOR, "Time to bring the weights to the members."),
    Metric("sync/stall_s", "seconds", COORDINATOR, "Longest pause of a generator at its commit."),
    Metric("sync/members", "count", COORDINATOR, "Generators that took the weights."),
    Metric("sync/epochs", "count", COORDINATOR, "Weight groups that the sync took; 1 where nothing failed."),
    Metric(
        "sync/caught_up", "count", COORDINATOR, "Replicas that joined since the last sync and serve already."
    ),
    Metric(
        "canary/mean",
        "probability",
        COORDINATOR,
        "Mean difference between generator and trainer after a sync.",
    ),
    Metric("canary/logprob_mean", "nats", COORDINATOR, "The same of the log-probabilities."),
    Metric(
        "canary/trainer_rounding",
        "probability",
        COORDINATOR,
        "Mean difference between the trainer and float32 on the same weights and tokens, as last measured.",
    ),
    Metric("canary/max", "nats", COORDINATOR, "Largest difference of log-probabilities after a sync."),
    Metric("time/canary_s", "seconds", COORDINATOR, "The last canary, while generation goes on."),
    Metric(
        "time/wait_for_the_canary_s",
        "seconds",
        COORDINATOR,
        "Wait for the canary before an update, beyond all other waits: what it costs the step.",
    ),
    Metric("checkpoint/write_s", "seconds", COORDINATOR, "Time to write the newest durable checkpoint."),
    Metric("checkpoint/bytes", "bytes", COORDINATOR, "Size of that checkpoint."),
    Metric("idle/trainer", "share", COORDINATOR, "Share of the step that the trainer waited for rollouts."),
    Metric(
        "idle/generators", "share", COORDINATOR, "Mean share of the step without a sample on a generator."
    ),
    Metric("ledger/backlog", "requests", COORDINATOR, "Requests that wait for the writer of the ledger."),
    Metric(
        "coordinator/loop_lag_p99_s",
        "seconds",
        COORDINATOR,
        "99th percentile of the delay of the event loop.",
    ),
    Metric("coordinator/loop_lag_max_s", "seconds", COORDINATOR, "Longest delay of the event loop."),
    Metric("compilations", "count", TRAINER, "Compilations since the last update; absent without any."),
    Metric("time/step_s", "seconds", COORDINATOR, "The whole step."),
    Metric("time/rollout_s", "seconds", COORDINATOR, "Wait for the batch of the step."),
    Metric("time/reference_s", "seconds", COORDINATOR, "Scoring of the batch by the first policy."),
    Metric("time/critic_s", "seconds", COORDINATOR, "Scoring of the batch by the critic."),
    Metric("time/teacher_s", "seconds", COORDINATOR, "Scoring of the batch by the teachers."),
    Metric("time/teacher_<name>_s", "seconds", COORDINATOR, "Scoring by one of the named teachers."),
    Metric("time/train_s", "seconds", COORDINATOR, "Update of the policy, and of the critic."),
    Metric(
        "time/sleep_s",
        "seconds",
        COORDINATOR,
        "Until all generators have left their KV cache's memory (with `generator.sleep_while_training`).",
    ),
    Metric(
        "time/wake_s",
        "seconds",
        COORDINATOR,
        "Until all have it again, and decode (with `generator.sleep_while_training`).",
    ),
    Metric(
        "time/sync_s", "seconds", COORDINATOR, "Sync of the weights; its canary only with `loop: client`."
    ),
    Metric("time/evaluate_s", "seconds", COORDINATOR, "Evaluation within the step."),
    Metric(
        "time/wait_for_the_last_evaluation_s", "seconds", COORDINATOR, "Wait for a pinned evaluation to end."
    ),
    Metric("time/checkpoint_s", "seconds", COORDINATOR, "Snapshot of a checkpoint."),
    Metric(
        "time/wait_for_the_last_checkpoint_s",
        "seconds",
        COORDINATOR,
        "Wait for an earlier checkpoint to be written.",
    ),
    Metric(
        "time/write_checkpoint_s", "seconds", COORDINATOR, "Wait for the last checkpoint at the end of a run."
    ),
    Metric(
        "time/forward_and_backward_s", "seconds", COORDINATOR, "Calls for gradients (with `loop: client`)."
    ),
    Metric(
        "time/optimizer_step_s", "seconds", COORDINATOR, "Calls for an optimizer step (with `loop: client`)."
    ),
    Metric(
        "time/copy_checkpoint_s",
        "seconds",
        COORDINATOR,
        "Wait for the last copy in object storage at the end of a run.",
    ),
    Metric("time/export_s", "seconds", COORDINATOR, "Export of the model (with `loop: client`)."),
    Metric("time/open_session_s", "seconds", COORDINATOR, "Opening of the sessions, before the first step."),
    Metric(
        "time/load_checkpoint_s", "seconds", COORDINATOR, "Load of the checkpoint that a run resumes from."
    ),
    Metric(
        "time/look_for_the_sessions_s",
        "seconds",
        COORDINATOR,
        "Search for sessions that still live, at a resume.",
    ),
    Metric("time/paused_s", "seconds", COORDINATOR, "Pause of the run."),
    Metric("time/prepare_s", "seconds", TRAINER, "Preparation of the update, a part of `time/train_s`."),
    Metric(
        "time/forward_backward_s", "seconds", TRAINER, "Forward and backward passes, a part of the update."
    ),
    Metric("time/optimizer_s", "seconds", TRAINER, "Optimizer steps, a part of the update."),
    Metric("time/compile_s", "seconds", TRAINER, "Compilation since the last update; absent without any."),
)

GROUPS = (
    ("learning", r"(reward|eval|preference)/"),
    ("responses", r"(tokens/(response|truncated)|staleness|samples|rollout|data|generator)[/_]"),
    (
        "update",
        r"(loss$|grad_norm$|learning_rate$|entropy$|clip_fraction$|ratio_mean$|optimizer/|advantages/|kl/|tokens/|microbatches$)",
    ),
    ("roles", r"(critic|teacher)/"),
    ("agreement", r"(probs_diff|logprob_diff|rollout_|correction|canary)"),
    ("time", r"(tokens_per_s$|time/|idle/|compilations$)"),
    ("weights and checkpoints", r"(sync|checkpoint)/"),
)
"""Groups of metrics with patterns of their names, those first that tell whether a run learns; the rest comes last."""
REST = "the rest"

HIGHER_IS_BETTER = re.compile(
    r"(reward/(greedy_)?mean|eval/(?!step|.*(stderr|_before))|preference/(accuracy|margin)|tokens_per_s|critic/explained_variance)"
)
LOWER_IS_BETTER = re.compile(r"(reward/(error|timeout)_rate|time/step_s|tokens/padding_share)")


def higher_is_better(name: str) -> bool | None:
    """Return whether more of a metric is better, or less; None where neither is."""
    if HIGHER_IS_BETTER.match(name):
        return True
    return False if LOWER_IS_BETTER.match(name) else None


def in_groups(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the groups of these metrics, each with its metrics in the order of the table above."""
    found: dict[str, list[str]] = {group: [] for group in (*(group for group, _ in GROUPS), REST)}
    for name in sorted(names, key=lambda name: (_place(name), name)):
        group = next((group for group, pattern in GROUPS if re.match(pattern, name)), REST)
        found[group].append(name)
    return [(group, members) for group, members in found.items() if members]


def _place(name: str) -> int:
    """Return the row of a metric in the table, whose names may hold a part that the run gives."""
    return next((row for row, pattern in enumerate(_patterns()) if pattern.fullmatch(name)), len(METRICS))


@cache
def _patterns() -> list[re.Pattern[str]]:
    return [re.compile(re.sub(r"<[^>]*>", ".+", re.escape(metric.name))) for metric in METRICS]
