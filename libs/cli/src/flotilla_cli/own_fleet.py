"""Serves a model, a run or a checkpoint to one command, by a fleet without a trainer.

Invariants: the fleet is the command's own, beside that of the stack: generators that boot from the model, and rewards.
It ends with the command, however that ends. Generators serve the weights under the version that they have in their run,
so that seeds and samples are those of the run. Nothing of the run is written.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_cli.checkpoint import chosen, saved_of
from flotilla_cli.judge_trial import asks_fleet, fleet_judges
from flotilla_cli.output import say
from flotilla_cli.processes import boot_progress
from flotilla_client import Client
from flotilla_client.discovery import credential_of_caller
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
)
from flotilla_core.errors import FailedPrecondition, InvalidConfig, InvalidRequest
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_launch import local
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import find

ScorerOf = Callable[[tuple[RewardTermConfig, ...], RewardMode], Scorer]
_MODEL = "model"
_LONGEST_NAME = 31
"""The most characters of the name of a stack."""


class Subject(NamedTuple):
    """The model that is served: a folder, and the version of a run that it is."""

    folder: Path
    run_id: str
    version: Version
    config_yaml: str
    """The configuration of its run; empty where it has none."""


def subject_of(target: str, checkpoint: str | None, stack: str | None) -> Subject:
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


def fleet_for(
    stack: StackConfig, subject: Subject, purpose: str, judges: Collection[str] = ()
) -> StackConfig:
    """Return the stack of a command: generators, rewards and these judges of the user's, and no trainer."""
    name = f"{stack.name[: _LONGEST_NAME - 1 - len(purpose)]}-{purpose}"
    if find(StackPaths.of(stack.state_dir, name)) is not None:
        raise FailedPrecondition(
            f"another `flotilla {purpose}` of this stack is under way",
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


@asynccontextmanager
async def serving(
    subject: Subject, config: RunConfig, fleet: StackConfig
) -> AsyncIterator[tuple[Sampler, ScorerOf]]:
    """Start the fleet, yield what samples and what scores, and stop the fleet; wrong functions are found before."""
    if errors := Chapter.of(loading_problems(config, fleet.reward.isolation)).errors:
        raise InvalidConfig("the rewards would not work", where=f"run {config.name}", why="; ".join(errors))
    tokenizer, limit_s = Tokenizer.load(subject.folder), fleet.ready_timeout_s
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

            yield sampler, scorer_of
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
