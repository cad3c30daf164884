"""The class of an environment, which begins an episode, replies to the turns of the policy, and ends it.

Invariants: one object plays one episode. It runs in a worker that holds many episodes and works for one at a time, so
what episodes share, such as an index, is loaded once into the module. Only the standard library is imported here:
workers start with this, and so do environments of users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message as chat templates know it: `role` and `content`, and `tool_call_id` of the result of a call.

The content is a text, or a `Program` whose output is the text.
"""


@dataclass(frozen=True)
class Task:
    """The data of one episode."""

    messages: list[dict[str, Any]]
    """The prompt."""
    answer: str = ""
    """The right answer; empty where the data set says nothing."""
    info: dict[str, Any] = field(default_factory=dict)
    """The other columns of the line."""
    seed: int = 0
    """Seed of all that the environment draws, so that an episode can be played again."""
    attempt: int = 1
    """Count of the beginnings of this episode."""


@dataclass(frozen=True)
class Call:
    """A call of a tool in a turn."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A response of the policy."""

    content: str
    """The text without its calls."""
    calls: tuple[Call, ...] = ()
    unparsed: str = ""
    """The reason why a call in the text could not be read; empty where all could."""
    cut: bool = False
    """True where the turn reached its most tokens before its end."""
    tokens: int = 0
    tokens_left: int = 0
    """Tokens that the rest of the episode may have."""


MOST_PROGRAM_S = 30.0
LONGEST_PROGRAM = 64 * 1024


@dataclass(frozen=True)
class Program:
    """A program of Python that the policy wrote, as the content of a message: the service runs it in a jail of its own.

    The policy reads what it printed, and its error.
    """

    code: str
    limit_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.limit_s <= MOST_PROGRAM_S:
            raise ValueError(f"limit_s of a program is above 0 and at most {MOST_PROGRAM_S:g}")
        if len(self.code) > LONGEST_PROGRAM:
            raise ValueError(f"a program has at most {LONGEST_PROGRAM:,} characters")


@dataclass(frozen=True)
class Begun:
    """The first history, to which the policy answers with its first turn."""

    messages: str | Sequence[Message]
    """Messages, or the text of one of the user's."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the policy may call: `name`, `description` and `parameters`, a JSON Schema."""
    state: str = ""
    """The state in which the first turn is asked, as text; empty where it has no name."""


@dataclass(frozen=True)
class Reply:
    """The answer of the environment to a turn."""

    messages: str | Sequence[Message] = ()
    """Messages before the next turn, or the text of one of the user's."""
    done: bool = False
    """True where the episode has ended."""
    reward: float | None = None
    """Reward of this turn; what all turns have together is added to `rewards`, under the name `turns`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the episode by name, only where it is done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the episode by name, only where it is done."""
    afresh: bool = False
    """True where `messages` replace the whole history, as after a summary."""
    state: str = ""
    """The state in which the next turn is asked, as text; empty where it has no name. The advantage `gigpo` compares
    turns that the samples of a prompt take in the same state."""


class Environment:
    """Plays one episode. The parameters of the run are the keyword arguments of `__init__`.

    What a method raises is an error of the episode, told with its file and line, and never a reward.
    """

    def begin(self, task: Task) -> Begun:
        """Return the first history."""
        raise NotImplementedError(f"{type(self).__name__} has no begin(task)")

    def reply(self, turn: Turn) -> Reply:
        """Answer a turn of the policy, or end the episode."""
        raise NotImplementedError(f"{type(self).__name__} has no reply(turn)")

    def stop(self, ending: str) -> Reply:
        """Return the rewards of an episode that gets no further turn: `max_turns` or `no_room`."""
        return Reply(done=True)

    def close(self) -> None:
        """Free what the episode holds; called once, however it ended."""
