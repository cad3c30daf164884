"""Implements `flotilla record`, which draws and scores samples of a model and records them, without a trainer.

Invariants: nothing is trained, and no run is written to. Samples are those that a run with this file would draw from
the model if it learned nothing: the same prompts, groups and seeds. A step is a file, whole or not there; a call that
finds files of some steps draws the others, and is refused where they are of another model or of other settings. A
sample without a reward, and a group that is too small without it, are left out and counted; too many of them end the
command as they end a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import aclosing
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer

from flotilla_cli.completion import complete_setting
from flotilla_cli.judge_trial import asks_fleet
from flotilla_cli.options import Json, Stack, wait
from flotilla_cli.output import print_json, print_line, say
from flotilla_cli.own_fleet import Subject, fleet_for, serving, subject_of
from flotilla_cli.stack import load_stack, make_example, stack_file
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.data.training_sets import copies_folder, training_data
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup
from flotilla_coordinator.rollouts.generation import GenerationRequest, Sampler
from flotilla_coordinator.rollouts.group import FinishedGroup
from flotilla_coordinator.rollouts.scoring import Scorer, score_item
from flotilla_coordinator.rollouts.source import refuse_failing_rewards
from flotilla_core import ids
from flotilla_core.config import PolicyConfig, RunConfig, StackConfig, dump_yaml, load, load_text
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.tasks import gather_or_cancel
from flotilla_data.tokenizer import Tokenizer


def record(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|CHECKPOINT|RUN", help="Folder of either, or a run as in `run show`."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]... [key.path=value]...",
            help="Run files, in place of the run's own; overrides.",
            autocompletion=complete_setting,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder of the record.")
    ] = Path("rollouts"),
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="NAME", help="A checkpoint of RUN, or best; the newest by default."
        ),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Draw samples of a model, a checkpoint or a run and record them, by a fleet of its own without a trainer."""
    make_example(stack_file(stack))
    subject = subject_of(target, checkpoint, stack)
    config, of_stack = _config(subject, arguments or []), load_stack(stack)
    fleet = fleet_for(of_stack, subject, "record", asks_fleet(config.rewards, of_stack))
    recorded = wait(
        _recorded(subject, config, fleet, output), interrupted="interrupted: the fleet is stopped again"
    )
    if as_json:
        print_json({"folder": str(output), "model": str(subject.folder), **recorded})
    else:
        print_line(f"{output}: {recorded['samples']} samples of {recorded['steps']} steps")


def _config(subject: Subject, arguments: list[str]) -> RunConfig:
    """Return the run that says what is drawn: of the files, else the model's own."""
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    files = [Path(text) for text in arguments if text not in overrides]
    if files:
        config = load(RunConfig, files, overrides, resolve_paths=True)
    elif subject.config_yaml:
        source = f"run {subject.run_id}"
        config = load_text(
            RunConfig, subject.config_yaml, source=source, overrides=overrides, resolve_paths=True
        )
    else:
        raise InvalidConfig("the model belongs to no run", next_step="name a run file with data and rewards")
    why = ""
    if not config.draws_samples:
        why = f"algorithm.type {config.algorithm.type} draws no samples from a policy"
        if config.data.recorded:
            why = "its samples are recorded already"
    elif config.reward_models:
        why = "reward models are asked by runs alone"
    elif config.data.learns_outcomes:
        why = "data.rest_epochs and data.curriculum.reward go by the rewards of a run that learns"
    if why:
        raise InvalidConfig("there is nothing to record", where=f"run {config.name}", why=why)
    return config


async def _recorded(subject: Subject, config: RunConfig, fleet: StackConfig, folder: Path) -> dict[str, Any]:
    """Start the fleet, draw the steps that have no file yet, and stop the fleet."""
    tokenizer, rollout = Tokenizer.load(subject.folder), config.rollout
    data = training_data(config, copies_folder(fleet))
    prompts = PromptSource(config.data, tokenizer, config.seed, data)
    kept = RolloutRecord(
        folder, subject.run_id, rollout.sampling.temperature, tokenizer.digest, _drawn_by(subject, config)
    )
    kept.require_own()
    samples = steps = 0
    if all(kept.path_of(step).exists() for step in range(config.steps)):
        say(f"all {config.steps} steps are there already")
        return {"steps": 0, "samples": 0}
    async with serving(subject, config, fleet) as (sampler, scorer_of):
        scorer = scorer_of(config.rewards, config.reward_mode)
        for step in range(config.steps):
            drawn = [prompts.next(step) for _ in range(rollout.prompts_per_step)]
            if kept.path_of(step).exists():
                say(f"step {step + 1} of {config.steps} is there already")
                continue
            finished = await gather_or_cancel(
                _group(subject, config, prompt, step, sampler, scorer) for prompt in drawn
            )
            refuse_failing_rewards(subject.run_id, step, finished, rollout)
            batch = Batch(step, recordable(finished, config, step), prompts.cursor)
            kept.write(batch, subject.version)
            samples, steps = samples + len(batch.samples), steps + 1
            mean = sum(one.reward for one in batch.samples) / len(batch.samples)
            left_out = rollout.prompts_per_step * rollout.samples_per_prompt - len(batch.samples)
            without = f", {left_out} left out" if left_out else ""
            say(
                f"step {step + 1} of {config.steps}: {len(batch.samples)} samples{without}, mean reward {mean:.4g}"
            )
    return {"steps": steps, "samples": samples}


def _drawn_by(subject: Subject, config: RunConfig) -> str:
    """Return what samples depend on: the model, and the file but for its name and the number of its steps."""
    settings = dump_yaml(config.model_copy(update={"name": "", "steps": 1}))
    digest = blake2b(settings.encode(), digest_size=8).hexdigest()
    return f"{subject.folder}, version {subject.version} of {subject.run_id}, by settings {digest}"


def recordable(finished: Sequence[FinishedGroup], config: RunConfig, step: int) -> list[RolloutGroup]:
    """Return the groups with as many samples as the advantage compares; raise where there is none."""
    assert isinstance(config.algorithm, PolicyConfig), "samples are drawn for a policy"
    least = config.algorithm.advantage.needed_group_samples
    groups = [one.group for one in finished if len(one.group.samples) >= least]
    if not groups:
        raise FailedPrecondition(
            f"step {step + 1} has no group to record",
            why=f"none of its {len(finished)} groups has {least} samples with a reward, as the algorithm compares",
            next_step="look at the rewards with `flotilla reward test`, or raise rollout.samples_per_prompt",
        )
    return groups


async def _group(
    subject: Subject, config: RunConfig, prompt: Prompt, step: int, sampler: Sampler, scorer: Scorer
) -> FinishedGroup:
    """Draw and score the samples of one prompt."""
    rollout = config.rollout
    group_id = ids.group_id(subject.run_id, prompt.epoch, prompt.index)
    sample_ids = tuple(ids.sample_id(group_id, place) for place in range(rollout.samples_per_prompt))
    request = GenerationRequest(
        prompt.token_ids,
        sample_ids,
        rollout.sampling,
        subject.version,
        rollout.sample_timeout_s,
        rollout.max_attempts,
        priority=step,
        prompt=prompt,
        world=group_id.partition("/")[2],
    )
    async with aclosing(sampler.samples(request)) as drawn:
        found = {sample.sample_id: sample async for sample in drawn}
    samples = [found[sample_id] for sample_id in sample_ids]
    items = [
        score_item(one.sample_id, prompt, one.text, group=group_id, token_ids=one.token_ids, step=step)
        for one in samples
        if one.outcome is None  # as that of an episode whose environment failed is not
    ]
    outcomes = await scorer.score(items)
    for one in samples:
        if one.outcome is None:
            one.take_outcome(outcomes[one.sample_id])
    group = RolloutGroup(
        group_id,
        prompt.prompt_text,
        prompt.token_ids,
        [one for one in samples if one.drop_reason is None],
        data_set=prompt.data_set,
        answer=prompt.answer,
        info=prompt.info,
        chat=prompt.chat,
        answer_column=prompt.answer_column,
    )
    failures = [one.outcome for one in samples if one.outcome is not None and one.outcome.failed]
    return FinishedGroup(group, failures, dropped=len(samples) - len(group.samples), retried=0)
