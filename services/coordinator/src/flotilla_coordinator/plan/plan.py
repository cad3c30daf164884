"""Works out the arithmetic of a run, explains it, and lists every reason against the run.

Invariants: no figure of a run is left to the user to work out: it is derived here by the same rules as in the loop, and
explained. "At most" means the bound that no step can pass. A plan reads files and changes nothing; of data that cannot
be read where they stand it leaves a copy in the state directory for the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.data.training_sets import (
    JoinedSets,
    copies_folder,
    read_held_out,
    read_sets,
    training_data,
)
from flotilla_coordinator.plan import (
    checks,
    data_lines,
    functions,
    gpu_memory,
    memory_lines,
    reward_lines,
    sampling_lines,
    size_limits,
    update_lines,
)
from flotilla_coordinator.plan.batching_choice import batching_line, chosen_batching
from flotilla_coordinator.plan.chapter import Chapter, Entries, Line
from flotilla_coordinator.plan.model_facts import ModelFacts, adapter_errors
from flotilla_coordinator.plan.run_facts import RunFacts, longest_sequence
from flotilla_coordinator.trainers.spec import critic_of
from flotilla_core.config import BatchingConfig, RunConfig, StackConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.findings import warning
from flotilla_core.gangs import model_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import CRITIC
from flotilla_data.tokenizer import Tokenizer


def plan_run(config: RunConfig, stack: StackConfig) -> run_pb2.Plan:
    """Work out a run on a stack; `errors` of the plan is empty when the run would start."""
    plan = run_pb2.Plan()
    Chapter.of(checks.settings_chapter(config, stack)).write(plan)
    # A service that was started elsewhere may have other packages installed than this process.
    if not stack.reward.attach and stack.trainer.attach is None:
        Chapter.of(
            functions.loading_problems(config, stack.reward.isolation, stack.environment.isolation)
        ).write(plan)
    try:
        folder = model_folder(stack.model)
        model, tokenizer = ModelFacts.read(folder), Tokenizer.load(folder)
        for part in _fitting(config, stack, model, tokenizer):
            Chapter.of(part).write(plan)
        run = _read(config, stack, model, tokenizer)
    except FlotillaError as error:
        Chapter.of([error.finding()]).write(plan)
        return plan
    for part in _chapters(run, config.batching):
        Chapter.of(part).write(plan)
    return plan


def _fitting(
    config: RunConfig, stack: StackConfig, model: ModelFacts, tokenizer: Tokenizer
) -> Iterator[Entries]:
    """Check what does not fit the model."""
    start = model  # weights in object storage are here when the run has its gangs
    if isinstance(config.initial_weights, Path):
        start = ModelFacts.read(config.initial_weights)
    yield checks.model_errors(config, model, start, tokenizer.vocabulary_size)
    yield update_lines.mesh_errors(config, stack)
    if config.lora:
        yield adapter_errors(model, config.lora)
    if config.algorithm.type == "sft" or config.learns_from_pairs:
        yield map(warning, tokenizer.end_warnings())


def _read(config: RunConfig, stack: StackConfig, model: ModelFacts, tokenizer: Tokenizer) -> RunFacts:
    """Read what the run names, and choose its batching."""
    copies, gpu = copies_folder(stack), gpu_memory.gpu_of_this_host()
    sets = read_sets(config.data, tokenizer, training_data(config, copies))
    longest = longest_sequence(config, JoinedSets(sets))
    if config.trains_reward_model:
        model = model.with_value_head()
    batching = chosen_batching(config, stack, model, longest, gpu)
    critic = None
    if critic_of(config) is not None:
        critic = ModelFacts.read(model_folder(model_of(stack, CRITIC))).with_value_head()
    return RunFacts(
        config=config.model_copy(update={"batching": batching}),
        stack=stack,
        model=model,
        critic=critic,
        tokenizer=tokenizer,
        sets=sets,
        held_out=read_held_out(config, tokenizer, copies),
        longest=longest,
        gpu=gpu,
        host=size_limits.host_memory(),
    )


def _chapters(run: RunFacts, asked: BatchingConfig) -> Iterator[Entries]:
    """Return what a plan says of a run, in the order in which it is read."""
    yield data_lines.model_chapter(run)
    yield update_lines.algorithm_chapter(run.config.algorithm)
    yield data_lines.data_chapter(run)
    yield sampling_lines.step_chapter(run)
    yield update_lines.mesh_chapter(run)
    yield update_lines.update_chapter(run)
    yield data_lines.evaluation_chapter(run)
    yield memory_lines.memory_chapter(run)
    yield data_lines.sync_chapter(run)
    yield size_limits.disk_chapter(run)
    yield size_limits.held_chapter(run)
    yield data_lines.first_row_chapter(run)
    if run.gpu is not None:
        yield iter([batching_line(asked, run.config.batching, run.gpu)])
    yield memory_lines.critic_chapter(run)
    yield reward_lines.rewards_chapter(run.config, run.stack)
    yield reward_lines.reward_model_chapter(run.config, run.stack)
    if trackers := ", ".join(one.type for one in run.config.trackers):
        yield iter([Line("trackers", trackers, "each in a process of its own")])
