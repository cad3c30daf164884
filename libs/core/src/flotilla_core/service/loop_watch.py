"""Notices an event loop that does not run.

Invariant: it reports while the loop is blocked, from a thread of its own, with the stack that blocks it; nothing
that the loop itself would do (answer a call, write a span) could tell then.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

_LOOK_EVERY_S = 0.5
BLOCKED_AFTER_S = 3.0

logger = structlog.get_logger()


class LoopWatch:
    """Watches the running loop until `stop`."""

    def __init__(self, *, blocked_after_s: float = BLOCKED_AFTER_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._blocked_after_s = blocked_after_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            answered = threading.Event()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if answered.wait(self._blocked_after_s):
                continue
            frame = sys._current_frames().get(self._loop_thread)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            logger.warning("the event loop is blocked", for_s=self._blocked_after_s, stack=stack)
            while not answered.wait(_LOOK_EVERY_S):
                if self._stopping.is_set():
                    return
            logger.warning("the event loop runs again", blocked_s=round(time.monotonic() - asked, 1))
