"""The records that the ledger takes and returns, and the reasons for which samples are dropped.

Invariants: the numbers of the states are those of the coordinator's contract; arrays are the generator's own token ids
(int32) and log-probabilities (float32), stored byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger.verdicts import TermVerdict
from flotilla_core.version import Version

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]
    BoolArray = npt.NDArray[np.bool_]

START = Version(0, 0)


class DropReason(StrEnum):
    """The reason why a sample was dropped from its run, by its name on disk and on the wire."""

    RUN_ENDED = "run_ended"
    RUN_INTERRUPTED = "run_interrupted"
    UPDATE_SKIPPED = "update_skipped"
    CRITIC_ONLY = "critic_only"
    STALE = "stale"
    """The sample was older than its bound when its update came; a repeated step generates it again."""
    UNIFORM = "uniform"
    """All rewards of the group were equal; it stays out, however often its step is repeated."""
    TAIL = "tail"
    """The batch was full before the sample ended, and it would be too old for the next one."""
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    UNVERIFIABLE = "unverifiable"
    """The response made a verifier fail, and its run drops such a sample (`on_unverifiable: drop`)."""
    GROUP_TOO_SMALL = "group_too_small"
    ENVIRONMENT_ERROR = "environment_error"
    """The environment of an episode failed, so the episode has no reward."""
    ENVIRONMENT_TIMEOUT = "environment_timeout"


REOPENED = (
    DropReason.RUN_ENDED,
    DropReason.RUN_INTERRUPTED,
    DropReason.UPDATE_SKIPPED,
    DropReason.CRITIC_ONLY,
    DropReason.STALE,
)
"""Reasons that concern the run and not the sample: a run that continues may train the sample after all."""

REWARD_FAILURES = (
    DropReason.REWARD_ERROR,
    DropReason.REWARD_TIMEOUT,
    DropReason.ENVIRONMENT_ERROR,
    DropReason.ENVIRONMENT_TIMEOUT,
)
"""Reasons of a failing reward, whether terms or an environment should have given it."""

REWARDS_FAILED = (*REWARD_FAILURES, DropReason.GROUP_TOO_SMALL)
"""Reasons of a failing reward; the last one is for the siblings of a sample that it failed on."""


class SampleState(IntEnum):
    """The state of a sample on its way into training."""

    ISSUED = 1
    GENERATED = 2
    SCORED = 3
    CONSUMED = 4
    DURABLE = 5
    DROPPED = 6


class RunState(IntEnum):
    """The state of a run."""

    PENDING = 1
    RUNNING = 2
    PAUSED = 3
    STOPPING = 4
    SUCCEEDED = 5
    STOPPED = 6
    FAILED = 7

    @property
    def ended(self) -> bool:
        """Return whether nothing will happen to the run any more."""
        return self in (RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED)

    @property
    def resumable(self) -> bool:
        """Return whether it ended before its last step."""
        return self in (RunState.STOPPED, RunState.FAILED)


@dataclass(frozen=True)
class TokenSpan:
    """The tokens [start, end) of a response that one policy version generated."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True)
class GroupIssue:
    """One prompt whose samples are about to be generated."""

    run_id: str
    group_id: str
    sample_ids: tuple[str, ...]
    step: int
    attempt: int
    prompt_text: str
    prompt_token_ids: Int32Array
    max_staleness: int | None = None
    """The staleness bound by which it is admitted, where there is one."""


@dataclass(frozen=True)
class AdmittedGroup:
    """One prompt whose samples were admitted before."""

    step: int
    """The step that it counts for."""
    group_id: str
    prompt_token_ids: Int32Array
    max_staleness: int | None
    """The staleness bound by which it was admitted; an older Flotilla did not record it."""


@dataclass(frozen=True)
class GroupOutcome:
    """The outcome of the answers to one prompt."""

    group_id: str
    solved: bool
    """True where every scored answer was right."""
    reward: float
    """The mean of the scored answers."""


@dataclass(frozen=True)
class Branch:
    """A sequence of an episode: a prompt, and where what follows it begins among the tokens of the sample."""

    start: int
    prompt_token_ids: Int32Array


@dataclass(frozen=True)
class Episode:
    """A sample of several turns, beyond what each sample has.

    Its tokens and their columns are those of all its sequences, one after the other.
    """

    ending: str
    """`completed`, `max_turns`, `no_room`, `timeout` or `error`."""
    turns: int
    turn_rewards: tuple[float, ...]
    """The reward of each turn; none where the environment gave none."""
    messages: str
    """The conversation as JSON, to be shown."""
    branches: tuple[Branch, ...]
    """Its sequences: the first one starts at 0, and each further one is a history that does not go on from an earlier
    one."""
    turn_ends: tuple[int, ...] = ()
    """The place after the last token of each turn, 0 of one without tokens; none where no turn has a reward or a state,
    and in a record of an older Flotilla."""
    turn_states: tuple[int, ...] = ()
    """A number for each turn, equal where it was asked in the same state, 0 where that has no name; none where no turn
    has one."""

    def shown(self) -> dict[str, Any]:
        """Return it as records for people have it."""
        return {
            "ending": self.ending,
            "turns": self.turns,
            "turn_rewards": [*self.turn_rewards],
            "branches": len(self.branches),
            "messages": json.loads(self.messages),
        }

    @property
    def nbytes(self) -> int:
        """Return the size of its prompts."""
        return sum(branch.prompt_token_ids.nbytes for branch in self.branches)


@dataclass
class FinishedSample:
    """A finished response, scored or not, with all data that training needs."""

    sample_id: str
    token_ids: Int32Array
    logprobs: Float32Array | None
    """Each token's log-probability under the version that generated it; given answers have none, and are in no ledger.
    """
    text: str
    spans: tuple[TokenSpan, ...] = ()
    truncated: bool = False
    generator: str = ""
    attempt: int = 0
    reward: float = 0.0
    reward_terms: tuple[float, ...] = ()
    """The value of each term of the reward."""
    greedy_reward: float | None = None
    """The reward of the greedy response to its prompt, where the run compares with it."""
    trained: BoolArray | None = None
    """The tokens that are trained, the others being context; None where all are."""
    verdicts: tuple[TermVerdict, ...] = ()
    """How each reward judged it; none where an older Flotilla recorded it."""
    episode: Episode | None = None
    """What it has in addition where an environment was in the loop."""

    @property
    def oldest_version(self) -> Version | None:
        """Return the oldest version that generated any of its tokens."""
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True)
class TurnRecord:
    """A turn of an episode that has not ended."""

    sample_id: str
    number: int
    """The turns before it."""
    beginning: int
    """A number of its own for each beginning of the episode."""
    attempt: int
    """As its sample counts them."""
    asked: bytes
    """The digest of what the environment asked with."""
    token_ids: Int32Array
    logprobs: Float32Array
    spans: tuple[TokenSpan, ...]
    text: str
    truncated: bool
    generator: str


@dataclass(frozen=True)
class Recorded:
    """The result of a delivery."""

    accepted: tuple[str, ...]
    """Samples that changed their state."""
    duplicates: tuple[str, ...] = ()
    """Samples that had been delivered before; they are unchanged."""
    late: tuple[str, ...] = ()
    """Samples that had been dropped before; they are unchanged."""


@dataclass(frozen=True)
class VoidedUpdate:
    """An update that a trainer's fall-back undid, with its samples in the order of their training."""

    update_id: str
    version: Version
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class SampleRecord:
    """One sample as recorded; its payload fields are empty before generation and after pruning."""

    sample_id: str
    group_id: str
    state: SampleState
    attempt: int
    step: int
    position: int
    """The order of the sample in the ledger; pass it as `after` to read on."""
    generator: str = ""
    reward: float | None = None
    truncated: bool = False
    drop_reason: str = ""
    """A `DropReason`, or one of an older Flotilla."""
    update_id: str = ""
    prompt_text: str = ""
    prompt_token_ids: Int32Array | None = None
    text: str = ""
    token_ids: Int32Array | None = None
    logprobs: Float32Array | None = None
    spans: tuple[TokenSpan, ...] = ()
    reward_terms: tuple[float, ...] = ()
    greedy_reward: float | None = None
    trained: BoolArray | None = None
    verdicts: tuple[TermVerdict, ...] = ()
    episode: Episode | None = None
    turns: tuple[TurnRecord, ...] = ()
    """The turns so far of an episode that has not ended."""


@dataclass(frozen=True)
class RunRecord:
    """One run as recorded."""

    run_id: str
    name: str
    state: RunState
    config_yaml: str
    directory: str
    created_at: float
    ended_at: float | None = None
    reason: Finding = field(default_factory=Finding)
    """The reason why it failed or was stopped; empty where there is none."""
    step: int = 0
    """The number of steps done."""
    version: Version = START
    cursor: dict[str, Any] | None = None
    """The place in the data set after the last recorded step."""
