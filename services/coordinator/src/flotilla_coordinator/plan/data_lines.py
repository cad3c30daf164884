"""Describes what a run reads, as lines of its plan: prompts, evaluations, models, and what a weight sync sends.

Invariants: evaluations are counted as the loop makes them: before the first step, every `evaluation.every_steps`, and
after the last one. A generator's worker holds live and staged weights at the same time. With adapters only the adapters
are sent, after the weights under them were sent once to each weight group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.data.training_sets import HeldOut, LoadedSet, reads_of
from flotilla_coordinator.plan import checks
from flotilla_coordinator.plan.lines import STARTING_WEIGHTS, Line, shown_bytes
from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts, SequenceLimit
from flotilla_coordinator.plan.trainer_memory import BYTES, MASTER, HostMemory, TrainerMemory
from flotilla_coordinator.rollouts.prompt_queue import issued_per_step, most_prompts_per_step
from flotilla_coordinator.trainers.spec import critic_of
from flotilla_core.config import (
    CriticConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    StackConfig,
    bucket_size_mib,
)
from flotilla_core.gangs import model_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import CRITIC

MOST_SHOWN = 240
"""The most letters of a part of the first row; its ends are shown."""
ORDERS = {"shuffled": "shuffled", "as_written": "in file order", "by_field": "ascending by {field}"}


def draw_lines(rollout: RolloutConfig) -> Iterator[Line]:
    """Say how many prompts a step may draw, where it may draw more than it trains."""
    if rollout.dynamic_sampling is None and not rollout.over_issue:
        return
    extra = []
    if rollout.dynamic_sampling is not None:
        extra.append("; groups of equal rewards are replaced")
    if rollout.over_issue:
        extra.append(f"; what is left over waits within max_staleness {rollout.max_staleness}")
    yield (
        "prompts drawn for a step",
        f"at most {most_prompts_per_step(rollout)}",
        f"{issued_per_step(rollout)} under way at first for a batch of {rollout.prompts_per_step}{''.join(extra)}",
    )


def greedy_lines(config: RunConfig) -> Iterator[Line]:
    """Describe the greedy responses, where the run compares its samples with them."""
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyConfig) and algorithm.advantage.needs_greedy_reward:
        yield (
            "greedy responses",
            "1 a prompt",
            f"generated in addition to its {config.rollout.samples_per_prompt} samples and scored by the same rewards, "
            f"never trained: {algorithm.advantage.type} compares with it",
        )


def draw_warnings(config: RunConfig) -> Iterator[str]:
    """Warn of ways to draw prompts that do not fit the advantage."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.over_issue and rollout.max_staleness == 0:
        yield (
            "rollout.over_issue gives up whatever has not ended when a batch is full, for nothing may wait at "
            "rollout.max_staleness = 0: long responses are lost; set it to 1"
        )
    if (
        rollout.dynamic_sampling is not None
        and isinstance(algorithm, PolicyConfig)
        and algorithm.advantage.needed_group_samples < 2
    ):
        yield (
            f"rollout.dynamic_sampling drops groups of equal rewards, from which advantage {algorithm.advantage.type} "
            "would learn as well: leave it out"
        )


def data_lines(config: RunConfig, sets: Sequence[LoadedSet], longest: int) -> Iterator[Line]:
    """Describe the whole of `data.train`, then each data set where there are several."""
    steps, prompts = config.steps, config.rollout.prompts_per_step
    draws, rows = steps * prompts, sum(one.file.kept for one in sets)
    order = ORDERS[config.data.order].format(field=config.data.difficulty_field)
    least, rest = "", ""
    if rest_epochs := config.data.rest_epochs:
        least, rest = "at least ", f"; solved prompts rest for up to {rest_epochs} epochs"
    epochs = f" = {least}{draws / rows:.2f} epochs" if len(sets) == 1 else ""
    streamed = any(one.file.streamed for one in sets)
    size = f"streamed, at most {longest} tokens each" if streamed else f"longest {longest} tokens"
    yield (
        "data",
        f"{rows:,} prompts",
        f"{size}; {steps} steps x {prompts} prompts{epochs}, {order}{rest}",
    )
    for one in sets:
        columns = one.file.about.columns
        if columns is not None and columns.layout:
            yield f"columns of {one.name}", columns.layout, columns.shown(reads_of(config))
    if len(sets) == 1:
        return
    for one in sets:
        own = one.file.kept
        yield (
            f"data set {one.name}",
            f"{own:,} prompts",
            f"{one.share:.1%} of the draws, about {draws * one.share / own:.2f} epochs; {one.path}",
        )


def learned_lines(config: RunConfig, data: PromptFile, tokenizer: Tokenizer) -> Iterator[Line]:
    """Show what the first row teaches: its text, with what is learned between >>> and <<<."""
    (first,) = data.first(1)
    several = [f" ({place} of {len(first.given)})" for place in range(1, len(first.given) + 1)]
    names = (
        [" (chosen)", " (rejected)"]
        if config.learns_from_pairs
        else several
        if len(first.given) > 1
        else [""]
    )
    for name, answer in zip(names, first.given, strict=False):
        learned = np.ones(len(answer.token_ids), np.bool_) if answer.trained is None else answer.trained
        edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
        shown = [_shortened(tokenizer.decode(first.token_ids.tolist(), skip_special=False))]
        for begin, end in pairwise(edges):
            text = _shortened(tokenizer.decode(answer.token_ids[begin:end].tolist(), skip_special=False))
            shown.append(f">>>{text}<<<" if learned[begin] else text)
        whole = len(first.token_ids) + len(learned)
        value = f"row 1 of {data.kept:,}: {int(learned.sum())} of {whole} tokens are learned"
        yield f"first row{name}", value, "".join(shown)


def _shortened(text: str) -> str:
    """Return a text in one line, without its middle where it is long."""
    if len(text) > MOST_SHOWN:
        text = f"{text[: MOST_SHOWN // 2]} [...] {text[-MOST_SHOWN // 2 :]}"
    return repr(text)[1:-1]


def evaluation_lines(config: RunConfig, held_out: Sequence[tuple[HeldOut, PromptFile]]) -> Iterator[Line]:
    """Describe the number and the size of the evaluations, for each held-out set where there are several."""
    evaluation, steps = config.evaluation, config.steps
    if evaluation is None:
        return
    every = evaluation.every_steps
    during = steps // every if every else 0
    after = 0 if every and steps % every == 0 else 1
    for one, file in held_out:
        drawn = one.samples_per_prompt
        kind = "pairs" if config.evaluates_pairs else "prompts"
        how = f"at temperature {one.temperature:g}" if one.temperature else "greedy"
        yield (
            "evaluations" if len(held_out) == 1 else f"evaluations of {one.name}",
            f"{1 + during + after} x {len(file.prompts)} {kind}"
            + (f" x {drawn} samples" if drawn > 1 else ""),
            f"{'ranked' if config.evaluates_pairs else how}: before, "
            f"{f'every {every} steps, ' if every else ''}after"
            + ("" if config.evaluates_pairs or one.success_at == 1 else _threshold(one.success_at)),
        )


def _threshold(success_at: float) -> str:
    return f"; an answer is right from a reward of {success_at:g} on"


def evaluation_errors(
    config: RunConfig, one: HeldOut, held_out: PromptFile, limit: SequenceLimit
) -> list[str]:
    """Refuse an evaluation whose sequences are longer than the limit."""
    if config.evaluates_pairs:
        return checks.answer_errors(limit, checks.longest_given(held_out))
    longest = held_out.longest_prompt
    return checks.length_errors(limit, longest, one.max_response_tokens, "evaluation.max_response_tokens")


def model_lines(
    config: RunConfig, model: ModelFacts, adapters: AdapterFacts | None, limit: SequenceLimit
) -> Iterator[Line]:
    """Describe the model, its starting weights and its adapters."""
    experts = (
        f"; of the {model.experts} experts of a layer a token visits {model.visited_experts}: "
        f"it meets {_count(model.active_parameters, 'parameters')}"
    )
    yield (
        "model",
        _count(model.parameters, "parameters"),
        f"{model.layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocabulary_size}, "
        f"sequences up to {limit.tokens} tokens"
        + ("" if limit.tokens == limit.model else " (generator.max_model_tokens of the stack)")
        + (experts if model.experts else ""),
    )
    if config.initial_weights:
        yield STARTING_WEIGHTS, str(config.initial_weights), "initial_weights"
    else:
        how = "the stack's model as it is; initial_weights starts from others"
        yield STARTING_WEIGHTS, str(model.folder), how
    lora = config.lora
    if lora is not None and adapters is not None:
        yield (
            "trainable",
            _count(adapters.parameters, "parameters"),
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {adapters.layers} linear layers "
            f"({', '.join(adapters.names)}): {adapters.parameters / model.parameters:.2%} of the model's"
            + (f"; from {lora.adapter}" if lora.adapter else ""),
        )


def _count(number: int, what: str) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{unit} {what}"
    return f"{number} {what}"


def critic_parameters(config: RunConfig, stack: StackConfig) -> int:
    """Return the parameters of a run's critic, and 0 for a run without one."""
    return 0 if critic_of(config) is None else _critic_model(stack).parameters


def critic_lines(config: RunConfig, stack: StackConfig, longest_sequence: int) -> Iterator[Line]:
    """Describe the critic; a run without one has no such line."""
    critic = critic_of(config)
    if critic is None:
        return
    clip = "no clip" if critic.value_clip is None else f"values clipped at {critic.value_clip:g}"
    alone = f"; the first {critic.warmup_steps} steps teach it alone" if critic.warmup_steps else ""
    yield (
        "critic",
        f"learning rate {critic.optimizer.learning_rate:g}",
        f"{critic.optimizer.schedule}, {clip}; starts from {_critic_start(config, critic, stack)}{alone}",
    )
    need = TrainerMemory.of_critic(_critic_model(stack), config, critic, stack.critic, longest_sequence)
    yield (
        "memory of a critic rank",
        f"about {shown_bytes(need.total)}",
        f"weights {shown_bytes(need.masters)}, gradients {shown_bytes(need.gradients)}, "
        f"AdamW {shown_bytes(need.moments)}, gathered {stack.critic.dtype} layers {shown_bytes(need.gathered)}, "
        f"activations {shown_bytes(need.activations)}; it has no logits",
    )
    host = HostMemory.of_critic(_critic_model(stack), config, critic, stack.critic)
    yield from host_lines("critic", host, offload=critic.optimizer.offload)


def host_lines(section: str, host: HostMemory, *, offload: bool) -> Iterator[Line]:
    """Describe what a rank of a gang keeps in host memory; nothing where it keeps all on its GPU."""
    if not host.total:
        return
    pinned = "weights and gradients" if host.moments else "weights"
    parts = f"{section}.cpu_offload: pinned {pinned} {shown_bytes(host.pinned)}"
    if host.moments:
        parts += f", AdamW {shown_bytes(host.moments)}"
        parts += "; optimizer.offload changes nothing, because AdamW runs there" if offload else ""
    reference = f", frozen reference {shown_bytes(host.reference)}" if host.reference else ""
    yield f"host memory of a {section} rank", shown_bytes(host.total), parts + reference


def kept_on_host(config: RunConfig, stack: StackConfig, host: HostMemory) -> dict[str, int]:
    """Return what the gangs of a run that were started here keep in host memory, by their sections."""
    critic = critic_of(config)
    kept = {"trainer": host.total * stack.trainer.ranks_here if stack.trainer.attach is None else 0}
    if critic is not None and stack.critic.attach is None:
        each = HostMemory.of_critic(_critic_model(stack), config, critic, stack.critic)
        kept["critic"] = each.total * stack.critic.ranks_here
    return {section: taken for section, taken in kept.items() if taken}


def _critic_model(stack: StackConfig) -> ModelFacts:
    return ModelFacts.read(model_folder(model_of(stack, CRITIC))).with_value_head()


def _critic_start(config: RunConfig, critic: CriticConfig, stack: StackConfig) -> str:
    if critic.initial_weights is not None:
        return str(critic.initial_weights)
    if stack.critic.model is not None:
        return f"{stack.critic.model} (stack: critic.model)"
    return f"the policy's weights, {config.initial_weights or stack.model}"


def sync_lines(
    config: RunConfig, stack: StackConfig, model: ModelFacts, adapters: AdapterFacts | None
) -> Iterator[Line]:
    """Describe the memory of a generator's worker, where the stack has one, and the bytes of a sync."""
    generator = stack.generator
    weights = model.parameters * BYTES[generator.dtype] // generator.tensor_parallel_size
    token = model.layers * model.key_value_size * BYTES[generator.dtype] // generator.tensor_parallel_size
    sent = model.parameters * BYTES[stack.trainer.dtype]
    staged = f"live and staged {generator.dtype} weights {shown_bytes(weights)} each"
    if adapters is not None:
        staged = f"live {generator.dtype} weights, and {shown_bytes(sent)} of the host for those under the adapters"
    if generator.replicas or generator.attach:
        yield (
            "memory of a generator worker",
            f"about {shown_bytes(weights if adapters else 2 * weights)} + KV cache",
            f"{staged}; the KV cache takes {shown_bytes(token)} a token",
        )
    backends = ("gloo", "nccl") if config.weights.backend == "auto" else (config.weights.backend,)
    sizes = " or ".join(f"{bucket_size_mib(config.weights.bucket_mib, one)} MiB ({one})" for one in backends)
    moved = sent if adapters is None else adapters.parameters * MASTER
    once = "" if adapters is None else f"; {shown_bytes(sent)} before the first ones of each weight group"
    yield (
        "weight sync",
        shown_bytes(moved),
        f"in broadcasts of at most {sizes} to each generator{once}",
    )
