"""Implements `flotilla samples`, which shows the samples of a run with their rewards and states."""

from __future__ import annotations

import textwrap
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, RunId, Stack
from flotilla_coordinator.cli.stack import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import ListSamplesResponse, Sample

_LONGEST_TEXT = 50
_PAGE = 200
COLUMNS = ("SAMPLE", "STEP", "STATE", "REWARD", "VERSION", "PROMPT", "RESPONSE")


class State(StrEnum):
    """States of a sample, as `--state` names them."""

    ISSUED = "issued"
    GENERATED = "generated"
    SCORED = "scored"
    CONSUMED = "consumed"
    DURABLE = "durable"
    DROPPED = "dropped"


def samples(
    run: RunId,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only those of this step.")] = None,
    state: Annotated[State | None, typer.Option("--state", help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Samples to show.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Show whole prompts and responses.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show samples of a run, the oldest first: prompt, response, reward, version and what became of each."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table, say

    async def ask() -> tuple[str, list[Sample]]:
        async with client_of(stack, coordinator) as client:
            run_id = (await client.get_run(run)).run_id
            found: list[Sample] = []
            page_token = ""
            while len(found) < limit:
                page: ListSamplesResponse = await client.list_samples(
                    run_id,
                    step=step,
                    state=_wire_state(state),
                    limit=min(_PAGE, limit - len(found)),
                    page_token=page_token,
                )
                found += page.samples
                page_token = page.next_page_token
                if not page_token:
                    break
            return run_id, found

    run_id, found = wait(ask())
    shown = [_sample_json(sample) for sample in found]
    if as_json:
        print_json({"run_id": run_id, "samples": shown})
    elif not shown:
        say(f"run {run_id} has no such sample")
    elif full:
        for sample in shown:
            _print_whole(sample)
    else:
        print_table(COLUMNS, map(_row, shown))


def _wire_state(state: State | None) -> Any:
    from flotilla.coordinator.v1.coordinator_pb2 import SampleState

    return SampleState.Value(f"SAMPLE_STATE_{state.name if state else 'UNSPECIFIED'}")


def _sample_json(sample: Sample) -> dict[str, Any]:
    from flotilla.coordinator.v1.coordinator_pb2 import SampleState
    from flotilla_coordinator.cli.output import version_text

    return {
        "sample_id": sample.sample_id,
        "step": sample.step,
        "state": SampleState.Name(sample.state).removeprefix("SAMPLE_STATE_").lower(),
        "drop_reason": sample.drop_reason or None,
        "reward": sample.reward if sample.HasField("reward") else None,
        "policy_versions": list(dict.fromkeys(version_text(span.version) for span in sample.version_spans)),
        "tokens": sample.version_spans[-1].end if sample.version_spans else 0,
        "generator": sample.generator_id or None,
        "attempt": sample.attempt,
        "update_id": sample.update_id or None,
        "prompt": sample.prompt,
        "response": sample.response,
    }


def _row(sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        sample["sample_id"],
        str(sample["step"]),
        _outcome(sample),
        _reward(sample),
        " ".join(sample["policy_versions"]),
        *(
            textwrap.shorten(sample[text], _LONGEST_TEXT, placeholder="...")
            for text in ("prompt", "response")
        ),
    )


def _print_whole(sample: dict[str, Any]) -> None:
    from flotilla_coordinator.cli.output import print_line

    versions = " ".join(sample["policy_versions"]) or "none"
    print_line(f"=== {sample['sample_id']}  step {sample['step']}  {_outcome(sample)}")
    print_line(f"reward {_reward(sample) or 'none'}  version {versions}  {sample['tokens']} tokens")
    for name in ("prompt", "response"):
        print_line(f"--- {name}\n{sample[name]}")


def _outcome(sample: dict[str, Any]) -> str:
    return f"{sample['state']}: {sample['drop_reason']}" if sample["drop_reason"] else str(sample["state"])


def _reward(sample: dict[str, Any]) -> str:
    return "" if sample["reward"] is None else f"{sample['reward']:.4g}"
