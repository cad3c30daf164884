"""What decode_step.py measures inside vLLM's engine process: a worker extension, which also holds the weights.

With one worker it lives in the engine process, so it sees the scheduler's steps too.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from flotilla_generator.engine.vllm.worker import WeightWorker

SAMPLED_EVERY_S = 0.002
LISTED = 30


class Watch:
    """Times phases of the steps in this process, and samples the Python lines of its main thread."""

    def __init__(self, worker: Any) -> None:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCoreProc

        from flotilla_generator.engine.vllm.scheduler import RecordingScheduler

        self.seconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self.lines: collections.Counter[str] = collections.Counter()
        self.functions: collections.Counter[str] = collections.Counter()
        self._undo: list[Callable[[], None]] = []
        self._over = threading.Event()
        for owner, name, title in (
            (EngineCoreProc, "_process_engine_step", "step"),
            (Scheduler, "schedule", "schedule"),
            (type(worker), "execute_model", "execute_model"),
            (type(worker), "sample_tokens", "sample_tokens"),
            (torch.cuda.Event, "synchronize", "wait for the GPU"),
            (RecordingScheduler, "update_from_output", "update_from_output"),
            (Scheduler, "update_from_output", "of that vLLM's"),
        ):
            self._time(owner, name, title)
        self._started = time.perf_counter()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def figures(self) -> dict[str, Any]:
        """Stop, and return milliseconds a step and shares of the samples."""
        took = time.perf_counter() - self._started
        self._over.set()
        self._sampler.join()
        for undo in self._undo:
            undo()
        steps = max(self.calls["schedule"], 1)
        sampled = max(sum(self.lines.values()), 1)

        def shares(counted: collections.Counter[str]) -> dict[str, float]:
            return {name: round(count / sampled, 3) for name, count in counted.most_common(LISTED)}

        return {
            "steps": steps,
            "ms_a_step": round(1000 * took / steps, 3),
            "phases_ms": {name: round(1000 * s / steps, 3) for name, s in self.seconds.items()},
            "functions": shares(self.functions),
            "lines": shares(self.lines),
        }

    def _time(self, owner: Any, name: str, title: str) -> None:
        original, own = getattr(owner, name), name in vars(owner)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds[title] += time.perf_counter() - started
                self.calls[title] += 1

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._over.wait(SAMPLED_EVERY_S):
            frame = sys._current_frames().get(main or 0)
            if frame is not None:
                self.lines[f"{_place(frame)}:{frame.f_lineno}"] += 1
            seen = set()
            while frame is not None:
                seen.add(_place(frame))
                frame = frame.f_back
            self.functions.update(seen)


def _place(frame: Any) -> str:
    return "/".join(frame.f_code.co_filename.split("/")[-2:]) + ":" + frame.f_code.co_name


class WatchedWorker(WeightWorker):
    """The generator's worker, which can be watched; with one worker it lives in vLLM's engine process."""

    def watch_start(self) -> None:
        """Time and sample from now on."""
        self._watch = Watch(self)

    def watch_stop(self) -> dict[str, Any]:
        """Return what was seen."""
        return self._watch.figures()

    def trace_start(self) -> None:
        """Note the kernels of the GPU from now on."""
        from torch.profiler import ProfilerActivity, profile

        self._trace = profile(activities=[ProfilerActivity.CUDA])
        self._trace.start()

    def trace_stop(self) -> dict[str, Any]:
        """Return the time of each kernel, and how long the GPU was busy."""
        import torch

        torch.cuda.synchronize()
        self._trace.stop()
        spans: list[tuple[int, int]] = []
        by_name: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        for event in self._trace.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spans.append((event.time_range.start, event.time_range.end))
                by_name[event.name[:90]] += event.time_range.end - event.time_range.start
                calls[event.name[:90]] += 1
        busy, last = 0.0, float("-inf")
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
        return {
            "span_ms": round((last - min(spans)[0]) / 1000, 2) if spans else 0.0,
            "busy_ms": round(busy / 1000, 2),
            "kernels": len(spans),
            "longest_ms": {
                name: [round(us / 1000, 2), calls[name]] for name, us in by_name.most_common(LISTED)
            },
        }
