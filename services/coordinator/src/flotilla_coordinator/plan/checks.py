"""Refuses a run, or warns about it, by its configuration, its files and the gangs of its stack.

Invariants: every problem is one sentence that names the key and what to do; all problems are found, not only the first.
"""

from __future__ import annotations

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.plan.functions import file_errors
from flotilla_coordinator.plan.model_facts import ModelFacts, SequenceLimit
from flotilla_coordinator.plan.size_limits import count_errors
from flotilla_coordinator.trainers.spec import critic_of, critic_warmup_steps
from flotilla_core.agreement import LEAST_TOKENS
from flotilla_core.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, RunConfig, StackConfig
from flotilla_core.gangs import started
from flotilla_core.roles import TEACHER, kind_of_role, section_of, teacher_name

WHY = {
    "critic": "algorithm.critic is set (advantage gae)",
    "reference": "algorithm.kl.reference is service",
    "teacher": "algorithm.advantage.type is distill",
}

COUNTED_PROMPTS = 256
"""The prompts whose answers are counted for a mean."""


def config_errors(config: RunConfig) -> list[str]:
    """Find settings that contradict each other."""
    errors = list(count_errors(config))
    optimizer, stop = config.optimizer, config.stop
    critic, alone = critic_of(config), critic_warmup_steps(config)
    errors.extend(_schedule_errors("optimizer", optimizer, config.steps - alone))
    if critic is not None:
        errors.extend(_schedule_errors("algorithm.critic.optimizer", critic.optimizer, config.steps))
    if alone >= config.steps:
        errors.append(
            f"algorithm.critic.warmup_steps = {alone} leaves none of the {config.steps} steps for the policy"
        )
    if (
        stop is not None
        and stop.accuracy_at_most is not None
        and stop.accuracy_at_most < stop.accuracy_at_least
    ):
        errors.append(
            f"stop.accuracy_at_most = {stop.accuracy_at_most} is below "
            f"stop.accuracy_at_least = {stop.accuracy_at_least}: no evaluation can satisfy both"
        )
    if config.evaluation is not None and config.evaluation.pinned:
        if config.evaluates_pairs:
            errors.append(
                "evaluation.pinned keeps a generator, but held-out pairs are asked of the trainer: leave it out"
            )
        if config.loop == "client":
            errors.append("evaluation.pinned is for the coordinator's loop: with loop: client leave it out")
    errors += file_errors(config)
    return errors


def _schedule_errors(section: str, optimizer: OptimizerConfig, updates: int) -> list[str]:
    if optimizer.warmup_updates < updates or updates < 1:
        return []
    return [
        f"{section}.warmup_updates = {optimizer.warmup_updates} leaves none of the {updates} updates for the "
        f"{optimizer.schedule} schedule: set it below that (on the command line: "
        f"{section}.warmup_updates={updates // 2})"
    ]


def model_errors(
    config: RunConfig, model: ModelFacts, start: ModelFacts, tokenizer_vocabulary: int
) -> list[str]:
    """Find starting weights and a tokenizer that do not fit the stack's model."""
    errors = [
        f"initial_weights has {key} = {start.shape[key]}, the stack's model has {value}: "
        "every service holds the stack's model, so give weights of the same shape"
        for key, value in model.shape.items()
        if start.shape[key] != value
    ]
    if tokenizer_vocabulary > model.vocabulary_size:
        errors.append(
            f"the tokenizer has {tokenizer_vocabulary} tokens, the model has {model.vocabulary_size}: "
            "they do not belong together"
        )
    return errors


def longest_sequence(config: RunConfig, data: PromptFile) -> int:
    """Return the most tokens that one sequence of an update can have."""
    if data.first(1)[0].given:
        return longest_given(data)
    return data.longest_prompt + config.rollout.sampling.max_response_tokens


def longest_given(data: PromptFile) -> int:
    """Return the tokens of the longest prompt with one of its answers."""
    return max(
        len(prompt.token_ids) + len(answer.token_ids)
        for chunk in data.chunks()
        for prompt in chunk
        for answer in prompt.given
    )


def answers_per_prompt(data: PromptFile) -> float:
    """Return how many answers the first prompts have, as a mean; 0 where a client brings them."""
    first = data.first(COUNTED_PROMPTS)
    return sum(len(prompt.given) for prompt in first) / len(first)


def answer_errors(limit: SequenceLimit, longest: int) -> list[str]:
    """Refuse given answers that are longer than the model or the stack allows."""
    if longest <= limit.tokens:
        return []
    way = "lower data.max_prompt_tokens or shorten the answers"
    return [limit.error("the longest prompt with its answer has", longest, way)]


def length_errors(
    limit: SequenceLimit, prompt_tokens: int, response_tokens: int, response_key: str
) -> list[str]:
    """Refuse sequences that are longer than the model or the stack allows."""
    needed = prompt_tokens + response_tokens
    if needed <= limit.tokens:
        return []
    what = f"the longest prompt ({prompt_tokens} tokens) and {response_key} = {response_tokens} need"
    return [limit.error(what, needed, f"lower {response_key} or data.max_prompt_tokens")]


def canary_errors(config: RunConfig, rows: int) -> list[str]:
    """Refuse a live check that can decide nothing: too few tokens, or a limit that nothing is above."""
    canary = config.weights.canary
    prompts = min(canary.prompts, rows)
    if not prompts or not canary.temperatures:
        return []
    errors = []
    if prompts * canary.tokens < LEAST_TOKENS:
        errors.append(
            f"weights.canary compares {prompts * canary.tokens} tokens of each generator, too few to tell weights of "
            f"another model from rounding: raise weights.canary.tokens or weights.canary.prompts to {LEAST_TOKENS} "
            "tokens in all (the default is 256), or set weights.canary.prompts to 0"
        )
    if canary.fail_at == 1:
        errors.append(
            "weights.canary.fail_at is 1, and no mean difference of probabilities is above that: lower it, or set "
            "weights.canary.prompts to 0"
        )
    return errors


def data_warnings(config: RunConfig, data: PromptFile) -> list[str]:
    """Warn of prompts that were left out or cut, and of steps that are larger than the data set."""
    warnings = []
    total = data.kept + data.dropped
    if data.dropped:
        warnings.append(
            f"{data.dropped} of {total} prompts are longer than data.max_prompt_tokens = "
            f"{config.data.max_prompt_tokens} and are dropped"
        )
    if data.truncated:
        warnings.append(
            f"{data.truncated} of {total} prompts are longer than data.max_prompt_tokens = "
            f"{config.data.max_prompt_tokens} and lose their beginning"
        )
    if config.rollout.prompts_per_step > data.kept:
        warnings.append(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step} is more than the data set's "
            f"{data.kept} prompts: prompts repeat within a step"
        )
    return warnings


def overlap_warnings(data: PromptFile, held_out: PromptFile, name: str = "") -> list[str]:
    """Warn of held-out prompts that the run also trains on; nobody has read the prompts that are streamed."""
    if data.streamed:
        return []
    trained = {prompt.token_ids.tobytes() for prompt in data.prompts}
    shared = sum(prompt.token_ids.tobytes() in trained for prompt in held_out.prompts)
    if not shared:
        return []
    of = f" of {name}" if name else ""
    return [
        f"{shared} of {len(held_out.prompts)} held-out prompts{of} are also in the training data: "
        "accuracy on them shows memory, not skill"
    ]


def sleep_errors(config: RunConfig, stack: StackConfig) -> list[str]:
    """Refuse a run that needs generators during updates, on a stack where they sleep meanwhile."""
    if not (stack.generator.sleep_while_training and config.needs_generators):
        return []
    rollout, errors = config.rollout, []
    key = "generator.sleep_while_training is true in the stack"
    if isinstance(config.algorithm, PolicyConfig) and rollout.max_staleness > 0:
        errors.append(
            f"rollout.max_staleness = {rollout.max_staleness} samples during updates, but {key}, so generators have no "
            "memory for that: set rollout.max_staleness to 0, or start the stack without the key"
        )
    if config.loop == "client":
        errors.append(
            f"with loop: client nobody knows beforehand when samples are needed, but {key}: start the stack without it"
        )
    if config.evaluation is not None and config.evaluation.pinned:
        errors.append(f"evaluation.pinned decodes during updates, but {key}: leave evaluation.pinned out")
    if rollout.generators is not None and rollout.generators < stack.generator.replicas:
        errors.append(
            f"rollout.generators = {rollout.generators} leaves some of {stack.generator.replicas} generators awake "
            f"during updates, but {key}: leave rollout.generators out"
        )
    return errors


def fleet_warnings(config: RunConfig, stack: StackConfig) -> list[str]:
    """Warn of services that the stack does not start by itself."""
    warnings = []
    if isinstance(config.algorithm, PolicyConfig) or (config.evaluates_answers):
        if stack.generator.replicas == 0 and not stack.generator.attach:
            warnings.append("generator.replicas is 0: the run waits until `flotilla scale generator 1`")
        generators = stack.generator.replicas + len(stack.generator.attach)
        if config.evaluation is not None and config.evaluation.pinned and generators < 2:
            warnings.append(
                "evaluation.pinned needs a second generator (`flotilla scale generator 2`): until there is one, "
                "training waits for evaluations"
            )
        if config.rewards and stack.reward.replicas == 0 and not stack.reward.attach:
            warnings.append("reward.replicas is 0: the run waits until `flotilla scale reward 1`")
    return warnings


def role_errors(algorithm: AlgorithmConfig, stack: StackConfig) -> list[str]:
    """Refuse each gang that the run needs and the stack does not start."""
    if not isinstance(algorithm, PolicyConfig):
        return []
    return [
        f"{_why(algorithm, role)}, but the stack has no {section_of(role)}: write `{_section(role)}` into its "
        "stack.yaml (nproc, dtype and model as for trainer), then flotilla down and flotilla up"
        for role in algorithm.gangs_beside_the_policy
        if not started(stack, role)
    ]


def _why(algorithm: PolicyConfig, role: str) -> str:
    asked, name = algorithm.asked_teachers, teacher_name(role)
    if asked is None or kind_of_role(role) != TEACHER:
        return WHY[role]
    if not name:
        return WHY[role] if asked is algorithm.advantage else f"algorithm.{asked.asked_by} is set"
    return f"algorithm.{asked.asked_by}.teachers names {name}"


def _section(role: str) -> str:
    name = teacher_name(role)
    return f"teachers: {{{name}: {{replicas: 1}}}}" if name else f"{role}: {{replicas: 1}}"
