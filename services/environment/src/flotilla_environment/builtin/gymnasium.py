"""Environments of Gymnasium that show themselves as text, such as those of `toy_text`.

Gymnasium is the user's: `pip install 'flotilla[gymnasium]'` beside the service.
"""

from __future__ import annotations

import json
import re
import sys
from hashlib import blake2b
from importlib import import_module
from typing import Any

from flotilla_environment.environment import Begun, Environment, Reply, Task, Turn

HIGHLIGHTED = re.compile(r"\x1b\[(?:\d+;)*4\dm(.*?)\x1b\[0m")
"""The places that a game marks by a background, such as that of the player."""
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
LONGEST_STATE = 200
"""The most characters of a state that is told as it is; of a longer one equal digests say as much."""


def state_of(seen: Any) -> str:
    """Return an observation as text, a long one as its digest; empty where it has none that tells it from others."""
    try:
        text = json.dumps(seen, default=lambda one: one.tolist(), sort_keys=True)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return ""
    return text if len(text) <= LONGEST_STATE else blake2b(text.encode(), digest_size=16).hexdigest()


class Gymnasium(Environment):
    """An environment of Gymnasium with discrete actions and text: reward `return` is the sum of its rewards."""

    def __init__(
        self,
        id: str,
        *,
        actions: list[str] | None = None,
        rules: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        """`actions` names the actions in their order; without names they are numbers."""
        try:
            gymnasium = import_module("gymnasium")
        except ImportError as error:
            raise ModuleNotFoundError(
                f"Gymnasium is not here: {sys.executable} -m pip install 'flotilla[gymnasium]' beside the service"
            ) from error
        self._game = gymnasium.make(id, render_mode="ansi", **(options or {}))
        self._actions = actions or [str(number) for number in range(int(self._game.action_space.n))]
        self._rules = rules or f"{id}: answer with one action a turn."
        self._find = re.compile(rf"\b({'|'.join(map(re.escape, self._actions))})\b", re.IGNORECASE)
        self._sum, self._steps = 0.0, 0
        self._state = ""

    def begin(self, task: Task) -> Begun:
        seen, _ = self._game.reset(seed=int(task.info.get("seed", task.seed)) % 2**31)
        self._state = state_of(seen)
        rules = f"{self._rules} Actions: {', '.join(self._actions)}."
        return Begun(f"{rules}\n\n{self._shown()}", state=self._state)

    def reply(self, turn: Turn) -> Reply:
        found = self._find.findall(turn.content)
        if not found:
            return Reply(f"No action was found in your answer.\n\n{self._shown()}", state=self._state)
        names = [name.casefold() for name in self._actions]
        seen, reward, terminated, truncated, _ = self._game.step(names.index(found[-1].casefold()))
        self._sum, self._steps = self._sum + float(reward), self._steps + 1
        self._state = state_of(seen)
        return self._ended() if terminated or truncated else Reply(self._shown(), state=self._state)

    def stop(self, ending: str) -> Reply:
        return self._ended()

    def close(self) -> None:
        self._game.close()

    def _ended(self) -> Reply:
        return Reply(done=True, rewards={"return": self._sum}, metrics={"steps": self._steps})

    def _shown(self) -> str:
        return TERMINAL.sub("", HIGHLIGHTED.sub(r"[\1]", str(self._game.render()))).strip()
