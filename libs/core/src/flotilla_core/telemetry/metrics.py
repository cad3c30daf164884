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
TRAINER: Writer = "trainer"


class Metric(NamedTuple):
    """A metric of the reference page."""

    name: str
    unit: str
    meaning: str
    writer: Writer = "coordinator"


METRICS = (
    Metric("reward/mean", "reward", "Mean reward of the samples of the step."),
    Metric("reward/std", "reward", "Standard deviation of these rewards."),
    Metric("reward/uniform_groups", "share", "Share of the groups whose rewards are all equal."),
    Metric("reward/greedy_mean", "reward", "Mean reward of the greedy responses (with `remax`)."),
    Metric("reward/mean/<data set>", "reward", "`reward/mean` of one of several data sets."),
    Metric("reward/uniform_groups/<data set>", "share", "`reward/uniform_groups` of one data set."),
    Metric("reward/error_rate", "share", "Share of the samples whose reward failed."),
    Metric("reward/timeout_rate", "share", "Share of the samples whose reward took too long."),
    Metric(
        "reward/unverifiable_rate",
        "share",
        "Share of the samples whose response made a verifier fail, for example kept it busy until its limit.",
    ),
    Metric(
        "reward/part/<part>",
        "",
        "Mean value of one of several rewards, and of what a reward says beside its value, as `reward[part]`.",
    ),
    Metric(
        "reward/cut/<reward model>",
        "texts",
        "Texts since the step before that lost their beginning to fit the model (with `too_long: cut`).",
    ),
    Metric(
        "judge/tokens/<reward>",
        "tokens",
        "Tokens that a judge read and wrote for values of this reward, evaluations included.",
    ),
    Metric(
        "judge/cache_hit_ratio/<reward>", "share", "Share of a judge's verdicts that were kept from before."
    ),
    Metric("data/share/<data set>", "share", "Share of the groups from one of several data sets."),
    Metric(
        "data/left_out",
        "count",
        "Rows that are left out, as far as they were drawn: too long or bad (where `data.streaming` is in force).",
    ),
    Metric("data/resting", "share", "Share of all prompts that rest (with `data.rest_epochs`)."),
    Metric("samples/dropped", "samples", "Samples of the step that were not trained."),
    Metric("samples/retried", "samples", "Samples of the step that were issued again."),
    Metric("samples/rejected", "samples", "Samples of generators that were rejected on arrival."),
    Metric("samples/rejected_<kind>", "samples", "The same by kind: unasked, stale or unreadable."),
    Metric(
        "episodes/turns_mean",
        "turns",
        "Mean number of turns of an episode (with `environment`), evaluations included.",
    ),
    Metric(
        "episodes/ended_<ending>",
        "episodes",
        "Episodes by their ending: completed, max_turns, no_room, timeout, error.",
    ),
    Metric(
        "episodes/repeated",
        "episodes",
        "Episodes that began anew: what was lost with a service could not be played again.",
    ),
    Metric(
        "episodes/resumed",
        "episodes",
        "Episodes that went on after the loss of a service: their environment said the same again to the turns so far.",
    ),
    Metric("episodes/resumed_turns", "turns", "Turns of these that were played again, with their tokens."),
    Metric("episodes/unparsed_turns", "turns", "Turns with a call of a tool that could not be read."),
    Metric(
        "episodes/branches_<reason>",
        "branches",
        "Histories that did not go on from what was there, by their reason.",
    ),
    Metric("episodes/policy_s_mean", "s", "Mean time of an episode in which the policy writes."),
    Metric("episodes/environment_s_mean", "s", "Mean time of an episode beside that."),
    Metric(
        "turns/coordinator_s_p50",
        "s",
        "Median time of a turn that neither its environment nor its generator had: the coordinator's work, its waits "
        "for a generator, and the wire.",
    ),
    Metric("turns/coordinator_s_p99", "s", "The 99th percentile of it."),
    Metric(
        "environment/<name>", "", "Mean of a number that an environment gives with the end of an episode."
    ),
    Metric("rollout/ended_groups", "groups", "Groups that ended (with `dynamic_sampling`)."),
    Metric("rollout/uniform_groups", "groups", "Of these, groups whose rewards are all equal."),
    Metric("rollout/carried", "groups", "Groups kept for the next step (with `over_issue`)."),
    Metric("rollout/tails", "groups", "Groups that were given up (with `over_issue`)."),
    Metric("generator/<name>/samples", "samples", "Samples of the step from one generator."),
    Metric("staleness/mean", "updates", "Mean updates between the oldest token of a sample and the step."),
    Metric("staleness/max", "updates", "Largest such distance."),
    Metric("tokens/response_mean", "tokens", "Mean length of a response."),
    Metric("tokens/response_total", "tokens", "Tokens of all responses."),
    Metric("tokens/truncated_rate", "share", "Share of the samples that `max_response_tokens` cut."),
    Metric("tokens/trained", "tokens", "Trained tokens, all passes over the update together.", TRAINER),
    Metric("tokens/counted_share", "share", "Share of the trained tokens that the loss counts.", TRAINER),
    Metric(
        "tokens/fresh_share",
        "share",
        "Share of the tokens in samples that the trained version began.",
        TRAINER,
    ),
    Metric("tokens/fed", "tokens", "Tokens that the forward passes get, padding included.", TRAINER),
    Metric("tokens/padding_share", "share", "Share of padding in these tokens.", TRAINER),
    Metric("tokens_per_s", "tokens/s", "Response tokens over the seconds of the step."),
    Metric("microbatches", "count", "Micro-batches of the update.", TRAINER),
    Metric("loss", "", "Loss of the update.", TRAINER),
    Metric("grad_norm", "", "Norm of the gradient before the clip.", TRAINER),
    Metric("learning_rate", "", "Learning rate of the update.", TRAINER),
    Metric("optimizer/steps", "count", "Optimizer steps that were made.", TRAINER),
    Metric("entropy", "nats", "Mean entropy of the policy at a trained token.", TRAINER),
    Metric("clip_fraction", "share", "Share of the trained tokens that the loss clips.", TRAINER),
    Metric("ratio_mean", "", "Mean ratio of the policy to the one that the loss compares with.", TRAINER),
    Metric(
        "turns/compared_share",
        "share",
        "Share of the turns that were asked in the state of another turn of their group, with `gigpo`.",
        TRAINER,
    ),
    Metric("advantages/std", "", "Standard deviation of the advantages of the tokens that count.", TRAINER),
    Metric(
        "probs_diff/mean", "probability", "Mean difference between rollout and trainer, by token.", TRAINER
    ),
    Metric("probs_diff/max", "probability", "Largest such difference.", TRAINER),
    Metric(
        "probs_diff/fresh",
        "probability",
        "Mean difference over tokens in samples that the trained version began.",
        TRAINER,
    ),
    Metric(
        "logprob_diff/mean", "nats", "Mean difference of log-probabilities of rollout and trainer.", TRAINER
    ),
    Metric("logprob_diff/max", "nats", "Largest such difference.", TRAINER),
    Metric(
        "rollout_kl", "nats", "Mean estimate (k3) of the divergence between rollout and trainer.", TRAINER
    ),
    Metric(
        "rollout_correlation", "", "Correlation of the token probabilities of rollout and trainer.", TRAINER
    ),
    Metric("correction/weight_mean", "", "Mean weight that `algorithm.correction` gives a token.", TRAINER),
    Metric(
        "correction/left_out", "share", "Share of the tokens that `algorithm.correction` leaves out.", TRAINER
    ),
    Metric("correction/normalized_by", "", "Mean weight that `normalize_importance` divides by.", TRAINER),
    Metric("kl/mean", "nats", "Mean divergence from the reference, by token (with `algorithm.kl`).", TRAINER),
    Metric("kl/coefficient", "", "Coefficient of the divergence in this update.", TRAINER),
    Metric(
        "teacher/divergence", "nats", "Mean divergence from the teacher (with `algorithm.teacher`).", TRAINER
    ),
    Metric(
        "teacher/mass", "probability", "Mean probability of the teacher's likeliest tokens together.", TRAINER
    ),
    Metric("critic/<metric>", "", "The metric of this name, of the update of the critic.", TRAINER),
    Metric("critic/value_mean", "reward", "Mean value that the critic expected.", TRAINER),
    Metric("critic/return_mean", "reward", "Mean return that the critic learns.", TRAINER),
    Metric(
        "critic/explained_variance",
        "share",
        "Share of the variance of the returns that values explain.",
        TRAINER,
    ),
    Metric("preference/accuracy", "share", "Share of the pairs whose preferred answer is ahead.", TRAINER),
    Metric("preference/margin", "reward", "Mean lead of the preferred answer.", TRAINER),
    Metric("preference/chosen_reward", "reward", "Mean reward of the preferred answers.", TRAINER),
    Metric("preference/rejected_reward", "reward", "Mean reward of the other answers.", TRAINER),
    Metric(
        "preference/chosen_logprob", "nats", "Mean log-probability of a preferred answer (`dpo`).", TRAINER
    ),
    Metric(
        "preference/rejected_logprob", "nats", "Mean log-probability of the other answer (`dpo`).", TRAINER
    ),
    Metric("eval/accuracy", "share", "Share of right held-out answers in the newest evaluation."),
    Metric("eval/accuracy_stderr", "share", "Its standard error, over prompts."),
    Metric("eval/reward_mean", "reward", "Mean reward of the same answers."),
    Metric("eval/reward_stderr", "reward", "Its standard error, over prompts."),
    Metric("eval/accuracy_before", "share", "Accuracy of the first evaluation (`run show` alone)."),
    Metric("eval/reward_mean_before", "reward", "Mean reward of the first evaluation (`run show` alone)."),
    Metric("eval/step", "steps", "Steps before the newest evaluation (`run show` alone)."),
    Metric("eval/mean@<n>", "share", "Share of right answers among n to each prompt."),
    Metric("eval/pass@<k>", "share", "Chance that one of k answers to a prompt is right."),
    Metric("eval/maj@<k>", "share", "Chance that the most frequent of k answers to a prompt is right."),
    Metric("eval/stderr_<figure>", "share", "Standard error over prompts of `mean@n`, `pass@k` and `maj@k`."),
    Metric(
        "eval/part:<part>",
        "",
        "Mean of what a reward says of held-out answers beside its value, as `reward[part]`.",
    ),
    Metric(
        "eval/unscored_rate",
        "share",
        "Share of the held-out answers whose reward failed; in no other figure.",
    ),
    Metric("eval/unverifiable_rate", "share", "Share of the held-out answers that made a verifier fail."),
    Metric("eval/<set>/<figure>", "", "The same figure of one of several held-out sets."),
    Metric("sync/bytes", "bytes", "Size of the weights that were sent."),
    Metric("sync/stage_s", "seconds", "Time to bring the weights to the members."),
    Metric("sync/stall_s", "seconds", "Longest pause of a generator at its commit."),
    Metric("sync/members", "count", "Generators that took the weights."),
    Metric("sync/epochs", "count", "Weight groups that the sync took; 1 where nothing failed."),
    Metric("sync/caught_up", "count", "Replicas that joined since the last sync and serve already."),
    Metric("canary/mean", "probability", "Mean difference between generator and trainer after a sync."),
    Metric("canary/logprob_mean", "nats", "The same of the log-probabilities."),
    Metric(
        "canary/trainer_rounding",
        "probability",
        "Mean difference between the trainer and float32 on the same weights and tokens, as last measured.",
    ),
    Metric("canary/max", "nats", "Largest difference of log-probabilities after a sync."),
    Metric("time/canary_s", "seconds", "The last canary, while generation goes on."),
    Metric(
        "time/wait_for_the_canary_s",
        "seconds",
        "Wait for the canary before an update, beyond all other waits: what it costs the step.",
    ),
    Metric("checkpoint/write_s", "seconds", "Time to write the newest durable checkpoint."),
    Metric("checkpoint/bytes", "bytes", "Size of that checkpoint."),
    Metric("idle/trainer", "share", "Share of the step that the trainer waited for rollouts."),
    Metric("idle/generators", "share", "Mean share of the step without a sample on a generator."),
    Metric("ledger/backlog", "requests", "Requests that wait for the writer of the ledger."),
    Metric("coordinator/loop_lag_p99_s", "seconds", "99th percentile of the delay of the event loop."),
    Metric("coordinator/loop_lag_max_s", "seconds", "Longest delay of the event loop."),
    Metric("compilations", "count", "Compilations since the last update; absent without any.", TRAINER),
    Metric("time/step_s", "seconds", "The whole step."),
    Metric("time/rollout_s", "seconds", "Wait for the batch of the step."),
    Metric("time/reference_s", "seconds", "Scoring of the batch by the first policy."),
    Metric("time/critic_s", "seconds", "Scoring of the batch by the critic."),
    Metric("time/teacher_s", "seconds", "Scoring of the batch by the teachers."),
    Metric("time/teacher_<name>_s", "seconds", "Scoring by one of the named teachers."),
    Metric("time/train_s", "seconds", "Update of the policy, and of the critic."),
    Metric(
        "time/sleep_s",
        "seconds",
        "Until all generators have left their KV cache's memory (with `generator.sleep_while_training`).",
    ),
    Metric(
        "time/wake_s",
        "seconds",
        "Until all have it again, and decode (with `generator.sleep_while_training`).",
    ),
    Metric("time/sync_s", "seconds", "Sync of the weights; its canary only with `loop: client`."),
    Metric("time/evaluate_s", "seconds", "Evaluation within the step."),
    Metric("time/wait_for_the_last_evaluation_s", "seconds", "Wait for a pinned evaluation to end."),
    Metric("time/checkpoint_s", "seconds", "Snapshot of a checkpoint."),
    Metric("time/wait_for_the_last_checkpoint_s", "seconds", "Wait for an earlier checkpoint to be written."),
    Metric("time/write_checkpoint_s", "seconds", "Wait for the last checkpoint at the end of a run."),
    Metric("time/forward_and_backward_s", "seconds", "Calls for gradients (with `loop: client`)."),
    Metric("time/optimizer_step_s", "seconds", "Calls for an optimizer step (with `loop: client`)."),
    Metric(
        "time/copy_checkpoint_s", "seconds", "Wait for the last copy in object storage at the end of a run."
    ),
    Metric("time/export_s", "seconds", "Export of the model (with `loop: client`)."),
    Metric("time/open_session_s", "seconds", "Opening of the sessions, before the first step."),
    Metric("time/load_checkpoint_s", "seconds", "Load of the checkpoint that a run resumes from."),
    Metric("time/look_for_the_sessions_s", "seconds", "Search for sessions that still live, at a resume."),
    Metric("time/paused_s", "seconds", "Pause of the run."),
    Metric("time/prepare_s", "seconds", "Preparation of the update, a part of `time/train_s`.", TRAINER),
    Metric(
        "time/forward_backward_s", "seconds", "Forward and backward passes, a part of the update.", TRAINER
    ),
    Metric("time/optimizer_s", "seconds", "Optimizer steps, a part of the update.", TRAINER),
    Metric("time/compile_s", "seconds", "Compilation since the last update; absent without any.", TRAINER),
)

GROUPS = (
    ("learning", r"(reward|eval|preference)/"),
    ("responses", r"(tokens/(response|truncated)|staleness|samples|rollout|data|generator)[/_]"),
    (
        "update",
        r"(loss$|grad_norm$|learning_rate$|entropy$|clip_fraction$|ratio_mean$|optimizer/|advantages/|kl/|tokens/|microbatches$)",
    ),
    ("roles", r"(critic|teacher|judge)/"),
    ("agreement", r"(probs_diff|logprob_diff|rollout_|correction|canary)"),
    ("time", r"(tokens_per_s$|time/|idle/|compilations$)"),
    ("weights and checkpoints", r"(sync|checkpoint)/"),
)
"""Groups of metrics with patterns of their names, those first that tell whether a run learns; the rest comes last."""
REST = "the rest"

HIGHER_IS_BETTER = re.compile(
    r"(reward/(greedy_)?mean|eval/(?!([^/]+/)?(step$|part:)|.*(stderr|_before|_rate$))|preference/(accuracy|margin)|tokens_per_s|critic/explained_variance)"
)
LOWER_IS_BETTER = re.compile(
    r"((reward|eval|eval/[^/]+)/(error|timeout|unscored)_rate|time/step_s|tokens/padding_share)"
)


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
