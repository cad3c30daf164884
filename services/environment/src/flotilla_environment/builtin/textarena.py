"""Games of TextArena for one player.

TextArena is the user's: `pip install 'flotilla[textarena]'` beside the service. Invariant: its games draw from the
generator of the module `random`, so each episode has a state of it of its own, in which its methods work.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from flotilla_environment.environment import Begun, Environment, Reply, Task, Turn


class TextArena(Environment):
    """A game of TextArena for one player: reward `score` is that of the game, at most 1 for a win."""

    def __init__(self, id: str, *, options: dict[str, Any] | None = None) -> None:
        """`id` is that of the game, such as GuessTheNumber-v0; `options` change its registered settings."""
        try:
            arena = import_module("textarena")
        except ImportError as error:
            raise ModuleNotFoundError(
                f"TextArena is not here: {sys.executable} -m pip install 'flotilla[textarena]' beside the service"
            ) from error
        # The raw form tells what is new since the last turn; the other one repeats the whole game.
        self._game: Any = arena.make(id if id.endswith("-raw") else f"{id}-raw", **(options or {}))
        self._random: Any = None

    def begin(self, task: Task) -> Begun:
        seed = int(task.info.get("seed", task.seed))
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
            return Begun(self._shown())

    def reply(self, turn: Turn) -> Reply:
        with self._own_random():
            done, _ = self._game.step(turn.content)
            return self._ended() if done else Reply(self._shown())

    def stop(self, ending: str) -> Reply:
        return Reply(done=True, rewards={"score": 0.0}, metrics={"steps": float(self._game.state.turn)})

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)

    def _shown(self) -> str:
        """Return what the game said since the last turn, without what the policy wrote itself."""
        player, said = self._game.get_observation()
        return "\n\n".join(str(text) for speaker, text, _ in said if speaker != player) or "Your turn."

    def _ended(self) -> Reply:
        rewards, about = self._game.close()
        metrics = {"steps": float(about[0]["turn_count"]), "invalid_move": float(about[0]["invalid_move"])}
        return Reply(done=True, rewards={"score": float(rewards[0])}, metrics=metrics)
