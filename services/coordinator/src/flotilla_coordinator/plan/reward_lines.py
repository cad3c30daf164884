"""Describes the environment and the rewards of a run: who gives each, where, and in which jail.

It also finds what reward models of the run cannot score.

Invariant: no weight is read; the labels of a model are the rows of its head of scores.
"""

from __future__ import annotations

from flotilla_coordinator.plan.chapter import Entries, Line, refusal, shown_bytes
from flotilla_coordinator.plan.functions import jail_of, terms_of
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import scoring_bytes
from flotilla_core.config import FleetJudgeConfig, IsolationConfig, RewardTermConfig, RunConfig, StackConfig
from flotilla_core.config.run import AGENT
from flotilla_core.errors import FlotillaError
from flotilla_core.gangs import gang_of, model_of, started
from flotilla_core.model_folder import SCORE_HEADS, model_folder, score_head
from flotilla_core.roles import REWARD_MODEL, named_role, section_of
from flotilla_data.tokenizer import Tokenizer

_OF_OTHERS = "as the stack of the replicas says, which others started"
_TRIED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def rewards_chapter(config: RunConfig, stack: StackConfig) -> Entries:
    """Describe each reward and the environment: who gives it, and how far what it runs is kept from the host."""
    if (own := config.environment) is not None:
        plays = stack.environment
        where = _where(own.name, own.trusted, plays.isolation, bool(plays.attach), "environment")
        episode = f"up to {own.max_turns} turns in {own.episode_tokens:,} tokens"
        who = "an agent of yours" if own.name == AGENT else _kind(own.name, "a class")
        yield Line(f"environment {own.name}", who, f"{episode}; {where}")
    for key, term in terms_of(config):
        gate = "" if term.gate_at is None else f", gate at {term.gate_at:g}"
        if term.model is not None:
            who, where = f"reward model {term.model.model}", _place_of_model(stack, term.model.model)
        elif term.judge:
            who, where = f"judge {term.judge}", _place_of_judge(stack, term.judge)
        else:
            scores, name = stack.reward, str(term.reward)
            who = _kind(name, "a function")
            where = _where(name, term.trusted, scores.isolation, bool(scores.attach), "reward")
        asked = term.agreement
        agreed = (
            f"; agrees with {asked.examples}, by {asked.at_least:g} at least" if asked is not None else ""
        )
        yield Line(f"{key} {term.shown}", who, f"weight {term.weight:g}{gate}; {where}{agreed}")


def _place_of_model(stack: StackConfig, name: str) -> str:
    role = named_role(REWARD_MODEL, name)
    if not started(stack, role):
        return "the stack does not start it"
    gang = gang_of(stack, role)
    return f"{model_of(stack, role)}, scored by a gang of its own ({gang.replicas or 1} x {gang.nproc} ranks)"


def _place_of_judge(stack: StackConfig, name: str) -> str:
    judge = stack.judges.get(name)
    if judge is None:
        return _OF_OTHERS
    if isinstance(judge, FleetJudgeConfig):
        return f"{judge.model}, on {judge.replicas} generators of the fleet"
    return f"{judge.model} at {judge.url}"


def _kind(name: str, of_file: str) -> str:
    return of_file if ".py:" in name else "built in, or an entry point"


def _where(name: str, trusted: bool, asked: IsolationConfig, attached: bool, service: str) -> str:
    """Say where a function or an environment runs."""
    if ".py:" not in name and name != AGENT:
        return f"in the {service} service; in its jail where it runs code of others"
    if trusted or asked.unsafe:
        return f"OUTSIDE OF THE JAIL, as the {service} service itself"
    if attached:
        return f"in the jail, {_OF_OTHERS}"
    jail = jail_of(asked)
    return f"in the jail, of level {asked.at_least} at least; the host of this plan has {jail.isolation}"


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
