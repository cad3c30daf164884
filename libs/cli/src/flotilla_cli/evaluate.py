"""Implements `flotilla eval`, which evaluates a model, a run or a checkpoint without a trainer.

Invariants: the fleet of an evaluation is its own, beside that of the stack: generators that boot from the model, and
rewards. It ends with the command, however that ends. The code of a run evaluates, and generators serve the weights
under the version that they have in their run, so that seeds and samples are those of the run's own evaluation. Nothing
of the run is written.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_cli.checkpoint import chosen, saved_of
from flotilla_cli.completion import complete_setting
from flotilla_cli.judge_trial import asks_fleet, fleet_judges
from flotilla_cli.options import Json, Stack, make_folder_of, wait
from flotilla_cli.output import print_json, print_table, say
from flotilla_cli.processes import boot_progress
from flotilla_cli.stack import load_stack, make_example, stack_file
from flotilla_client import Client
from flotilla_client.discovery import credential_of_caller
from flotilla_coordinator.data.training_sets import copies_folder, read_held_out
from flotilla_coordinator.evaluation.evaluate import Evaluation, Evaluator, held_out_prompts
from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.functions import loading_problems
from flotilla_coordinator.plan.placement import placed
from flotilla_coordinator.rollouts.environments import Environments
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import Generation, Sampler
from flotilla_coordinator.rollouts.scoring import RewardServiceScorer, Scorer
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_core import rpc
from flotilla_core.checkpoint import Manifest
from flotilla_core.config import (
    BindConfig,
    CoordinatorConfig,
    GangConfig,
    JudgeConfig,
    NatsConfig,
    RewardMode,
    RewardTermConfig,
    RunConfig,
    StackConfig,
    TrainerConfig,
    load,
    load_text,
)
from flotilla_core.config.model import function_path
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig, InvalidRequest
from flotilla_core.evaluations import held_out_text
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_launch import local
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import find

_MODEL = "model"
_NAME_LENGTH = 26


class Subject(NamedTuple):
    """The model that is evaluated: a folder, and the version of a run that it is."""

    folder: Path
    run_id: str
    version: Version
    config_yaml: str
    """The configuration of its run; empty where it has none."""


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
    subject = _subject(target, checkpoint, stack)
    config, of_stack = _config(subject, arguments or [], data or [], reward or []), load_stack(stack)
    fleet = fleet_for(of_stack, subject, asks_fleet(_scored_by(config), of_stack))
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


def _subject(target: str, checkpoint: str | None, stack: str | None) -> Subject:
    """Find the model that the user means."""
    folder = Path(target).absolute()
    if not os.path.isdir(folder):
        return _of_run(target, checkpoint, stack)
    if checkpoint is not None:
        raise InvalidRequest(
            "--checkpoint chooses among those of a run",
            where=target,
            next_step="name the run, or leave it out",
        )
    if (folder / "coordinator.json").is_file():
        return _of_checkpoint(folder, "")
    if (folder / "config.json").is_file():
        return Subject(folder, _MODEL, Version(), "")
    raise InvalidRequest(
        "the folder holds neither a model nor a checkpoint",
        where=str(folder),
        why="it has no config.json and no coordinator.json",
        next_step="name the folder that `flotilla checkpoint list` shows, or that a model was saved to",
    )


def _of_run(reference: str, checkpoint: str | None, stack: str | None) -> Subject:
    """Return a checkpoint of a run: the one that is named, else the newest, else the exported model."""
    saved = saved_of(stack, reference)
    exported = saved.directory.model_path
    if checkpoint is None and not saved.shelf.names() and (exported / "config.json").is_file():
        return Subject(exported, saved.run_id, saved.version, saved.config_yaml)
    name = chosen(saved, checkpoint)[-1]
    return _of_checkpoint(saved.shelf.folder(name), saved.config_yaml)


def _of_checkpoint(folder: Path, config_yaml: str) -> Subject:
    """Return the model of a checkpoint, after every byte was compared with what was written."""
    Manifest.verified(folder)
    progress, model = Progress.of(folder), folder / "model"
    if not model.is_dir():
        raise FailedPrecondition(
            "the checkpoint has adapters alone",
            where=str(folder),
            why="generators boot from whole models",
            next_step="merge them into their model with peft, and evaluate that folder",
        )
    own = folder.parents[1] / "run.yaml"
    if not config_yaml and own.is_file():
        config_yaml = own.read_text("utf-8")
    return Subject(model, progress.run_id, progress.version, config_yaml)


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


def fleet_for(stack: StackConfig, subject: Subject, judges: Collection[str] = ()) -> StackConfig:
    """Return the stack of the evaluation: generators, rewards and these judges of the user's, and no trainer."""
    name = f"{stack.name[:_NAME_LENGTH]}-eval"
    if find(StackPaths.of(stack.state_dir, name)) is not None:
        raise FailedPrecondition(
            "another evaluation of this stack is under way",
            where=str(stack.state_dir / name),
            next_step=f"wait for its end; if there is none: flotilla down --stack {name}",
        )
    generator = {
        "attach": (),
        "boot_version": f"{subject.run_id}/{subject.version}",
        "replicas": max(1, stack.generator.replicas),
        "sleep_while_training": False,
    }
    changes: dict[str, Any] = {
        "name": name,
        "model": subject.folder,
        "bind": BindConfig(),
        "nats": NatsConfig(),
        "generator": stack.generator.model_copy(update=generator),
        "reward": stack.reward.model_copy(update={"attach": (), "replicas": max(1, stack.reward.replicas)}),
        "trainer": TrainerConfig(replicas=0),
        "coordinator": CoordinatorConfig(),
        "placement": "separate",
        "teachers": {},
        "reward_models": {},
        "judges": {
            name: one for name, one in stack.judges.items() if isinstance(one, JudgeConfig) or name in judges
        },
        "autoscale": None,
    }
    changes |= dict.fromkeys(("critic", "reference", "teacher"), GangConfig())
    return placed(stack.model_copy(update=changes))


async def _evaluated(subject: Subject, config: RunConfig, fleet: StackConfig) -> Evaluation:
    """Start the fleet, evaluate, and stop the fleet; mistakes in the files are found before it starts."""
    if errors := Chapter.of(loading_problems(config, fleet.reward.isolation)).errors:
        raise InvalidConfig("the rewards would not work", where=f"run {config.name}", why="; ".join(errors))
    tokenizer = Tokenizer.load(subject.folder)
    held_out = read_held_out(config, tokenizer, copies_folder(fleet))
    limit_s = fleet.ready_timeout_s
    try:
        with boot_progress() as show:
            await local.up(fleet, on_progress=show, on_wait=say)
        pools = await _pools(fleet)
        try:
            generation = Generation(
                subject.run_id,
                config.seed,
                tokenizer,
                pool=pools.generators,
                serves=lambda _instance, _version: True,
                wait_limit_s=limit_s,
                lost=lambda _ids, error: say(f"samples are issued again: {error}"),
            )

            sampler: Sampler = generation
            if (environment := config.environment) is not None:
                sampler = Episodes(
                    config.seed,
                    environment,
                    tokenizer,
                    turns=generation,
                    environments=Environments.of(subject.run_id, environment, pools.environments, limit_s),
                    lost=lambda _ids, error: say(f"an episode begins again: {error}"),
                )

            def scorer_of(terms: tuple[RewardTermConfig, ...], mode: RewardMode) -> Scorer:
                pool, steps = pools.rewards, config.steps
                judges = fleet_judges(asks_fleet(terms, fleet), pools.services)
                service = RewardServiceScorer(
                    subject.run_id, terms, pool, limit_s, total_steps=steps, judges=judges
                )
                return Scorer(service, mode)

            sets = held_out_prompts(config, held_out, scorer_of)
            rollout = config.rollout
            evaluator = Evaluator(
                subject.run_id, sets, sampler, rollout.sample_timeout_s, rollout.max_reward_failure_rate
            )
            say(f"evaluating version {subject.version} of {subject.run_id}")
            return await evaluator.evaluate(subject.version, subject.version.step)
        finally:
            await pools.generators.close()
            await pools.rewards.close()
            await pools.environments.close()
    finally:
        await asyncio.shield(local.down(StackPaths.of(fleet.state_dir, fleet.name), on_wait=say))


class _Pools(NamedTuple):
    generators: Any
    rewards: Any
    environments: Any
    services: dict[str, reg.Registration]


async def _pools(fleet: StackConfig) -> _Pools:
    """Return the generators, the rewards and the environments of the fleet, and all that it has."""
    directory = StackPaths.of(fleet.state_dir, fleet.name).directory
    credential = credential_of_caller(fleet.bind, directory)
    announced = json.loads((directory / "instances" / "coordinator.json").read_text("utf-8"))
    async with Client(announced["address"], credential=credential) as client:
        services = [service.registration for service in await client.list_services()]
    known = {one.instance_id: one for one in services}

    def connect(address: str) -> Any:
        return rpc.connect(address, credential=credential)

    pools = _Pools(
        rpc.ReplicaPool(reg.SERVICE_KIND_GENERATOR, GeneratorServiceStub, connect),
        rpc.ReplicaPool(reg.SERVICE_KIND_REWARD, RewardServiceStub, connect),
        rpc.ReplicaPool(reg.SERVICE_KIND_ENVIRONMENT, EnvironmentServiceStub, connect),
        known,
    )
    for pool in (pools.generators, pools.rewards, pools.environments):
        await pool.update(known)
    return pools
