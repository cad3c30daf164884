"""A front for one rank of a trainer: it hears of progress and of the end of a command, and asks for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ListeningFront:
    """The other side of one rank, which only listens."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def progress(self, phase: str) -> None:
        pass

    def moved(self) -> None:
        pass

    def urgent(self, kind: str, act: Callable[..., None]) -> None:
        pass

    def answer(self, command: object, fields: dict[str, Any]) -> None:
        self.done.set()

    def refuse(self, command: object, error: Exception) -> None:
        self.error = error
        self.done.set()
