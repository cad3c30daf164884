"""Describes the reward models that a run asks, and refuses what they cannot score, by the files of their folders.

Invariant: no weight is read; the labels of a model are the rows of its head of scores.
"""

from __future__ import annotations

from flotilla_coordinator.plan.chapter import Entries, Line, refusal, shown_bytes
from flotilla_coordinator.plan.functions import terms_of
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import scoring_bytes
from flotilla_core.config import RewardTermConfig, RunConfig, StackConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.gangs import gang_of, model_of, started
from flotilla_core.model_folder import SCORE_HEADS, model_folder, score_head
from flotilla_core.roles import REWARD_MODEL, named_role, section_of
from flotilla_data.tokenizer import Tokenizer

_TRIED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def reward_model_chapter(config: RunConfig, stack: StackConfig) -> Entries:
    """Describe each reward model that the stack starts, with the memory of its ranks, and find what cannot work."""
    for name in config.reward_models:
        role = named_role(REWARD_MODEL, name)
        if not started(stack, role):
            continue  # a refusal of its own
        terms = [(key, term) for key, term in terms_of(config) if term.model and term.model.model == name]
        try:
            folder = model_folder(model_of(stack, role))
            facts, tokenizer = ModelFacts.read(folder), Tokenizer.load(folder)
            _, labels = score_head(folder)
        except FlotillaError as error:
            yield error.finding()
            continue
        for key, term in terms:
            yield from _term_errors(key, term, labels, tokenizer)
        gang = gang_of(stack, role)
        yield Line(
            f"memory of a {section_of(role)} rank",
            f"about {shown_bytes(scoring_bytes(facts, config, gang))}",
            f"{facts.parameters:,} weights in float32, gathered {gang.dtype} layers, one micro-batch; "
            f"reads up to {facts.longest_sequence} tokens of its own tokenizer, labels: {labels}",
        )


def _term_errors(key: str, term: RewardTermConfig, labels: int, tokenizer: Tokenizer) -> Entries:
    assert term.model is not None, "of a reward model"
    name, label = term.model.model, term.model.label
    if not labels:
        heads = " or ".join(f"{head}.weight" for head in SCORE_HEADS)
        yield refusal(
            f"{key}.reward: the model {name} has no head of scores ({heads}), so it gives no reward: name a model for "
            "sequence classification, such as the export of a run with algorithm.type reward_model"
        )
    elif label is None and labels > 1:
        yield refusal(
            f"{key}.reward: the model {name} has {labels} labels: choose one by its number, such as "
            f"{{model: {name}, label: 0}}"
        )
    elif label is not None and label >= labels:
        yield refusal(
            f"{key}.reward.label is {label}, but the labels of the model {name} end at {labels - 1}"
        )
    if not term.template:
        try:
            tokenizer.render_chat(_TRIED, begin_answer=False)
        except FlotillaError as error:
            yield refusal(
                f"{key}.template is empty, and the model {name} cannot read a chat ({error.what}): write a template, "
                "such as '{prompt}{response}'"
            )
