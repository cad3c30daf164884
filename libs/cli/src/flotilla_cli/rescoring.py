"""Implements `flotilla reward score`, which gives recorded samples the rewards of other terms.

Invariants: nothing is generated. Samples are scored by the reward service's own code with what it was given when they
were drawn: texts, columns of the row, tokens, and the whole group where a reward compares. The file that comes out is
a record with all columns of the first one, of which those of rewards alone are new. A sample without a reward is left
out and counted. A file is whole or not there, and one that exists is overwritten by --force alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla_cli.completion import complete_setting
from flotilla_cli.options import RUN_FAILED, Coordinator, Json, Stack, make_folder_of
from flotilla_cli.output import print_json, print_line, say
from flotilla_cli.reward_trial import outcomes_of, rewards_and_data
from flotilla_cli.stack import ask, load_stack
from flotilla_core.errors import AlreadyExists, InvalidRequest
from flotilla_data.samples import ROLLOUTS

if TYPE_CHECKING:
    from flotilla.reward.v1.reward_pb2 import ScoreItem
    from flotilla_coordinator.data.recorded import RecordedGroups
    from flotilla_coordinator.rollouts.scoring import Outcome
    from flotilla_core.config import RunConfig, StackConfig
    from flotilla_data.rows import Row

AT_ONCE = 4096
"""The samples that a process of the reward service gets; groups are never divided."""


@dataclass
class Rescored:
    """The rewards before and after, of the samples that have one."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """The number of samples without a reward, by reason."""

    def take(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
        """Count rows, and yield those that have a reward with it."""
        from flotilla_coordinator.records.rollouts import rewarded

        for row, outcome in zip(rows, outcomes, strict=True):
            if (new := rewarded(row.values, outcome)) is None:
                self.failures[outcome.failure.partition("\n")[0]] += 1
                continue
            self.before.append(row.values["reward"])
            self.after.append(new["reward"])
            yield new

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        count = len(self.after)
        return {
            "samples": count,
            "changed": sum(old != new for old, new in zip(self.before, self.after, strict=True)),
            "mean_before": sum(self.before) / count if count else None,
            "mean_after": sum(self.after) / count if count else None,
            "left_out": dict(self.failures.most_common()),
        }


def score(
    record: Annotated[
        str, typer.Argument(metavar="FILE|RUN", help="Recorded samples, or a run that recorded its own.")
    ],
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[REWARD]... [FILE]... [key.path=value]...",
            help="Rewards by name or path.py:function; run files, whose rewards are taken; overrides.",
            autocompletion=complete_setting,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The Parquet file to write.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Score recorded samples by other rewards, into a record that runs can train on; needs no fleet and no GPU.

    Exit code 1 when a sample could not be scored.
    """
    from flotilla_coordinator.data.recorded import open_recorded
    from flotilla_coordinator.records.rollouts import write_rescored

    if output.exists() and not force:
        raise AlreadyExists(
            f"{output} would be overwritten", next_step="name another file, or overwrite by --force"
        )
    place = _place_of(record, stack, coordinator)
    config = rewards_and_data(arguments, place)
    if not config.rewards:
        raise InvalidRequest("no reward is named", next_step="name one, or a run file that has rewards")
    groups, made = open_recorded(place, config.data.split), Rescored()
    make_folder_of(output)
    write_rescored(output, _rescored(groups, config, load_stack(stack), made))
    found = {"file": str(output), "rewards": [term.shown for term in config.rewards], **made.to_json()}
    if as_json:
        print_json(found)
    else:
        _print(found)
    if made.failures:
        raise typer.Exit(RUN_FAILED)


def _place_of(record: str, stack: str | None, coordinator: str | None) -> Path:
    """Return the file or folder of a record; a name that is none on this host is a run's."""
    if os.path.exists(record) or "*" in record:
        return Path(record).absolute()
    run = ask(lambda client: client.get_run(record), stack, coordinator)
    place = Path(run.directory) / ROLLOUTS
    if not place.is_dir():
        raise InvalidRequest(
            f"run {run.run_id} recorded no samples",
            where=str(place),
            next_step="runs with rollout.record do; or name a file",
        )
    return place


def _rescored(
    groups: RecordedGroups, config: RunConfig, stack: StackConfig, made: Rescored
) -> Iterator[dict[str, Any]]:
    """Yield the rows with their new rewards."""
    part: list[Row] = []
    for _, rows in groups.written(range(groups.rows)):
        if part and len(part) + len(rows) > AT_ONCE:
            yield from made.take(part, _outcomes(part, config, stack))
            part = []
        part += rows
    yield from made.take(part, _outcomes(part, config, stack))


def _outcomes(rows: Sequence[Row], config: RunConfig, stack: StackConfig) -> list[Outcome]:
    """Score rows of whole groups."""
    from flotilla_coordinator.data.recorded_rows import prompt_of
    from flotilla_coordinator.rollouts.scoring import score_item, weigh

    items: list[ScoreItem] = []
    for group, own in groupby(rows, key=lambda row: str(row.values["group_id"])):
        prompt = prompt_of(0, list(own))
        for one in prompt.recorded:
            name = str(len(items))
            items.append(score_item(name, prompt, one.text, group=group, token_ids=one.token_ids))
    scored = outcomes_of(config.rewards, items, None, stack)
    return [weigh(config.rewards, one, config.reward_mode) for one in scored]


def _print(found: dict[str, Any]) -> None:
    print_line(f"{found['file']}: {found['samples']} samples by {', '.join(found['rewards'])}")
    if found["samples"]:
        say(
            f"mean reward {found['mean_before']:.4g} -> {found['mean_after']:.4g}; "
            f"{found['changed']} rewards changed"
        )
    for why, count in found["left_out"].items():
        say(f"{count} samples are left out, because they have no reward: {why}")
