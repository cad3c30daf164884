"""Implements `flotilla eval`, which evaluates a model, a run or a checkpoint without a trainer.

Invariant: the code of a run evaluates, so that seeds, samples and figures are those of the run's own evaluation.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from flotilla_cli.completion import complete_setting
from flotilla_cli.judge_trial import asks_fleet
from flotilla_cli.options import Json, Stack, make_folder_of, wait
from flotilla_cli.output import print_json, print_table, say
from flotilla_cli.own_fleet import Subject, fleet_for, serving, subject_of
from flotilla_cli.stack import load_stack, make_example, stack_file
from flotilla_coordinator.data.training_sets import copies_folder, read_held_out
from flotilla_coordinator.evaluation.evaluate import Evaluation, Evaluator, held_out_prompts
from flotilla_core.config import (
    RewardTermConfig,
    RunConfig,
    StackConfig,
    load,
    load_text,
)
from flotilla_core.config.model import function_path
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.evaluations import held_out_text
from flotilla_data.tokenizer import Tokenizer


def evaluate(
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
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="FILE", help="Held-out file, one or several.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option("--reward", metavar="NAME", help="Reward, in place of those of the run file."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="NAME", help="A checkpoint of RUN, or best; the newest by default."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the answers as JSON Lines.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model, a checkpoint or a run on held-out data, by a fleet of its own without a trainer."""
    if output is not None:
        make_folder_of(output)
    make_example(stack_file(stack))
    subject = subject_of(target, checkpoint, stack)
    config, of_stack = _config(subject, arguments or [], data or [], reward or []), load_stack(stack)
    fleet = fleet_for(of_stack, subject, "eval", asks_fleet(_scored_by(config), of_stack))
    found = wait(_evaluated(subject, config, fleet), interrupted="interrupted: the fleet is stopped again")
    lines = [answer.record(subject.version.step, subject.version) for answer in found.answers]
    if output is not None:
        output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    if found.unscored:
        say(found.unscored)
    if as_json:
        values = {
            "model": str(subject.folder),
            "run_id": subject.run_id,
            "policy_version": str(subject.version),
        }
        print_json({**values, "answers": len(lines), "metrics": found.figures})
        return
    print_table(("METRIC", "VALUE"), [(name, f"{value:.6g}") for name, value in found.figures.items()])
    say(f"{held_out_text(found.figures)}, version {subject.version} of {subject.run_id}")
    if output is not None:
        say(f"wrote {len(lines)} answers to {output}")


def _config(subject: Subject, arguments: list[str], data: list[Path], rewards: list[str]) -> RunConfig:
    """Return the run that says how to evaluate: of the files, else the model's own, else of data and rewards alone."""
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    files = [Path(text) for text in arguments if text not in overrides]
    given = [str(file.absolute()) for file in data]
    terms = [{"reward": function_path(name, Path.cwd())} for name in rewards]
    if rewards:
        overrides.insert(0, f"rewards={json.dumps(terms)}")
    if given:
        several = [{"path": path} for path in given]
        overrides.insert(0, f"evaluation.data={json.dumps(several if len(given) > 1 else given[0])}")
    source = f"run {subject.run_id}" if subject.config_yaml else "command line"
    if files:
        config = load(RunConfig, files, overrides, resolve_paths=True)
    elif subject.config_yaml or (given and rewards):
        plain = {"name": "eval", "steps": 1, "data": {"train": given[0] if given else ""}}
        text = subject.config_yaml or json.dumps(plain)
        config = load_text(RunConfig, text, source=source, overrides=overrides, resolve_paths=True)
    else:
        raise _nothing_to_evaluate_with("the model belongs to no run, and data or rewards are not named")
    if config.evaluation is None:
        raise _nothing_to_evaluate_with(f"run {config.name} has no `evaluation`")
    if config.evaluates_pairs:
        raise _nothing_to_evaluate_with("pairs are ranked by a trainer")
    if config.reward_models:
        raise _nothing_to_evaluate_with("reward models are asked by runs alone")
    return config


def _nothing_to_evaluate_with(why: str) -> FlotillaError:
    return InvalidConfig(
        "there is nothing to evaluate with",
        why=why,
        next_step="name a run file with `evaluation` and `rewards`, or --data FILE and --reward NAME",
    )


def _scored_by(config: RunConfig) -> tuple[RewardTermConfig, ...]:
    """Return the terms by which held-out answers are scored."""
    sets = () if config.evaluation is None else config.evaluation.sets_of_data
    return tuple(term for one in sets for term in one.rewards or config.rewards)


async def _evaluated(subject: Subject, config: RunConfig, fleet: StackConfig) -> Evaluation:
    """Start the fleet, evaluate, and stop the fleet; mistakes in the files are found before it starts."""
    held_out = read_held_out(config, Tokenizer.load(subject.folder), copies_folder(fleet))
    async with serving(subject, config, fleet) as (sampler, scorer_of):
        sets = held_out_prompts(config, held_out, scorer_of)
        rollout = config.rollout
        evaluator = Evaluator(
            subject.run_id, sets, sampler, rollout.sample_timeout_s, rollout.max_reward_failure_rate
        )
        say(f"evaluating version {subject.version} of {subject.run_id}")
        return await evaluator.evaluate(subject.version, subject.version.step)
