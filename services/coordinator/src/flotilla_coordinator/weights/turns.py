"""Has the generators leave the memory of their KV caches to the trainer on the same GPUs, and take it back.

Invariants: every generator that may get work of the run is asked, since each of them may share a GPU with a rank. One
that does not fall asleep costs the run nothing but memory: the trainer measures what is free before each pass. One that
does not wake gets no work until it has joined a weight group again, which wakes it. What was begun and not ended, by a
failure or the death of the coordinator, is ended in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights.members import GeneratorReplica
from flotilla_core import ids, rpc, telemetry
from flotilla_core.errors import FlotillaError
from flotilla_core.telemetry import names

CALL_LIMIT_S = 30.0
"""For what is cancelled and still runs, then for gigabytes of memory to be unmapped or mapped."""


class Turns:
    """The generators of one run that sleep while its trainer works."""

    def __init__(
        self,
        run_id: str,
        ready: Callable[[], list[GeneratorReplica]],
        let_go: Callable[[GeneratorReplica, FlotillaError], None],
        warn: Callable[[str], None],
    ) -> None:
        """`let_go` is called with a generator that did not wake."""
        self._run_id = run_id
        self._ready = ready
        self._let_go = let_go
        self._warn = warn
        self._asked: list[GeneratorReplica] = []
        """Those that may sleep: one whose answer was lost may have fallen asleep."""
        self._asleep: set[str] = set()

    def sleeps(self, instance_id: str) -> bool:
        """Return whether this generator was put to sleep."""
        return instance_id in self._asleep

    async def to_trainer(self) -> None:
        """Put all generators to sleep."""
        replicas = self._asked = self._ready()
        with telemetry.span(names.RL_SLEEP, attributes={names.RUN_ID: self._run_id}) as span:
            request = gen.SleepRequest(run_id=self._run_id, request_id=ids.new_request_id())
            answers = await asyncio.gather(*(_asked(one.stub.Sleep, request) for one in replicas))
            freed = 0
            for replica, answer in zip(replicas, answers, strict=True):
                if isinstance(answer, FlotillaError):
                    self._warn(f"{replica.name} keeps the memory of its KV cache during the update: {answer}")
                else:
                    self._asleep.add(replica.instance_id)
                    freed += answer.freed_bytes
            span.set_attribute(names.BYTES, freed)

    async def to_generators(self) -> None:
        """Wake them."""
        replicas, self._asked = self._asked, []
        with telemetry.span(names.RL_WAKE, attributes={names.RUN_ID: self._run_id}):
            request = gen.WakeRequest(run_id=self._run_id, request_id=ids.new_request_id())
            answers = await asyncio.gather(*(_asked(one.stub.Wake, request) for one in replicas))
        self._asleep.clear()
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, FlotillaError):
                self._let_go(replica, answer)


async def _asked(method: Any, request: Any) -> Any:
    """Return the answer of one generator, or its error."""
    try:
        return await rpc.unary(method, request, timeout_s=CALL_LIMIT_S)
    except FlotillaError as error:
        return error
