"""Implements `flotilla reward`, which lists the rewards that a run may name, and tries them without a fleet.

Invariant: no code of a user runs in this process. A trial is scored by the reward service's own code, in a process of
its own that ends with the command; one that asks a judge of the fleet is scored by a replica of the fleet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2 import ListRewardsRequest, RewardInfo
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_cli.completion import complete_setting
from flotilla_cli.options import RUN_FAILED, Coordinator, Json, Stack, wait
from flotilla_cli.output import print_json, print_line, print_table, say, short_reward
from flotilla_cli.processes import say_isolation
from flotilla_cli.rescoring import score
from flotilla_cli.reward_trial import SHOWN_BYTES, TRIAL, is_installed, outcomes_of, rewards_and_data
from flotilla_cli.services import find_services
from flotilla_cli.stack import (
    load_stack,
    make_example,
    missing_model,
    stack_file,
    stack_paths,
    with_models_here,
)
from flotilla_core import rpc
from flotilla_core.config import RewardTermConfig, RunConfig, StackConfig
from flotilla_core.errors import (
    FlotillaError,
    Internal,
    InvalidConfig,
    NotFound,
    Unavailable,
)
from flotilla_core.generated_tasks import COLUMN
from flotilla_core.model_folder import model_folder
from flotilla_data.rows import open_rows, parts
from flotilla_launch.state import is_up

if TYPE_CHECKING:
    from flotilla_coordinator.data.prompts import Prompt
    from flotilla_coordinator.rollouts.judges import Agreement
    from flotilla_coordinator.rollouts.scoring import Outcome
    from flotilla_data.tokenizer import Tokenizer

app = typer.Typer(help="Rewards that a run may name.", no_args_is_help=True)
app.command()(score)

_LIST_S = 10.0
_LONGEST_CELL = 40
ANSWER, EMPTY = "(the answer)", "(empty)"


@app.command("list")
def list_(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the rewards that the reward services know by name, with their parameters.

    A function in a file needs no entry here: name it in the run as path.py:function.
    """
    try:
        known, levels = wait(_ask(stack, coordinator))
    except Unavailable:
        if coordinator is not None or is_up(stack_paths(stack)) or not is_installed():
            raise
        say("no fleet is running: these are the rewards that are installed here")
        known, levels = _installed(), {}
    rewards = [_reward_json(found, services) for found, services in known]
    if as_json:
        print_json({"rewards": rewards, "isolation": levels})
        return
    rows = [
        (one["name"], ", ".join(_parameter(one, name) for name in one["parameters"]), one["description"])
        for one in rewards
    ]
    print_table(("REWARD", "PARAMETERS", "WHAT IT GIVES"), rows)
    say_isolation(levels)


def _installed() -> list[tuple[RewardInfo, list[str]]]:
    """Return the rewards that a reward service of this host would have."""
    listed = subprocess.run([sys.executable, "-m", TRIAL, "list"], capture_output=True, check=False)
    if listed.returncode:
        raise Internal(
            "the rewards cannot be listed", why=listed.stderr.decode(errors="replace")[-SHOWN_BYTES:]
        )
    return [(info, []) for info in pb.ListRewardsResponse.FromString(listed.stdout).rewards]


async def _ask(
    stack: str | None, coordinator: str | None
) -> tuple[list[tuple[RewardInfo, list[str]]], dict[str, str]]:
    """Return each reward once, with the names of the services that serve it, and the isolation of these."""
    found: dict[str, tuple[RewardInfo, list[str]]] = {}
    levels: dict[str, str] = {}
    services = [
        one for one in (await find_services(stack, coordinator)).values() if one.kind == SERVICE_KIND_REWARD
    ]
    if not services:
        raise Unavailable("no reward service is running", next_step="start one: flotilla scale reward 1")
    for service in services:
        async with service.channel() as channel:
            call = RewardServiceStub(channel).ListRewards
            answer = await rpc.unary(call, ListRewardsRequest(), timeout_s=_LIST_S)
        levels[service.name] = answer.isolation
        for info in answer.rewards:
            found.setdefault(info.name, (info, []))[1].append(service.name)
    return list(found.values()), levels


def _reward_json(info: RewardInfo, services: list[str]) -> dict[str, Any]:
    schema = MessageToDict(info.parameters)
    return {
        "name": info.name,
        "description": " ".join(info.description.split()),
        "parameters": schema.get("properties", {}),
        "required": schema.get("required", []),
        "services": services,
    }


def _parameter(reward: dict[str, Any], name: str) -> str:
    """Show a parameter: `pattern` where it must be given, `ignore_case=false` where it has a default."""
    default = reward["parameters"][name].get("default")
    if isinstance(default, float):  # every number of a Struct is one
        return f"{name}={default:g}"
    return name if default is None else f"{name}={json.dumps(default)}"


@app.command()
def test(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[REWARD]... [FILE]... [key.path=value]...",
            help="Rewards by name or path.py:function; run files, whose rewards and data are taken; overrides.",
            autocompletion=complete_setting,
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Data file, in place of data.train.")
    ] = None,
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="Rows of the data to score.")] = 5,
    response: Annotated[
        list[str] | None, typer.Option("--response", metavar="TEXT", help="A response to score for each row.")
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            "--responses", metavar="FILE", help='JSONL file with a "response" for each row, in order.'
        ),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Score rows of the data by the rewards of a run, or by one reward; needs no fleet and no GPU.

    Without responses of yours each row is scored twice: with its answer as the response, and with an empty one. The
    answer of a generated task stands between the tags of its reward. Exit code 1 when a response could not be scored.
    """
    config = rewards_and_data(arguments, data)
    make_example(stack_file(stack))
    of_stack = load_stack(stack)
    tokenizer = _tokenizer(of_stack, missing_model(stack, of_stack))
    prompts = _prompts(config, tokenizer, rows)
    tried = list(_responses(config, prompts, response or [], responses))
    scored = zip(tried, _scored(config, of_stack, tokenizer, tried), strict=True)
    found = [_trial_json(*one, *outcome) for one, outcome in scored]
    judges = [agreement_with(term, of_stack) for term in config.judged_terms]
    if as_json:
        figures = [{"reward": one.term, "agreement": one.figure, "at_least": one.at_least} for one in judges]
        names = [term.shown for term in config.rewards]
        print_json({"rewards": names, "samples": found, "judges": figures})
    else:
        _print_trial(found)
    for one in judges:
        say(f"the judge of {one.term} agrees by {one.figure:.3f} ({one.shown})")
    if any(one["failure"] for one in found) or not all(one.enough for one in judges):
        raise typer.Exit(RUN_FAILED)


def agreement_with(term: RewardTermConfig, stack: StackConfig) -> Agreement:
    """Ask the judge of a term of its labelled examples; return how far it agrees."""
    from flotilla_coordinator.rollouts.judges import agreement_of, examples_of

    examples = examples_of(term)
    outcomes = outcomes_of((term,), [one.item for one in examples], None, stack)
    return agreement_of(term, examples, {one.sample_id: one for one in outcomes})


def _tokenizer(stack: StackConfig, no_model: NotFound | None) -> Tokenizer:
    """Return the tokenizer of the stack's policy; where no stack file names a model, one that takes text alone."""
    from flotilla_data.tokenizer import TextAlone, Tokenizer

    if no_model is None:
        return Tokenizer.load(model_folder(with_models_here(stack).model))
    say("there is no stack file: prompts are taken as they are, and rewards see no token ids")
    return TextAlone(no_model)


def _prompts(config: RunConfig, tokenizer: Tokenizer, rows: int) -> list[Prompt]:
    """Return the first rows of the training data, with their prompts as the policy of the stack sees them."""
    from flotilla_coordinator.data.prompts import load_prompts
    from flotilla_coordinator.data.training_sets import JoinedSets, read_sets

    return JoinedSets(read_sets(config.data, tokenizer, load_prompts)).first(rows)


def _responses(
    config: RunConfig, prompts: list[Prompt], given: list[str], file: Path | None
) -> Iterator[tuple[Prompt, str, str]]:
    """Yield prompt, response, and a name for each response that is no text of the user's."""
    if file is not None:
        texts = list(_read_responses(file, len(prompts)))
        yield from ((prompt, text, "") for prompt, text in zip(prompts, texts, strict=False))
        if missing := len(prompts) - len(texts):
            say(f"{file} has {len(texts)} responses: {missing} of {len(prompts)} rows are not scored by it")
    for prompt in prompts:
        yield from ((prompt, text, "") for text in given)
        if not given and file is None:
            if prompt.answer:
                yield prompt, _response_with(prompt, config), ANSWER
            yield prompt, "", EMPTY


def _response_with(prompt: Prompt, config: RunConfig) -> str:
    """Return the answer of a row as a response: that of a generated task stands between the tags of its terms."""
    tasks = [term for term in config.rewards if term.reward == COLUMN] if COLUMN in prompt.info else []
    tags = dict.fromkeys(str(term.parameters.get("tag", "answer")) for term in tasks)
    # A term without a tag takes the whole response, and finds no answer among tags.
    tags = {} if "" in tags else tags
    return "".join(f"<{tag}>{prompt.answer}</{tag}>" for tag in tags) or prompt.answer


def _read_responses(file: Path, most: int) -> Iterator[str]:
    """Yield the first responses of a file, which is read within the bounds of data files."""
    written = 'write one JSON object a line, with the text of a response under "response"'
    try:
        rows = open_rows(file, "train", None)
    except FlotillaError as error:
        why = ": ".join(filter(None, (error.what, error.why)))
        raise type(error)(
            "the responses cannot be read", where=error.where, why=why, next_step=written
        ) from None
    if (ignored := len(rows) - most) > 0:
        say(
            f"{file} has {len(rows)} responses: {ignored} of them are ignored, for {most} rows are scored (-n)"
        )
    for part in parts(rows, range(min(most, len(rows)))):
        for row in rows.read(part):
            if row.error is not None:
                raise row.error
            text = row.values.get("response")
            if not isinstance(text, str):
                raise InvalidConfig('the line has no text "response"', where=row.where, next_step=written)
            yield text


def _scored(
    config: RunConfig, stack: StackConfig, tokenizer: Tokenizer, tried: list[tuple[Prompt, str, str]]
) -> list[tuple[Outcome, float]]:
    """Return the outcome of each response, and its seconds.

    The responses to a row are a group, of a run that has made no step.
    """
    import numpy as np

    from flotilla_coordinator.rollouts.scoring import score_item, weigh
    from flotilla_data.tokenizer import TextAlone

    token_ids = [
        None if isinstance(tokenizer, TextAlone) else tokenizer.encode(text, special=False)
        for _, text, _ in tried
    ]
    items = [
        score_item(
            str(number),
            prompt,
            text,
            group=str(prompt.index),
            token_ids=None if tokens is None else np.array(tokens, np.int32),
            step=0,
        )
        for number, ((prompt, text, _), tokens) in enumerate(zip(tried, token_ids, strict=True))
    ]
    return [
        (weigh(config.rewards, one, config.reward_mode), one.elapsed.ToNanoseconds() / 1e9)
        for one in outcomes_of(config.rewards, items, config.steps, stack)
    ]


def _trial_json(prompt: Prompt, response: str, name: str, outcome: Outcome, seconds: float) -> dict[str, Any]:
    from flotilla_coordinator.ledger.verdicts import named_parts

    return {
        "row": prompt.index + 1,
        "prompt": prompt.prompt_text,
        "response": response,
        "response_is": name.strip("()"),
        "answer": prompt.answer,
        "info": prompt.info,
        "reward": outcome.total,
        "reward_parts": [{"reward": name, "value": value} for name, value in named_parts(outcome.verdicts)],
        "verdicts": [verdict.record() for verdict in outcome.verdicts],
        "seconds": seconds,
        "failure": outcome.failure if outcome.failed else "",
        "traceback": outcome.traceback,
    }


def _print_trial(found: list[dict[str, Any]]) -> None:
    """Print a line for each response, each failure once with its traceback, the verifiers, and what to make of it."""
    rows = []
    shared = _shared_lines([one["prompt"] for one in found])
    for one in found:
        parts = ", ".join(
            f"{short_reward(part['reward'])}={part['value']:.4g}" for part in one["reward_parts"]
        )
        shown = f"({one['response_is']})" if one["response_is"] else _short(one["response"])
        reward = "dropped" if one["reward"] is None else f"{one['reward']:.4g}"
        reward = "failed" if one["failure"] else reward
        time = f"{one['seconds'] * 1000:.1f} ms"
        rows.append(
            (
                str(one["row"]),
                shown,
                reward,
                parts,
                time,
                _short(one["answer"]),
                _short(one["prompt"][shared:]),
            )
        )
    print_table(("ROW", "RESPONSE", "REWARD", "PARTS", "TIME", "ANSWER", "PROMPT"), rows)
    failures: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        if one["failure"]:
            failures.setdefault(one["failure"], []).append(one)
    for failure, ones in failures.items():
        place = _place(ones[0], failure)
        print_line(f"\n{len(ones)} of {len(found)} failed, row {ones[0]['row']} first: {failure}{place}")
        if ones[0]["traceback"]:
            print_line(textwrap.indent(ones[0]["traceback"].rstrip(), "  "))
    for reward, ones in _verdicts_by_reward(found).items():
        broken = [one for one in ones if one["outcome"] == "unverifiable"]
        of_some = f"; {len(broken)} of {len(ones)} unverifiable: {broken[0]['message']}" if broken else ""
        say(f"{short_reward(reward)} is {ones[0].get('version') or 'of no known version'}{of_some}")
    rewards = [one["reward"] for one in found if one["reward"] is not None]
    for name in dict.fromkeys(one["response_is"] for one in found):
        of_name = [one["reward"] for one in found if one["response_is"] == name and one["reward"] is not None]
        if name and of_name:
            say(
                f"mean reward of {name.replace('empty', 'an empty response')}: {sum(of_name) / len(of_name):.4g}"
            )
    if len(rewards) > 1 and len(set(rewards)) == 1:
        say("all rewards are equal: these responses teach nothing. Try others: --response TEXT")


def _place(one: dict[str, Any], failure: str) -> str:
    """Return where the function is that failed, unless the failure says it."""
    places = [f"{said['file']}:{said['line']}" for said in one["verdicts"] if said.get("line")]
    return f" (at {places[-1]})" if places and places[-1] not in failure else ""


def _verdicts_by_reward(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for verdict in (verdict for one in found for verdict in one["verdicts"]):
        verdicts.setdefault(verdict["reward"], []).append(verdict)
    return verdicts


def _shared_lines(prompts: list[str]) -> int:
    """Return the length of the lines with which all prompts begin: a system prompt would hide what differs."""
    if len(set(prompts)) < 2:
        return 0
    lines = zip(*(prompt.splitlines(keepends=True) for prompt in prompts), strict=False)
    return sum(len(same[0]) for same in takewhile(lambda line: len(set(line)) == 1, lines))


def _short(text: str) -> str:
    return textwrap.shorten(text, _LONGEST_CELL, placeholder="...")
