"""Where a process is right now: threads and asyncio tasks, once as text or sampled over a while.

Invariant: looking disturbs nothing; every frame is read from the interpreter's own tables.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
import time
import traceback
from types import CodeType, FrameType
from typing import Any


def format_stacks() -> str:
    """Every thread and every task of the running loop."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"--- thread {threads.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    for task in sorted(asyncio.all_tasks(), key=lambda one: one.get_name()):
        lines = "".join(traceback.format_list(_awaiting(task.get_coro())))
        parts.append(f"--- task {task.get_name()}\n{lines or '  (not started)'}")
    return "\n".join(parts)


def sample_stacks(duration_s: float, samples_per_second: int, over: threading.Event) -> str:
    """Collapsed stacks of all other threads, "thread;frame;frame count" a line, until `over` is set at the latest.

    Blocks: call it in a thread.
    """
    own = threading.get_ident()
    counts: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + duration_s
    while time.monotonic() < end and not over.is_set():
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != own:
                counts[";".join([names.get(ident, str(ident)), *_frame_names(frame)])] += 1
        over.wait(1 / samples_per_second)
    return "\n".join(f"{stack} {count}" for stack, count in counts.most_common())


def _frame_names(frame: FrameType | None) -> list[str]:
    names: list[str] = []
    while frame is not None:
        names.append(_label(frame.f_code))
        frame = frame.f_back
    return names[::-1]


def _label(code: CodeType) -> str:
    module = code.co_filename.rpartition("site-packages/")[2].rpartition("/src/")[2]
    return f"{code.co_qualname} ({module})"


def _awaiting(coroutine: Any) -> traceback.StackSummary:
    """The chain of awaits below a task, outermost first: what `Task.get_stack` leaves out."""
    frames: list[tuple[FrameType, int]] = []
    while coroutine is not None:
        frame = (
            getattr(coroutine, "cr_frame", None)
            or getattr(coroutine, "ag_frame", None)
            or getattr(coroutine, "gi_frame", None)
        )
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        coroutine = (
            getattr(coroutine, "cr_await", None)
            or getattr(coroutine, "ag_await", None)
            or getattr(coroutine, "gi_yieldfrom", None)
        )
    return traceback.StackSummary.extract(iter(frames), lookup_lines=True)
