"""The turns of one episode, kept so that they can be played again where its world was lost.

Invariants: what the policy sampled is never sampled again while the environment says the same. A turn is recorded once
its versions have passed their live check, and never where a generator wrote it with wrong weights; so what is played
again after the coordinator's death needs no check any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import TurnRecord
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_core.version import Version


class SaysOtherwiseError(Exception):
    """An environment did not say the same to turns that were played again: to us, or to the replica it runs on."""


class TurnLog:
    """Records turns of episodes that have not ended."""

    def __init__(
        self,
        ledger: Ledger,
        is_verified: Callable[[Version], bool],
        is_void: Callable[[RolloutSample], bool],
    ) -> None:
        self._ledger = ledger
        self._is_verified = is_verified
        self._is_void = is_void

    def take(self, turns: PlayedTurns) -> None:
        """Record the turns that may be recorded by now."""
        for number in range(turns.recorded, len(turns.played)):
            turn = turns.played[number]
            piece = turn.piece
            if not all(self._is_verified(span.version) for span in piece.spans) or self._is_void(piece):
                return  # One after it would not be played again without it.
            turns.recorded = number + 1
            assert piece.logprobs is not None, "the policy sampled it"
            self._ledger.turn_written(
                TurnRecord(
                    turns.sample_id,
                    number,
                    turns.beginning,
                    turns.attempt,
                    turn.asked,
                    piece.token_ids,
                    piece.logprobs,
                    piece.spans,
                    piece.text,
                    piece.truncated,
                    piece.generator,
                )
            )


@dataclass(frozen=True)
class _Turn:
    asked: bytes
    """The digest of what the environment asked with."""
    piece: RolloutSample


class PlayedTurns:
    """The turns of an episode, in its present attempt."""

    def __init__(self, sample_id: str, recorded: Sequence[TurnRecord], log: TurnLog | None) -> None:
        self.sample_id = sample_id
        self._log = log
        self.attempt = recorded[0].attempt if recorded else 0
        self.beginning = recorded[0].beginning if recorded else time.time_ns()
        self.played = [_Turn(turn.asked, _piece(turn)) for turn in recorded]
        self.recorded = len(recorded)

    def begin_anew(self) -> None:
        """Forget the turns: the next attempt has its own."""
        self.attempt += 1
        self.beginning = time.time_ns()
        self.played, self.recorded = [], 0

    def again(self, number: int, asked: bytes) -> RolloutSample | None:
        """Return the turn of this number, where there is one; raise where it was not asked for in this way."""
        if number >= len(self.played):
            return None
        if self.played[number].asked != asked:
            raise SaysOtherwiseError
        return self.played[number].piece

    def add(self, asked: bytes, piece: RolloutSample) -> None:
        """Take the next turn."""
        self.played.append(_Turn(asked, piece))
        if self._log is not None:
            self._log.take(self)


def may_go_on(turns: Sequence[TurnRecord], version: Version, oldest_step: int) -> bool:
    """Return whether recorded turns may be trained with what is written from `version` on.

    They are of its lineage, and none is older than the version of `oldest_step`.
    """
    versions = [span.version for turn in turns for span in turn.spans]
    return all(one.lineage == version.lineage and one.step >= oldest_step for one in versions)


def _piece(turn: TurnRecord) -> RolloutSample:
    return RolloutSample(
        sample_id=f"{turn.sample_id}/{turn.number}",
        token_ids=np.asarray(turn.token_ids),
        logprobs=np.asarray(turn.logprobs),
        text=turn.text,
        spans=turn.spans,
        truncated=turn.truncated,
        generator=turn.generator,
    )
