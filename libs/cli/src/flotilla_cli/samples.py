"""Implements `flotilla samples`, which shows the samples of a run, or of its evaluations, with their rewards.

Invariants: filters see whole texts. The answers of evaluations come from the files of the run directory, where they can
be read. Without a running fleet samples are read from disk too.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from google.protobuf.json_format import MessageToDict

from flotilla.coordinator.v1.coordinator_pb2 import GetRunResponse, Sample, SampleState
from flotilla_cli.completion import RunId
from flotilla_cli.options import Coordinator, Json, Stack, make_folder_of
from flotilla_cli.output import print_json, print_line, print_table, say, short_reward, version_text
from flotilla_cli.recorded import how_kept, lacks_conversation, recall
from flotilla_cli.stack import ask
from flotilla_cli.training_file import Kind, training_file
from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import FlotillaError, InvalidRequest, NotFound
from flotilla_core.terminal import visible_json
from flotilla_data.samples import read_samples

if TYPE_CHECKING:
    from flotilla_cli.stack import Answers

_LONGEST_TEXT = 50
_PAGE = 200
COLUMNS = ("SAMPLE", "STEP", "STATE", "REWARD", "VERSION", "PROMPT", "RESPONSE")
EVALUATION_COLUMNS = ("STEP", "SET", "ROW", "REWARD", "ANSWER", "PROMPT", "RESPONSE")


class State(StrEnum):
    """States of a sample, as `--state` names them."""

    ISSUED = "issued"
    GENERATED = "generated"
    SCORED = "scored"
    CONSUMED = "consumed"
    DURABLE = "durable"
    DROPPED = "dropped"


class Order(StrEnum):
    """Orders of `--sort`; all ascend."""

    REWARD = "reward"
    LENGTH = "length"
    STEP = "step"


class Filter(NamedTuple):
    """Says which samples are shown, in which order, and how many."""

    step: int | None
    state: State | None
    above: float | None
    below: float | None
    contains: str | None
    sort: Order | None
    reverse: bool
    limit: int | None

    def takes(self, sample: dict[str, Any]) -> bool:
        """Return whether a sample is shown; without a reward it is neither above nor below a number."""
        reward = sample["reward"]
        if self.step is not None and sample["step"] != self.step:
            return False
        if self.above is not None and (reward is None or reward <= self.above):
            return False
        if self.below is not None and (reward is None or reward >= self.below):
            return False
        texts = (sample["prompt"], sample["response"], sample.get("answer") or "")
        return self.contains is None or any(self.contains.casefold() in text.casefold() for text in texts)

    @property
    def stops_early(self) -> bool:
        """Return whether the first samples that fit are those that are shown."""
        return self.limit is not None and self.sort is None and not self.reverse

    def chosen(self, samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the samples to show, in their order; one without a reward comes after all others."""
        found = [sample for sample in samples if self.takes(sample)]
        if self.sort is Order.REWARD:
            found = [sample for sample in found if sample["reward"] is not None]
        keys: dict[Order, Callable[[dict[str, Any]], Any]] = {
            Order.REWARD: lambda sample: sample["reward"],
            Order.LENGTH: lambda sample: _tokens(sample) or len(sample["response"]),
            Order.STEP: lambda sample: sample["step"],
        }
        if self.sort is not None:
            found.sort(key=keys[self.sort], reverse=self.reverse)
        elif self.reverse:
            found.reverse()
        return found[: self.limit]


def samples(
    run: RunId,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only those of this step.")] = None,
    state: Annotated[State | None, typer.Option("--state", help="Only those in this state.")] = None,
    reward_above: Annotated[
        float | None, typer.Option("--reward-above", metavar="X", help="Only those with a reward above X.")
    ] = None,
    reward_below: Annotated[
        float | None, typer.Option("--reward-below", metavar="X", help="Only those with a reward below X.")
    ] = None,
    contains: Annotated[
        str | None,
        typer.Option(
            "--contains", metavar="TEXT", help="Only those with this text in prompt, response or answer."
        ),
    ] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Answers to the held-out prompts instead.")
    ] = False,
    held_out: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="With --evaluation: only this held-out set.")
    ] = None,
    sort: Annotated[
        Order | None, typer.Option("--sort", help="Ascending order; without it the oldest come first.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Samples to show.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Show whole prompts and responses.")] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(
            "--parquet", metavar="FILE", help="Write all that fit as a Parquet file instead; -n is not used."
        ),
    ] = None,
    to: Annotated[
        Kind | None,
        typer.Option(
            "--to",
            help="Write a file instead: answers for sft, pairs for dpo and reward_model, or OpenEnv's traces.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="With --to: the JSON Lines file.")
    ] = None,
    at_least: Annotated[
        float | None,
        typer.Option(
            "--at-least",
            metavar="X",
            show_default="evaluation.success_at of the run, or 1",
            help="With --to sft: the least reward of an answer.",
        ),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(
            "--best", min=1, metavar="N", show_default="1", help="With --to sft: answers of a prompt."
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin", min=0, metavar="X", help="With --to pairs: the least difference of the rewards."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --to.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show samples of a run, the oldest first: prompt, response, reward, version and what became of each.

    With --full also the answer, the other columns of the row, and the parts of the reward. With --to, write rows to
    learn from instead.
    """
    _require_fitting(evaluation=evaluation, state=state, held_out=held_out)
    if parquet is not None and to is not None:
        raise InvalidRequest("--to and --parquet write different files", where="--parquet with --to")
    if evaluation and to is Kind.TRACE:
        raise InvalidRequest("evaluations record no tokens", where="--evaluation with --to trace")
    rows = training_file(to, output, force=force, at_least=at_least, best=best, margin=margin)
    written = rows is not None or parquet is not None
    wanted = Filter(
        step, state, reward_above, reward_below, contains, sort, reverse, None if written else limit
    )
    where = (stack, coordinator)
    if evaluation:
        of_run, shown = _evaluated(run, wanted, held_out, *where)
    else:
        of_run, shown = _sampled(
            run, wanted, *where, messages=full or as_json or written, tokens=rows is not None
        )
    run_id = of_run.run.run_id
    if rows is not None:
        directory = Path(of_run.run.directory)
        rows.write(run_id, _config_of(of_run), shown, stack, directory, as_json=as_json)
    elif parquet is not None:
        _write_parquet(parquet, run_id, shown, as_json=as_json)
    elif as_json:
        print_json({"run_id": run_id, "samples": shown})
    elif not shown:
        say(_why_none(of_run) or f"run {run_id} has no such sample")
    elif full:
        config = _config_of(of_run)
        for sample in shown:
            _print_whole(sample, config, Path(of_run.run.directory))
    elif evaluation:
        print_table(EVALUATION_COLUMNS, map(_evaluation_row, _told_apart(shown)))
    else:
        print_table(COLUMNS, map(_row, _told_apart(shown)))


def _require_fitting(*, evaluation: bool, state: State | None, held_out: str | None) -> None:
    if evaluation and state is not None:
        raise InvalidRequest("answers of an evaluation have no state", where="--state with --evaluation")
    if held_out is not None and not evaluation:
        raise InvalidRequest("only evaluations have sets", where="--set", next_step="add --evaluation")


def _sampled(
    run: str, wanted: Filter, stack: str | None, coordinator: str | None, *, messages: bool, tokens: bool
) -> tuple[GetRunResponse, list[dict[str, Any]]]:
    """Return the run and its samples; those that are episodes without or with their `messages`.

    With `tokens` each has `token_ids`, None where they are not on record any more. What the ledger has forgotten comes
    from the record of the run.
    """

    def read_sample(sample: Sample) -> dict[str, Any]:
        return _sample_json(sample) | ({"token_ids": _token_ids(sample)} if tokens else {})

    async def read(client: Answers) -> tuple[GetRunResponse, list[dict[str, Any]]]:
        of_run = await client.get_run_and_config(run)
        found, page_token = list[dict[str, Any]](), ""
        while True:
            page = await client.list_samples(
                of_run.run.run_id,
                step=wanted.step,
                state=_wire_state(wanted.state),
                limit=_PAGE,
                page_token=page_token,
                messages=messages,
            )
            found += filter(wanted.takes, map(read_sample, page.samples))
            page_token = page.next_page_token
            if not page_token or (wanted.stops_early and len(found) >= (wanted.limit or 0)):
                return of_run, found

    of_run, found = ask(read, stack, coordinator)
    chosen = wanted.chosen(found)
    if messages:
        recall(chosen, _config_of(of_run), Path(of_run.run.directory))
    return of_run, chosen


def _config_of(of_run: GetRunResponse) -> RunConfig | None:
    """Return the configuration of a run; None where another release wrote it, with other keys."""
    try:
        return load_text(RunConfig, of_run.config_yaml, source=f"run {of_run.run.run_id}")
    except FlotillaError:
        return None


def _why_none(of_run: GetRunResponse) -> str:
    """Say of a run that learns from what its data brings what to look at; nothing of one that draws samples."""
    run_id, config = of_run.run.run_id, _config_of(of_run)
    if config is None or config.draws_samples or config.loop == "client":
        return ""
    given = "recorded samples" if config.data.recorded else "answers"
    answers = f", and flotilla samples {run_id} --evaluation its answers to held-out prompts"
    return (
        f"run {run_id} draws no samples: {config.algorithm.type} learns from the {given} of its data. "
        "flotilla run plan shows what it learns of the first row, and flotilla run show its metrics"
        + (answers if config.evaluates_answers else "")
    )


def _evaluated(
    run: str, wanted: Filter, held_out: str | None, stack: str | None, coordinator: str | None
) -> tuple[GetRunResponse, list[dict[str, Any]]]:
    """Return the run and the answers of its evaluations, which the run directory alone holds."""
    of_run = ask(lambda client: client.get_run_and_config(run), stack, coordinator)
    run_id, directory = of_run.run.run_id, of_run.run.directory
    found = list(read_samples(Path(directory), "eval", None if wanted.step is None else {wanted.step}))
    if not found:
        raise NotFound(
            f"run {run_id} has no answers of an evaluation"
            + ("" if wanted.step is None else " at this step"),
            where=f"{directory}/samples",
            next_step="evaluations keep their answers since this release; see evaluation.data of the run",
        )
    return of_run, wanted.chosen(one for one in found if held_out in (None, one.get("set")))


def _wire_state(state: State | None) -> Any:
    return SampleState.Value(f"SAMPLE_STATE_{state.name if state else 'UNSPECIFIED'}")


def _sample_json(sample: Sample) -> dict[str, Any]:
    parts = [{"reward": part.reward, "value": part.value} for part in sample.reward_parts.parts]
    return {
        "sample_id": sample.sample_id,
        "step": sample.step,
        "state": SampleState.Name(sample.state).removeprefix("SAMPLE_STATE_").lower(),
        "drop_reason": sample.drop_reason or None,
        "reward": sample.reward if sample.HasField("reward") else None,
        "reward_parts": parts if sample.HasField("reward_parts") else None,
        "verdicts": [MessageToDict(one, preserving_proto_field_name=True) for one in sample.verdicts],
        "policy_versions": list(dict.fromkeys(version_text(span.version) for span in sample.version_spans)),
        "tokens": sample.version_spans[-1].end if sample.version_spans else 0,
        "prompt_tokens": sample.prompt_tokens,
        "truncated": sample.truncated,
        "generator": sample.generator_id or None,
        "attempt": sample.attempt,
        "update_id": sample.update_id or None,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer if sample.HasField("answer") else None,
        "info": json.loads(sample.info_json) if sample.HasField("info_json") else None,
        "episode": _episode_json(sample) if sample.HasField("episode") else None,
    }


def _token_ids(sample: Sample) -> Any:
    from flotilla_core.tensors import from_tensor

    return from_tensor(sample.token_ids) if sample.HasField("token_ids") else None


def _episode_json(sample: Sample) -> dict[str, Any]:
    episode = sample.episode
    return {
        "ending": episode.ending,
        "turns": episode.turns,
        "turn_rewards": [*episode.turn_rewards],
        "branches": episode.branches,
        "messages": json.loads(episode.messages_json or "[]"),
    }


def _write_parquet(path: Path, run_id: str, found: list[dict[str, Any]], *, as_json: bool) -> None:
    from flotilla_coordinator.records.report import write_sample_table

    make_folder_of(path)
    write_sample_table(path, found)
    if as_json:
        print_json({"run_id": run_id, "file": str(path), "rows": len(found)})
    else:
        print_line(f"{path}: {len(found)} samples of run {run_id}")


def _row(sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        sample["sample_id"],
        str(sample["step"]),
        _outcome(sample),
        _reward(sample),
        " ".join(sample["policy_versions"]),
        *(_short(sample[text]) for text in ("prompt", "response")),
    )


def _evaluation_row(sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(sample["step"]),
        sample.get("set") or "",
        str(sample.get("prompt_index", "")),
        _reward(sample),
        *(_short(sample.get(text) or "") for text in ("answer", "prompt", "response")),
    )


def _told_apart(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples with the part of each long prompt that no other one has: where they differ, up to the end.

    A system prompt, which begins all of them, and what a chat template writes at their end say nothing about a row.
    """
    prompts = sorted({sample.get("prompt") or "" for sample in found})
    if len(prompts) < 2 or max(map(len, prompts)) <= _LONGEST_TEXT:
        return found
    begin = _common(prompts)
    end = _common([prompt[len(begin) :][::-1] for prompt in prompts])
    if not begin:
        return found
    return [
        sample | {"prompt": _last_part((sample.get("prompt") or "")[len(begin) :].removesuffix(end[::-1]))}
        for sample in found
    ]


def _common(texts: list[str]) -> str:
    """Return what all texts begin with, without a word that this would cut."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
    common = "".join(sign for sign, _ in pairs)
    return common[: max(common.rfind(sign) for sign in " \n>") + 1]


def _last_part(text: str) -> str:
    """Return the end of a text, which asks; in a chat the turns before it come first."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_TEXT else "..." + words[3 - _LONGEST_TEXT :]


def _short(text: str) -> str:
    return textwrap.shorten(text, _LONGEST_TEXT, placeholder="...")


def _print_whole(sample: dict[str, Any], config: RunConfig | None, directory: Path) -> None:
    versions = " ".join(sample.get("policy_versions") or [sample.get("policy_version") or "none"])
    if "state" in sample:
        print_line(f"=== {sample['sample_id']}  step {sample['step']}  {_outcome(sample)}")
    else:
        place = " ".join(filter(None, ("evaluation", sample.get("set"))))
        print_line(f"=== {place}  step {sample['step']}  row {sample.get('prompt_index', '?')}")
    tokens = f"  {_tokens(sample)} tokens" if _tokens(sample) is not None else ""
    print_line(f"reward {_reward(sample) or 'none'}  version {versions}{tokens}")
    if sample.get("reward_parts"):
        print_line("parts  " + ", ".join(_part(part) for part in sample["reward_parts"]))
    for verdict in sample.get("verdicts") or ():
        print_line(f"judged {_verdict(verdict)}")
    if config is not None and (made := _made(sample, config)):
        print_line(f"made   {made}")
    if sample.get("info"):
        print_line(f"info   {visible_json(sample['info'])}")
    texts = ["prompt", "response"]
    if sample.get("episode"):  # whose conversation has both
        print_episode(sample["episode"])
        texts = []
    elif lacks_conversation(sample, config):
        print_line(f"--- the conversation is not on record any more: {how_kept(config, directory)}")
    for name in [*texts, "answer"] if sample.get("answer") else texts:
        print_line(f"--- {name}\n{sample[name]}")


def _tokens(sample: dict[str, Any]) -> int | None:
    """Return the tokens of the response; the answers of an evaluation have another name for them."""
    tokens: int | None = sample.get("tokens", sample.get("response_tokens"))
    return tokens


def _part(part: dict[str, Any]) -> str:
    return f"{short_reward(part['reward'])} {part['value']:.4g}"


def _verdict(verdict: dict[str, Any]) -> str:
    """Say who judged a sample, how, in which time, and what is wrong."""
    said = (
        verdict["outcome"] if verdict.get("value") is None else f"{verdict['outcome']} {verdict['value']:.4g}"
    )
    told = [f"{short_reward(verdict['reward'])} {said}"]
    # An environment has neither: it scores while it plays.
    if verdict.get("version"):
        told.append(f"by {verdict['version']}")
    if verdict.get("seconds"):
        told.append(f"in {verdict['seconds'] * 1000:.1f} ms")
    if verdict.get("extracted"):
        told.append(f"read {_short(verdict['extracted'])!r}")
    if verdict.get("message"):
        told.append(verdict["message"])
    return ", ".join(told)


def _made(sample: dict[str, Any], config: RunConfig) -> str:
    """Say how the terms made the reward of a sample; nothing where it has none, or the run has other terms now."""
    from flotilla_coordinator.rollouts.scoring import combined

    terms, mode = config.rewards, config.reward_mode
    sets = config.evaluation.sets_of_data if config.evaluation is not None else ()
    if own := next((one for one in sets if one.rewards and one.name == sample.get("set")), None):
        terms, mode = own.rewards, own.reward_mode
    verdicts, reward = sample.get("verdicts") or (), sample["reward"]
    names, values = [one["reward"] for one in verdicts], [one.get("value") for one in verdicts]
    if not terms or reward is None or None in values or names != [term.shown for term in terms]:
        return ""
    if not math.isclose(combined(mode, terms, values), reward, rel_tol=1e-6, abs_tol=1e-6):
        return ""
    unverifiable = [" by on_unverifiable" * (one["outcome"] == "unverifiable") for one in verdicts]
    parts = [
        f"{term.weight:g} x {value:.4g} ({short_reward(term.shown)}{why})"
        for term, value, why in zip(terms, values, unverifiable, strict=True)
        if term.weight
    ]
    summed, total = " + ".join(parts), f"= {reward:.4g}"
    if mode == "weighted":
        return f"{summed} {total}"
    if mode == "gated":
        pairs = [(one, value) for one, value in zip(terms, values, strict=True) if one.gate_at is not None]
        for one, value in pairs:
            if value < one.gate_at:
                return (
                    f"gated: {short_reward(one.shown)} {value:.4g} is below its gate_at {one.gate_at:g}, so 0"
                )
        return f"gated: every gate is open, {summed} {total}"
    told = {"product": " times ".join(parts), "first": f"the first that is not 0 of {', '.join(parts)}"}
    return f"{mode}: {told.get(mode, ', '.join(parts))} {total}"


def _outcome(sample: dict[str, Any]) -> str:
    return f"{sample['state']}: {sample['drop_reason']}" if sample["drop_reason"] else str(sample["state"])


def _reward(sample: dict[str, Any]) -> str:
    return "" if sample["reward"] is None else f"{sample['reward']:.4g}"


def print_episode(episode: dict[str, Any]) -> None:
    """Print one episode."""
    sequences = f", trained as {episode['branches']} sequences" if episode["branches"] > 1 else ""
    print_line(f"ended  {episode['ending']} after {episode['turns']} turns{sequences}")
    for entry in episode["messages"]:
        print_line("\n".join(_entry_lines(entry, episode["turn_rewards"])))


def _entry_lines(entry: dict[str, Any], turn_rewards: list[float]) -> list[str]:
    """Return one entry of the record: a message, or what happened between messages."""
    of = f" of {entry['thread']}" if entry.get("thread") else ""
    if "branch" in entry:
        return [f"--- the history{of} goes on otherwise ({entry['branch']}); {entry['kept']} messages stay"]
    if "resumed" in entry:
        return [f"--- a service was lost: the {entry['resumed']} turns so far were played again"]
    if "tools" in entry:
        # A record of an earlier release has the names alone.
        names = [tool if isinstance(tool, str) else tool["function"]["name"] for tool in entry["tools"]]
        return [f"--- tools{of}: {', '.join(names)}"]
    if "ended" in entry:
        rewards = ", ".join(f"{name} {value:.4g}" for name, value in entry.get("rewards", {}).items())
        failure = f": {entry['failure']}" if entry.get("failure") else ""
        return [f"--- ended {entry['ended']}{failure}", *([f"rewards {rewards}"] if rewards else [])]
    lines = [f"--- {entry['role']}{of}{_of_turn(entry, turn_rewards)}"]
    if entry.get("content"):
        lines.append(entry["content"])
    for call in entry.get("tool_calls", ()):
        lines.append(f"call {call['function']['name']} {visible_json(call['function']['arguments'])}")
    if entry.get("unparsed"):
        lines.append(f"unread {entry['unparsed']}")
    return lines


def _of_turn(entry: dict[str, Any], turn_rewards: list[float]) -> str:
    """Return the facts of a turn of the policy; nothing for what others said."""
    if "turn" not in entry:
        return ""
    facts = [f"turn {entry['turn']}", f"{entry['tokens']} tokens", *entry["versions"]]
    if entry.get("cut_off"):
        facts.append("cut off")
    if entry.get("state"):
        facts.append(f"state {entry['state']}")
    if len(turn_rewards) >= entry["turn"]:
        facts.append(f"reward {turn_rewards[entry['turn'] - 1]:.4g}")
    return f" ({', '.join(facts)})"
