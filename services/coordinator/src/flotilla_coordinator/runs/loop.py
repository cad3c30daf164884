"""The training loop, for every algorithm and every staleness, on one page.

Invariants: at policy step t, batches up to t + max_staleness have been admitted; a batch is trained exactly
once; the generators serve the weights of a version before anything is sampled, evaluated or exported under
its name; what a user wants changed is taken in between two steps; every wait inside names what it waits for.
Infrastructure lives in the collaborators: this module reads like the algorithm.
"""

from __future__ import annotations

from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.resume import StartPoint, restore
from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition
from flotilla_core.telemetry import names


async def run_loop(run: RunContext, start_point: StartPoint) -> None:
    """Train `run` from where it begins to its last step, or to its stop rule."""
    with telemetry.span(names.RL_LOOP, attributes={names.RUN_ID: run.run_id}):
        await restore(run, start_point)
        if run.update_unrecorded:
            await _step(run)
        else:
            await _sync(run)
            await _make_up(run)

        # Before the first step too: a run that begins anew may have met the rule in an earlier part of it.
        while not _stop_rule_met(run) and await run.wait_for_next_step():
            await _step(run)
            await _checkpoint_taken(run)
        run.take_no_changes()

        if run.sync.version != run.policy.version:
            await _sync(run)
        await _evaluate_end(run)
        await _checkpoint_end(run)
        if run.config.export_final:
            await run.export()


async def _step(run: RunContext) -> None:
    """The step that comes next, with its span and its metrics."""
    with run.step(run.steps_done):
        await _train_one_step(run, run.steps_done)


async def _train_one_step(run: RunContext, step: int) -> None:
    """One batch in, one policy version out (none while only a critic learns), and the fleet serving it."""
    version = run.policy.version
    run.source.admit(step, version)
    with run.phase("rollout"):
        batch = await run.sync.keep_serving(run.source.batch(step, version))
    for name, judge in run.learners.judges.items():
        with run.phase(name):
            await judge(batch)
    with run.phase("train"):
        updates = await run.learners.train(batch)
    await run.record_update(step, version, batch, updates)

    evaluation_due = run.evaluation_due(step + 1)
    if run.source.samples_from_policy or evaluation_due:
        await _sync(run)
    if evaluation_due:
        await _evaluate(run, step=step + 1)
    elif run.pinned is not None and run.pinned.ended and not await _take_pinned(run):
        await _evaluate_now(run, step=step + 1)
    if run.checkpoints.due(step + 1):
        await _checkpoint(run, step + 1)


async def _make_up(run: RunContext) -> None:
    """What the steps that are done still call for: at the start, and where a coordinator died after an update."""
    if run.owes_evaluation:
        await _evaluate(run, step=run.steps_done)
    if run.steps_done > 0 and run.checkpoints.due(run.steps_done):
        await _checkpoint(run, run.steps_done)


async def _sync(run: RunContext) -> None:
    """Bring the policy to the generators, where the run ever asks them: given answers need none."""
    if run.source.samples_from_policy or run.evaluates_generated:
        with run.phase("sync"):
            await run.sync.publish(run.policy.version)


async def _checkpoint(run: RunContext, steps_done: int) -> None:
    """The state as it is now, into the gangs' host memory; it is written while the run goes on."""
    if run.checkpoints.writing:
        with run.phase("wait for the last checkpoint"):
            await run.checkpoints.settle()
    with run.phase("checkpoint"):
        await run.checkpoints.save(run.progress(steps_done))


async def _checkpoint_end(run: RunContext) -> None:
    """A run that keeps checkpoints ends with one, on disk; a last one that could not be written is tried once more."""
    await _checkpoint_written(run)
    if run.checkpoints.wanted and run.checkpoints.newest != run.steps_done:
        await _checkpoint(run, run.steps_done)
        await _checkpoint_written(run)
    await _checkpoint_taken(run)


async def _checkpoint_taken(run: RunContext) -> None:
    """One that a full disk did not take is made once more, of the state as it is now, before the run goes on."""
    full = run.checkpoints.full
    if full is None or not run.checkpoints.wanted:
        return
    progress = run.progress(run.steps_done)
    with run.phase("checkpoint"):
        again = run.disk.until_taken(
            "checkpoint",
            lambda: run.checkpoints.save_whole(progress),
            full=full,
            may_fit=run.checkpoints.may_fit,
        )
        await run.sync.keep_serving(again)


async def _checkpoint_written(run: RunContext) -> None:
    """Nothing of a checkpoint is left to be written."""
    if run.checkpoints.writing:
        with run.phase("write checkpoint"):
            await run.checkpoints.settle()


async def _evaluate(run: RunContext, step: int) -> None:
    """Beside the training that follows where a generator can be spared for it; one such evaluation at a time."""
    await _take_pinned(run)
    if run.pinned is None or not run.pinned.begin(run.policy.version, step):
        await _evaluate_now(run, step)


async def _evaluate_end(run: RunContext) -> None:
    """The last version is evaluated, and nothing of an earlier evaluation is left."""
    await _take_pinned(run)
    if not run.evaluated(run.policy.version):
        await _evaluate_now(run, run.steps_done)


async def _take_pinned(run: RunContext) -> bool:
    """Record the evaluation that was begun beside the training, if any; False where its generator was lost."""
    if run.pinned is None or not run.pinned.begun:
        return True
    with run.phase("wait for the last evaluation"):
        result = await run.pinned.result()
    if result.evaluation is None:
        run.evaluation_lost(result.step)
        return False
    run.record_evaluation(result.step, result.version, result.evaluation)
    return True


async def _evaluate_now(run: RunContext, step: int) -> None:
    """Accuracy on held-out prompts or pairs, where the run has any."""
    if run.evaluator is None:
        return
    with run.phase("evaluate"):
        evaluation = await run.sync.keep_serving(run.evaluator.evaluate(run.policy.version, step))
    run.record_evaluation(step, run.policy.version, evaluation)


def _stop_rule_met(run: RunContext) -> bool:
    """True when the last evaluation ends the run; a result above the allowed band fails it."""
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
