"""Describes what a run reads, as lines of its plan: model, prompts, evaluations, and what a weight sync sends.

Invariants: evaluations are counted as the loop makes them: before the first step, every `evaluation.every_steps`, and
after the last one. A generator's worker holds live and staged weights at the same time. With adapters only the adapters
are sent, after the weights under them were sent once to each weight group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from flotilla_coordinator.data.prompts import Answer, Prompt, PromptFile, RecordedSample
from flotilla_coordinator.data.training_sets import LoadedSet, data_remarks, reads_of
from flotilla_coordinator.plan.chapter import STARTING_WEIGHTS, Entries, Line, shown_bytes
from flotilla_coordinator.plan.gpu_memory import token_bytes
from flotilla_coordinator.plan.model_facts import ModelFacts, SequenceLimit
from flotilla_coordinator.plan.run_facts import RunFacts
from flotilla_coordinator.plan.trainer_memory import BYTES, MASTER
from flotilla_core.config import RunConfig, bucket_size_mib
from flotilla_core.findings import warning

MOST_SHOWN = 240
"""The most letters of a part of the first row; its ends are shown."""
ORDERS = {"shuffled": "shuffled", "as_written": "in file order", "by_field": "ascending by {field}"}


def model_chapter(run: RunFacts) -> Entries:
    """Describe the model, its starting weights and its adapters."""
    config, model, limit, adapters = run.config, run.model, run.limit, run.adapters
    yield model_line(model, limit)
    if config.initial_weights:
        yield Line(STARTING_WEIGHTS, str(config.initial_weights), "initial_weights")
    else:
        how = "the stack's model as it is; initial_weights starts from others"
        yield Line(STARTING_WEIGHTS, str(model.folder), how)
    lora = config.lora
    if lora is not None and adapters is not None:
        yield Line(
            "trainable",
            _count(adapters.parameters, "parameters"),
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {adapters.layers} linear layers "
            f"({', '.join(adapters.names)}): {adapters.parameters / model.parameters:.2%} of the model's"
            + (f"; from {lora.adapter}" if lora.adapter else ""),
        )


def model_line(model: ModelFacts, limit: SequenceLimit) -> Line:
    """Describe the shape of the model."""
    experts = (
        f"; of the {model.experts} experts of a layer a token visits {model.visited_experts}: "
        f"it meets {_count(model.active_parameters, 'parameters')}"
    )
    return Line(
        "model",
        _count(model.parameters, "parameters"),
        f"{model.layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocabulary_size}, "
        f"sequences up to {limit.tokens} tokens"
        + ("" if limit.tokens == limit.model else " (generator.max_model_tokens of the stack)")
        + (experts if model.experts else ""),
    )


def _count(number: int, what: str) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{unit} {what}"
    return f"{number} {what}"


def data_chapter(run: RunFacts) -> Entries:
    """Describe the data, and warn of prompts that were left out or cut, and of steps that are larger than the set."""
    config, data = run.config, run.data
    yield from data_lines(config, run.sets, data.longest_prompt)
    yield from map(warning, data_remarks([one.file for one in run.sets] + [file for _, file in run.held_out]))
    total, longest = data.kept + data.dropped, f"data.max_prompt_tokens = {config.data.max_prompt_tokens}"
    for count, happens in ((data.dropped, "are dropped"), (data.truncated, "lose their beginning")):
        if count:
            yield warning(f"{count} of {total} prompts are longer than {longest} and {happens}")
    if config.rollout.prompts_per_step > data.kept:
        yield warning(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step} is more than the data set's "
            f"{data.kept} prompts: prompts repeat within a step"
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
    yield Line(
        "data", f"{rows:,} prompts", f"{size}; {steps} steps x {prompts} prompts{epochs}, {order}{rest}"
    )
    for one in sets:
        columns = one.file.about.columns
        if columns is not None and columns.layout:
            yield Line(f"columns of {one.name}", columns.layout, columns.shown(reads_of(config)))
    if len(sets) == 1:
        return
    levels = Counter(one.of for one in sets)
    for one in sets:
        own = one.file.kept
        drawn = f"about {draws * one.share / own:.2f} epochs"
        if levels[one.of] > 1 and (curriculum := config.data.curriculum):
            mean = f"a mean reward of {curriculum.reward} on {curriculum.prompts} prompts"
            rises = f"{curriculum.every_steps} steps" if curriculum.every_steps else mean
            drawn = f"one of {levels[one.of]} levels, of which the next one is drawn after {rises}"
        shown = f"{one.share:.1%} of the draws, {drawn}; {one.path}"
        yield Line(f"data set {one.name}", f"{own:,} prompts", shown)


def first_row_chapter(run: RunFacts) -> Entries:
    """Show what the first row teaches: its text, with what is learned between >>> and <<<."""
    (first,) = run.data.first(1)
    shown_first: Sequence[Answer | RecordedSample] = first.given or first.recorded[:1]
    several = [f" ({place} of {len(shown_first)})" for place in range(1, len(shown_first) + 1)]
    names = several if len(shown_first) > 1 else [""]
    if run.config.learns_from_pairs:
        names = [" (chosen)", " (rejected)"]

    def shown(tokens: np.ndarray) -> str:
        return _shortened(run.tokenizer.decode(tokens.tolist(), skip_special=False))

    for name, answer in zip(names, shown_first, strict=False):
        learned = np.ones(len(answer.token_ids), np.bool_) if answer.trained is None else answer.trained
        edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
        parts = ((learned[begin], shown(answer.token_ids[begin:end])) for begin, end in pairwise(edges))
        text = "".join(f">>>{part}<<<" if learns else part for learns, part in parts)
        whole = len(first.token_ids) + len(learned)
        value = f"row 1 of {run.data.kept:,}: {int(learned.sum())} of {whole} tokens are learned"
        yield Line(f"first row{name}", value, shown(first.token_ids) + text)


def _shortened(text: str) -> str:
    """Return a text in one line, without its middle where it is long."""
    if len(text) > MOST_SHOWN:
        text = f"{text[: MOST_SHOWN // 2]} [...] {text[-MOST_SHOWN // 2 :]}"
    return repr(text)[1:-1]


def evaluation_chapter(run: RunFacts) -> Entries:
    """Describe the number and the size of the evaluations, for each held-out set where there are several."""
    config, steps, held_out = run.config, run.config.steps, run.held_out
    evaluation, pairs = config.evaluation, config.evaluates_pairs
    if evaluation is None:
        return
    every = evaluation.every_steps
    during = steps // every if every else 0
    after = 0 if every and steps % every == 0 else 1
    for one, file in held_out:
        name = one.name if len(held_out) > 1 else ""
        drawn = f" x {one.samples_per_prompt} samples" if one.samples_per_prompt > 1 else ""
        how = f"at temperature {one.temperature:g}" if one.temperature else "greedy"
        right = "" if one.success_at == 1 else f"; an answer is right from a reward of {one.success_at:g} on"
        yield Line(
            f"evaluations of {name}" if name else "evaluations",
            f"{1 + during + after} x {len(file.prompts)} {'pairs' if pairs else 'prompts'}{drawn}",
            f"{'ranked' if pairs else how}: before, {f'every {every} steps, ' if every else ''}after"
            + ("" if pairs else right),
        )
        yield from overlap_warnings(run.data, file, name, config.environment is not None)
        if pairs:
            yield from run.limit.answers_beyond(file.longest_brought)
        else:
            key = "evaluation.max_response_tokens"
            yield from run.limit.responses_beyond(file.longest_prompt, one.max_response_tokens, key)


def overlap_warnings(data: PromptFile, held_out: PromptFile, name: str, episodes: bool) -> Entries:
    """Warn of held-out prompts that the run also trains on; nobody has read the prompts that are streamed.

    Rows of episodes are compared whole: where the environment asks, all prompts may be equal.
    """
    if data.streamed:
        return

    def seen(prompt: Prompt) -> tuple[bytes, str]:
        row = json.dumps([prompt.answer, prompt.info], sort_keys=True) if episodes else ""
        return prompt.token_ids.tobytes(), row

    trained = {seen(prompt) for prompt in data.prompts}
    if shared := sum(seen(prompt) in trained for prompt in held_out.prompts):
        of = f" of {name}" if name else ""
        yield warning(
            f"{shared} of {len(held_out.prompts)} held-out prompts{of} are also in the training data: "
            "accuracy on them shows memory, not skill"
        )


def sync_chapter(run: RunFacts) -> Entries:
    """Describe the memory of a generator's worker, where the stack has one, and the bytes of a sync."""
    generator, model, adapters, weights_of = run.stack.generator, run.model, run.adapters, run.config.weights
    if run.config.trains_reward_model:
        return
    weights = model.parameters * BYTES[generator.dtype] // generator.tensor_parallel_size
    sent = model.parameters * BYTES[run.stack.trainer.dtype]
    staged, kept = f"live and staged {generator.dtype} weights {shown_bytes(weights)} each", 2 * weights
    if generator.apply_weights == "direct":
        staged, kept = f"live {generator.dtype} weights, which new ones overwrite", weights
    if adapters is not None:
        staged = f"live {generator.dtype} weights, and {shown_bytes(sent)} of the host for those under the adapters"
    if generator.replicas or generator.attach:
        yield Line(
            "memory of a generator worker",
            f"about {shown_bytes(weights if adapters else kept)} + KV cache",
            f"{staged}; the KV cache takes {shown_bytes(token_bytes(model, generator))} a token",
        )
    backends = ("gloo", "nccl") if weights_of.backend == "auto" else (weights_of.backend,)
    sizes = " or ".join(f"{bucket_size_mib(weights_of.bucket_mib, one)} MiB ({one})" for one in backends)
    moved = sent if adapters is None else adapters.parameters * MASTER
    once = "" if adapters is None else f"; {shown_bytes(sent)} before the first ones of each weight group"
    yield Line("weight sync", shown_bytes(moved), f"in broadcasts of at most {sizes} to each generator{once}")
