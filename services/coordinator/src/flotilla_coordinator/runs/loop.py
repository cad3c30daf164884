"""The training loop, for every algorithm and every staleness, on one page.

Invariants: at policy step t, the batches of all steps up to t + max_staleness are admitted. A batch is trained exactly
once. The generators serve a version before anything is sampled, evaluated or exported under its name. The live check of
a version goes on while they generate, and passes before an update begins from that version and before an evaluation of
it counts. Generators that leave memory to the trainer sleep while gangs score a batch and learn from it, so whatever
needs them finds them awake. Changes that a user requests take effect between two steps. Every wait in here is a phase,
whose name says what the run waits for.

The collaborators hold the infrastructure, so that this module reads like the algorithm.
"""

from __future__ import annotations

from flotilla_coordinator.rollouts.batch import Batch
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.resume import StartPoint, restore
from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition
from flotilla_core.tasks import all_settled
from flotilla_core.telemetry import names


async def run_loop(run: RunContext, start_point: StartPoint) -> None:
    """Train a run from its start point to its last step, or until its stop rule is met."""
    with telemetry.span(names.RL_LOOP, attributes={names.RUN_ID: run.run_id}):
        await restore(run, start_point)
        if run.update_unrecorded:
            await _step(run)
        else:
            await _sync(run)
            await _do_due_work(run)

        # The rule is checked before the first step too: a run that was resumed may have met it earlier.
        while not _stop_rule_met(run) and await run.wait_for_next_step():
            await _step(run)
            await _retry_refused_checkpoint(run)
        run.take_no_changes()

        if run.sync.version != run.policy.version:
            await _sync(run)
        await run.wait_for_canary()
        await _evaluate_last_version(run)
        await _save_last_checkpoint(run)
        if run.config.export_final:
            await run.export()


async def _step(run: RunContext) -> None:
    """Make the next step, with its span and its metrics."""
    with run.step(run.steps_done):
        await _train_one_step(run, run.steps_done)


async def _score(run: RunContext, batch: Batch) -> None:
    """Have critic, reference and teachers score a batch before it is trained."""
    for name, judge in run.learners.judges.items():
        with run.phase(name):
            await judge(batch)


async def _train_one_step(run: RunContext, step: int) -> None:
    """Train one batch into a new policy version, and let the generators serve it.

    While only a critic learns, the version stays the same.
    """
    version = run.policy.version
    run.source.admit(step, version)
    with run.phase("rollout"):
        batch = await run.sync.keep_serving(run.source.batch(step, version))
    if not run.learners.on_shared_gpus:
        await _score(run, batch)
    await run.wait_for_canary()
    async with run.generators_asleep():
        if run.learners.on_shared_gpus:
            await _score(run, batch)
        with run.phase("train"):
            updates = await run.learners.train(batch)

    # A coordinator that dies before the record is written finds the update in the gang, and records it then; so the
    # generators may have the version already.
    evaluation_due = run.evaluation_due(step + 1)
    works = [run.record_update(step, version, batch, updates)]
    if run.source.samples_from_policy or evaluation_due:
        works.append(_sync(run))
    await all_settled(works)
    if evaluation_due:
        await _evaluate(run, step=step + 1)
    elif run.pinned is not None and run.pinned.ended and not await _collect_pinned_evaluation(run):
        await _evaluate_now(run, step=step + 1)
    if run.checkpoints.due(step + 1) or (evaluation_due and await run.checkpoints.best_due(step + 1)):
        await _save_checkpoint(run, step + 1)


async def _do_due_work(run: RunContext) -> None:
    """Evaluate and save where that is due: before the first step, or after a step that a coordinator did not finish."""
    if run.owes_evaluation:
        await _evaluate(run, step=run.steps_done)
    due = run.checkpoints.due(run.steps_done)
    if run.steps_done > 0 and (
        due or (run.owes_evaluation and await run.checkpoints.best_due(run.steps_done))
    ):
        await _save_checkpoint(run, run.steps_done)


async def _sync(run: RunContext) -> None:
    """Send the policy to the generators; a run that learns and evaluates without generation has no use for them."""
    if run.source.samples_from_policy or run.evaluates_generated:
        with run.phase("sync"):
            await run.sync.publish(run.policy.version)


async def _save_checkpoint(run: RunContext, steps_done: int) -> None:
    """Copy the present state into the gangs' host memory; it is written to disk while training continues."""
    if run.checkpoints.writing:
        with run.phase("wait for the last checkpoint"):
            await run.checkpoints.settle()
    with run.phase("checkpoint"):
        await run.checkpoints.save(run.progress(steps_done))


async def _save_last_checkpoint(run: RunContext) -> None:
    """End a run that saves checkpoints with one on disk; retry the last one where it could not be written."""
    await _wait_for_checkpoint(run)
    if run.checkpoints.wanted and run.checkpoints.newest != run.steps_done:
        await _save_checkpoint(run, run.steps_done)
        await _wait_for_checkpoint(run)
    await _retry_refused_checkpoint(run)
    if run.checkpoints.copying:
        with run.phase("copy checkpoint"):
            await run.checkpoints.copied()


async def _retry_refused_checkpoint(run: RunContext) -> None:
    """Save the present state where a full disk refused the last checkpoint, before training continues."""
    full = run.checkpoints.full
    if full is None or not run.checkpoints.wanted:
        return
    progress = run.progress(run.steps_done)
    with run.phase("checkpoint"):
        saved = run.disk.until_taken(
            "checkpoint",
            lambda: run.checkpoints.save_whole(progress),
            full=full,
            may_fit=run.checkpoints.may_fit,
        )
        await run.sync.keep_serving(saved)


async def _wait_for_checkpoint(run: RunContext) -> None:
    """Wait until the checkpoint that is being written, if any, is on disk."""
    if run.checkpoints.writing:
        with run.phase("write checkpoint"):
            await run.checkpoints.settle()


async def _evaluate(run: RunContext, step: int) -> None:
    """Evaluate the policy, in parallel with the next steps where a generator can be pinned, else at once."""
    await _collect_pinned_evaluation(run)
    if run.pinned is None or not run.pinned.begin(run.policy.version, step):
        await _evaluate_now(run, step)


async def _evaluate_last_version(run: RunContext) -> None:
    """Record the evaluation that is under way, then evaluate the last version unless that was it."""
    await _collect_pinned_evaluation(run)
    if not run.evaluated(run.policy.version):
        await _evaluate_now(run, run.steps_done)


async def _collect_pinned_evaluation(run: RunContext) -> bool:
    """Wait for the pinned evaluation, if any, and record it; return False where its generator was lost."""
    if run.pinned is None or not run.pinned.begun:
        return True
    with run.phase("wait for the last evaluation"):
        result = await run.pinned.result()
    if result.evaluation is None:
        run.evaluation_lost(result.step)
        return False
    await run.record_evaluation(result.step, result.version, result.evaluation)
    return True


async def _evaluate_now(run: RunContext, step: int) -> None:
    """Evaluate the policy on held-out prompts or pairs, where the run has any, and record the accuracy."""
    if run.evaluator is None:
        return
    with run.phase("evaluate"):
        evaluation = await run.sync.keep_serving(run.evaluator.evaluate(run.policy.version, step))
    await run.wait_for_canary()
    await run.record_evaluation(step, run.policy.version, evaluation)


def _stop_rule_met(run: RunContext) -> bool:
    """Return whether the last evaluation ends the run; an accuracy above the allowed band fails the run."""
    rule, accuracy = run.config.stop, run.last_accuracy
    if rule is None or accuracy is None or accuracy < rule.accuracy_at_least:
        return False
    if rule.accuracy_at_most is not None and accuracy > rule.accuracy_at_most:
        raise FailedPrecondition(
            f"accuracy jumped to {accuracy:.3f}, above stop.accuracy_at_most = {rule.accuracy_at_most}",
            where=f"run {run.run_id}, step {run.steps_done}",
            why="the evaluation before was still under stop.accuracy_at_least",
            next_step="evaluate more often (evaluation.every_steps) or lower optimizer.learning_rate",
        )
    return True
