"""Implements `flotilla env replay`, which plays a recorded episode again, turn by turn, and says where it diverges.

Invariants: the environment gets what it got when the episode was played: the row of its prompt, the seed, and the turns
of the policy as they were. Nothing is generated, and nothing of the run is written. What the environment says is
compared with the record before each turn, and its ending and its rewards at the end; the first difference ends the
replay.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_cli.completion import RunId
from flotilla_cli.env_trial import line_of, played
from flotilla_cli.options import RUN_FAILED, Coordinator, Json, Stack
from flotilla_cli.output import print_json, print_line
from flotilla_cli.stack import ask, load_stack
from flotilla_core import ids
from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import InvalidRequest, NotFound
from flotilla_data.samples import ROLLOUTS

if TYPE_CHECKING:
    from flotilla_coordinator.data.prompts import Prompt, RecordedSample
    from flotilla_coordinator.rollouts.episode_messages import Ended

FACTS = frozenset({"turn", "tokens", "versions", "cut_off", "unparsed", "state", "thread"})
"""The keys of an entry that are no part of its message."""


def replay(
    run: RunId,
    sample: Annotated[
        str, typer.Argument(metavar="SAMPLE", help="Id of a sample, as flotilla samples shows it.")
    ],
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Play a recorded episode again, by the turns that the policy wrote; needs no fleet and no GPU.

    Exit code 1 when the environment says something else than it did.
    """
    of_run = ask(lambda client: client.get_run_and_config(run), stack, coordinator)
    config = load_text(RunConfig, of_run.config_yaml, source=f"run {of_run.run.run_id}")
    if config.environment is None:
        raise InvalidRequest(f"run {of_run.run.run_id} has no environment", where=sample)
    prompt, episode = _recorded(Path(of_run.run.directory), sample)
    again = Replayed(_entries(episode), quiet=as_json)
    start = _start(config, of_run.run.run_id, sample, prompt)
    ended = played(start, load_stack(stack).environment.isolation.model_dump_json(), again.reply)
    again.compare_end(ended)
    if as_json:
        print_json(
            {"sample_id": sample, "turns": again.turns, "equal": not again.differs, "differs": again.differs}
        )
    else:
        print_line(again.differs or f"\nequal: {again.turns} turns, their ending and their rewards")
    if again.differs:
        raise typer.Exit(RUN_FAILED)


def _recorded(directory: Path, sample_id: str) -> tuple[Prompt, RecordedSample]:
    """Return the prompt and the episode of a sample that its run recorded."""
    from flotilla_coordinator.data.recorded import open_recorded
    from flotilla_coordinator.data.recorded_rows import prompt_of

    record = directory / ROLLOUTS
    if not record.is_dir():
        raise NotFound(
            "the run recorded no samples", where=str(record), next_step="runs with rollout.record do"
        )
    groups = open_recorded(record, "train")
    for number, rows in groups.written(range(groups.rows)):
        for place, row in enumerate(rows):
            if row.values["sample_id"] == sample_id:
                prompt = prompt_of(number, rows)
                return prompt, prompt.recorded[place]
    raise NotFound(f"sample {sample_id} is not recorded", where=str(record))


def _entries(episode: RecordedSample) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(episode.messages or "[]")
    if not entries:
        raise InvalidRequest("the sample is no episode")
    return entries


def _start(config: RunConfig, run_id: str, sample_id: str, prompt: Prompt) -> pb.EpisodeStart:
    """Return the start of the episode as the run made it."""
    from flotilla_coordinator.rollouts.episode_messages import message_of
    from flotilla_coordinator.rollouts.episodes import ENVIRONMENT

    assert config.environment is not None, "checked"
    world = sample_id.rpartition("/")[0].partition("/")[2]
    messages = prompt.chat or [{"role": "user", "content": prompt.prompt_text}]
    start = pb.EpisodeStart(
        run_id=run_id,
        episode_id=sample_id,
        attempt=1,
        messages=[message_of(one) for one in messages],
        answer=prompt.answer,
        seed=ids.derive_seed(config.seed, ENVIRONMENT, world),
    )
    start.environment.environment = config.environment.name
    start.environment.trusted = config.environment.trusted
    start.environment.parameters.update(config.environment.parameters)
    start.info.update(prompt.info)
    start.call_limit.FromMilliseconds(int(config.environment.call_timeout_s * 1000))
    return start


@dataclass
class Replayed:
    """The comparison so far."""

    entries: list[dict[str, Any]]
    """The rest of the recorded conversation."""
    quiet: bool
    turns: int = 0
    """The turns that were played again."""
    differs: str = ""
    """The first difference; empty where there is none."""
    _histories: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def reply(self, request: pb.TurnAsked) -> pb.RunEpisodeRequest:
        """Compare what is said before a turn; return the turn, or the end of the episode where it ended."""
        from flotilla_coordinator.rollouts.episode_messages import asked_of, message_of

        asked = asked_of(request)
        before = self._histories[asked.thread]
        history: list[dict[str, Any]] = [*([] if asked.afresh else before), *asked.messages]
        kept = 0
        while kept < min(len(before), len(history)) and before[kept] == history[kept]:
            kept += 1
        # What was said before a turn that there was no room for is not on record.
        if "ended" not in self.entries[0]:
            self._compare(history[kept:])
        if self.differs or "ended" in self.entries[0]:
            return self._stop()
        entry = self.entries.pop(0)
        said = {name: value for name, value in entry.items() if name not in FACTS}
        self._histories[asked.thread] = [*history, said]
        self.turns += 1
        if not self.quiet:
            print_line(f"{line_of(message_of(said))}  [turn {self.turns}]")
        return pb.RunEpisodeRequest(
            written=pb.TurnWritten(
                message=message_of(said),
                finish=pb.TURN_FINISH_LENGTH if entry.get("cut_off") else pb.TURN_FINISH_STOP,
                tokens=entry.get("tokens", 0),
                unparsed=entry.get("unparsed", ""),
            )
        )

    def compare_end(self, end: pb.EpisodeEnded) -> None:
        """Compare how the episode ended, and its rewards."""
        from flotilla_coordinator.rollouts.episode_messages import ended_of

        if self.differs:
            return
        ended, recorded = ended_of(end), self.entries[0]
        if "ended" not in recorded:
            self.differs = f"it ended after {self.turns} turns ({ended.ending}), and goes on in the record"
            return
        for name, was, now in _compared(recorded, ended):
            if was != now:
                self.differs = f"at the end: {name} was {was}, and is {now}"
                return

    def _compare(self, spoken: list[dict[str, Any]]) -> None:
        recorded = []
        while self.entries and "turn" not in self.entries[0] and "ended" not in self.entries[0]:
            entry = self.entries.pop(0)
            if "role" in entry:
                recorded.append({name: value for name, value in entry.items() if name not in FACTS})
        for message in () if self.quiet else spoken:
            print_line(f"{message['role']}: {message['content']}")
        if recorded != spoken:
            at = 0
            while at < min(len(recorded), len(spoken)) and recorded[at] == spoken[at]:
                at += 1
            was, now = (one[at] if at < len(one) else "nothing" for one in (recorded, spoken))
            self.differs = f"before turn {self.turns + 1} the environment said {was}, and says {now}"

    def _stop(self) -> pb.RunEpisodeRequest:
        """End the episode as the run ended it; a record that goes on otherwise is a difference."""
        ending = self.entries[0].get("ended", "") if self.entries else ""
        if not self.differs and ending not in ("max_turns", "no_room"):
            self.differs = f"it asks for turn {self.turns + 1}, where the recorded episode ended ({ending})"
        how = pb.ENDING_NO_ROOM if ending == "no_room" else pb.ENDING_MAX_TURNS
        return pb.RunEpisodeRequest(stop=pb.EpisodeStop(ending=how))


def _compared(recorded: Mapping[str, Any], ended: Ended) -> list[tuple[str, Any, Any]]:
    return [
        ("the ending", recorded["ended"], ended.ending),
        ("the rewards", recorded.get("rewards", {}), ended.rewards),
        ("the rewards of turns", recorded.get("turn_rewards", []), [*ended.turn_rewards]),
    ]
