"""Refuses a run, or warns about it, by its configuration, its files and the gangs of its stack.

Invariants: every problem is one sentence that names the key and what to do; all problems are found, not only the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from flotilla_coordinator.plan.chapter import Entries, refusal
from flotilla_coordinator.plan.functions import file_errors, judge_errors, trusted_warnings
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.size_limits import count_errors
from flotilla_coordinator.trainers.spec import critic_of, critic_warmup_steps
from flotilla_core.config import OptimizerConfig, PolicyConfig, RewardTermConfig, RunConfig, StackConfig
from flotilla_core.findings import warning
from flotilla_core.gangs import started
from flotilla_core.roles import NAMED, REWARD_MODEL, TEACHER, kind_of_role, name_of_role, section_of
from flotilla_trackers.environment import tracker_errors

WHY = {
    "critic": "algorithm.critic is set (advantage gae)",
    "reference": "algorithm.kl.reference is service",
    "teacher": "algorithm.advantage.type is distill",
}


def settings_chapter(config: RunConfig, stack: StackConfig) -> Entries:
    """Refuse and warn of what the files of run and stack tell by themselves."""
    yield from config_errors(config)
    yield from fleet_warnings(config, stack)
    yield from role_errors(config, stack)
    yield from judge_errors(config, stack)
    yield from map(refusal, tracker_errors(config))
    yield from trusted_warnings(config)


def config_errors(config: RunConfig) -> Entries:
    """Find settings that contradict each other."""
    yield from count_errors(config)
    if config.rollout.record and find_spec("pyarrow") is None:
        yield refusal(
            "rollout.record writes Parquet files, and pyarrow is not installed: install the coordinator with its "
            "extra `report`, or leave rollout.record out"
        )
    stop, evaluation = config.stop, config.evaluation
    critic, alone = critic_of(config), critic_warmup_steps(config)
    yield from _schedule_errors("optimizer", config.optimizer, config.steps - alone)
    if critic is not None:
        yield from _schedule_errors("algorithm.critic.optimizer", critic.optimizer, config.steps)
    if alone >= config.steps:
        yield refusal(
            f"algorithm.critic.warmup_steps = {alone} leaves none of the {config.steps} steps for the policy"
        )
    if (
        stop is not None
        and stop.accuracy_at_most is not None
        and stop.accuracy_at_most < stop.accuracy_at_least
    ):
        yield refusal(
            f"stop.accuracy_at_most = {stop.accuracy_at_most} is below "
            f"stop.accuracy_at_least = {stop.accuracy_at_least}: no evaluation can satisfy both"
        )
    yield from _equal_names("rewards", config.rewards)
    for one in () if evaluation is None else evaluation.sets_of_data:
        yield from _equal_names(f"rewards of {one.shown}", one.rewards)
    pinned = evaluation is not None and evaluation.pinned
    if pinned and config.evaluates_pairs:
        yield refusal(
            "evaluation.pinned keeps a generator, but held-out pairs are asked of the trainer: leave it out"
        )
    if pinned and config.loop == "client":
        yield refusal("evaluation.pinned is for the coordinator's loop: with loop: client leave it out")
    yield from file_errors(config)


def _equal_names(key: str, terms: Sequence[RewardTermConfig]) -> Entries:
    shown = [term.shown for term in terms]
    for name in dict.fromkeys(term.name for term in terms if term.name):
        if (equal := shown.count(name)) > 1:
            yield refusal(f"{key}: {equal} terms have the name {name}: give each its own")


def _schedule_errors(section: str, optimizer: OptimizerConfig, updates: int) -> Entries:
    if 1 <= updates <= optimizer.warmup_updates:
        yield refusal(
            f"{section}.warmup_updates = {optimizer.warmup_updates} leaves none of the {updates} updates for the "
            f"{optimizer.schedule} schedule: set it below that (on the command line: "
            f"{section}.warmup_updates={updates // 2})"
        )


def model_errors(
    config: RunConfig, model: ModelFacts, start: ModelFacts, tokenizer_vocabulary: int
) -> Entries:
    """Find starting weights and a tokenizer that do not fit the stack's model."""
    for key, value in model.shape.items():
        if start.shape[key] != value:
            yield refusal(
                f"initial_weights has {key} = {start.shape[key]}, the stack's model has {value}: "
                "every service holds the stack's model, so give weights of the same shape"
            )
    if tokenizer_vocabulary > model.vocabulary_size:
        yield refusal(
            f"the tokenizer has {tokenizer_vocabulary} tokens, the model has {model.vocabulary_size}: "
            "they do not belong together"
        )


def fleet_warnings(config: RunConfig, stack: StackConfig) -> Entries:
    """Warn of services that the stack does not start by itself."""
    if not config.draws_samples and not config.evaluates_answers:
        return
    generators = stack.generator.replicas + len(stack.generator.attach)
    if not generators:
        yield warning("generator.replicas is 0: the run waits until `flotilla scale generator 1`")
    if config.evaluation is not None and config.evaluation.pinned and generators < 2:
        yield warning(
            "evaluation.pinned needs a second generator (`flotilla scale generator 2`): until there is one, "
            "training waits for evaluations"
        )
    asks_functions = any(term.model is None for term in config.all_rewards)
    if asks_functions and stack.reward.replicas == 0 and not stack.reward.attach:
        yield warning("reward.replicas is 0: the run waits until `flotilla scale reward 1`")
    if config.environment is not None and not stack.environment.replicas and not stack.environment.attach:
        yield warning("environment.replicas is 0: the run waits until `flotilla scale environment 1`")


def role_errors(config: RunConfig, stack: StackConfig) -> Entries:
    """Refuse each gang that the run needs and the stack does not start."""
    for role in config.gangs_beside_the_policy:
        if not started(stack, role):
            yield refusal(
                f"{_why(config, role)}, but the stack has no {section_of(role)}: write `{_section(role)}` into its "
                "stack.yaml (nproc, dtype and model as for trainer), then flotilla down and flotilla up"
            )


def _why(config: RunConfig, role: str) -> str:
    algorithm, name = config.algorithm, name_of_role(role)
    if kind_of_role(role) == REWARD_MODEL:
        return f"a reward is the model {name}"
    assert isinstance(algorithm, PolicyConfig), "no other one needs such gangs"
    asked = algorithm.asked_teachers
    if asked is None or kind_of_role(role) != TEACHER:
        return WHY[role]
    if not name:
        return WHY[role] if asked is algorithm.advantage else f"algorithm.{asked.asked_by} is set"
    return f"algorithm.{asked.asked_by}.teachers names {name}"


def _section(role: str) -> str:
    name, kind = name_of_role(role), kind_of_role(role)
    keys = "model: FOLDER" if kind == REWARD_MODEL else "replicas: 1"
    return f"{NAMED[kind]}: {{{name}: {{{keys}}}}}" if name else f"{role}: {{replicas: 1}}"
