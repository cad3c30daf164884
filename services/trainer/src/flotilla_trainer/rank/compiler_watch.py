"""What a rank spends in the compiler: seen from outside while it lasts, counted when it is over.

Invariant: every compilation of this process counts, also those of a backward pass and those that only a later
micro-batch needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._dynamo.callback import CallbackArgs, callback_handler

COMPILING = "compiling the layers"


class CompilerWatch:
    """Hears of every compilation from its making on."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._began = 0.0
        self._seconds = 0.0
        self._compilations = 0
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)

    def taken(self) -> dict[str, float]:
        """Metrics of what was compiled since they were asked for last; none where nothing was."""
        seconds, compilations = self._seconds, self._compilations
        self._seconds, self._compilations = 0.0, 0
        if not compilations:
            return {}
        return {"time/compile_s": seconds, "compilations": float(compilations)}

    def _begins(self, _: CallbackArgs) -> None:
        # Whoever looks sees why nothing else moves, and the watch over the ranks that this one does.
        self._progress(COMPILING)
        self._began = time.monotonic()

    def _ends(self, _: CallbackArgs) -> None:
        self._seconds += time.monotonic() - self._began
        self._compilations += 1
        self._progress("running what was compiled")
