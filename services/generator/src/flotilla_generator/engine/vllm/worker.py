"""The code that runs inside each vLLM worker process.

Loaded by vLLM as `worker_extension_cls`: `WeightWorker` is mixed into vLLM's worker, and its methods are called through
`collective_rpc`. Invariants: no method raises and none waits for a peer, because an exception under tensor parallelism,
or a timed-out call, leaves a stale answer queued that the next call would take for its own; transfers run on a thread,
which tells the service by a datagram how it has ended, and are asked about with `flotilla_status`. Answers are plain
dictionaries, and an error has the `reason` of its kind.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import Exhausted, FlotillaError, Internal
from flotilla_generator.engine.vllm.end_notices import Answer, tell
from flotilla_generator.engine.vllm.kv_memory import KvMemory
from flotilla_generator.engine.vllm.live_weights import Exchange, Following, LiveModel, Loader
from flotilla_generator.engine.vllm.parent_watch import end_with_the_service
from flotilla_weights.group import Receiver
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Manifest

NO_FAULT: Answer = {"error": ""}
GIVEN_UP = "the check was given up"
SEEDS = 1 << 63
PROOF_SLICE_S = 0.005
"""The time that decoding waits for a piece of the proof."""
SHORT_SWITCH_S = 0.0005
"""The time that the decoder may keep Python's interpreter from a transfer, which wants it at every launch and
message."""
USUAL_SWITCH_S = sys.getswitchinterval()

# vLLM imports this module in every worker before it opens its message queues and loads the model.
end_with_the_service()


class WorkerWeights:
    """Group membership and staging of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.live = LiveModel(Loader(worker))
        self._receiver: Receiver | None = None
        self.thread: threading.Thread | None = None
        self._busy = False
        self._fault: Answer = NO_FAULT
        self._inbox: Inbox | None = None
        self._next: Following | None = None
        self._checked: Answer = {}
        self.kv_memory = KvMemory(worker)

    def join(self, ticket: bytes, group: bytes, rank_offset: int, manifest: bytes) -> None:
        """Start to enter a group, in place of any other one; its end is told to who gave the `ticket`."""
        self.drop("a newer epoch was joined")
        described = Manifest.from_proto(weights_pb2.WeightManifest.FromString(manifest))
        receiver = Receiver(
            weights_pb2.WeightGroup.FromString(group),
            rank_offset + self._worker.rank,
            described,
            self._worker.device,
        )
        self.live.expect(described)
        self._receiver, self._inbox = receiver, Inbox(receiver, described)
        self.run_aside(receiver.connect, ticket)

    def stage(self, ticket: bytes, in_place: bool) -> None:
        """Start to receive one publication, and to prepare what can be done before decoding is paused.

        It arrives `in_place` where decoding is paused already, and the model takes its weights by copies.
        """
        inbox = self._inbox
        if inbox is None:
            raise RuntimeError("no weight group was joined")
        self.live.expect_in_place(in_place)

        def receive() -> None:
            filling = self.live.begin()
            # The first version in place is staged, and the plan has no memory of the GPU for a second copy.
            inbox.receive(keep=None if filling is None else filling.put, on_host=in_place)
            staged = inbox.take()
            if filling is not None:
                prepared: Following = self.live.fill(filling, staged, inbox.told)
            else:
                assert staged is not None, "just received"
                prepared = self.live.prepare(staged, seed=sum(inbox.digests) % SEEDS)
            if self._inbox is inbox:
                self._next = prepared

        self._next = None
        self.run_aside(receive, ticket)

    def status(self) -> Answer:
        """Return whether a transfer runs, how far it is, how it ended."""
        inbox, following = self._inbox, self._next
        return {
            "rank": self._worker.rank,
            "busy": self._busy,
            "proved": not isinstance(following, Exchange) or following.proved,
            **self._fault,
            "buckets": 0 if inbox is None else inbox.buckets_received,
            "digests": [] if inbox is None else inbox.digests,
            "live": self._checked,
        }

    def prove(self) -> Answer:
        """Go on with the proof of what was staged, for a little while."""
        following = self._next
        return {"proved": not isinstance(following, Exchange) or following.prove(PROOF_SLICE_S)}

    def apply(self) -> Answer:
        """Make what was staged live; the engine is paused."""
        following, self._next = self._next, None
        if following is None:
            return {"error": "nothing is staged", "broken": False}
        return following.replace()

    def check(self, ticket: bytes) -> None:
        """Start to compare the memory that decodes with what was committed; decoding goes on."""

        def compare() -> None:
            self._checked = self.live.check()

        self._checked = {"tensors": 0, "unchecked": GIVEN_UP, "faults": [], "copies_s": 0.0}
        self.run_aside(compare, ticket)

    def stacks(self) -> Answer:
        """Return the stack of every thread of this process."""
        frames = sys._current_frames().items()
        text = "\n".join(
            f"thread {ident}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
        )
        return {"rank": self._worker.rank, "pid": os.getpid(), "text": text}

    def use_kernels(self) -> None:
        """Take log-probabilities from a kernel of ours, where vLLM's are slow; only on GPUs."""
        from flotilla_generator.engine.vllm.token_logprobs import use_in_vllm

        use_in_vllm(self._worker.device)

    def drop(self, why: str) -> None:
        """Leave the group; the thread of a transfer in progress ends by itself."""
        busy, self._busy = self._busy, False
        receiver, self._receiver, self.thread = self._receiver, None, None
        self._inbox, self._next, self._fault = None, None, NO_FAULT
        if receiver is not None:
            # On a thread: telling the others asks the sender's store, which may hang with its process.
            leave = partial(receiver.abort, why) if busy else receiver.close
            threading.Thread(target=leave, name="weights-leave", daemon=True).start()

    def run_aside(self, work: Callable[[], None], ticket: bytes) -> None:
        self._fault, self._busy = NO_FAULT, True
        receiver = self._receiver

        def guarded() -> None:
            _leave_the_decoder_its_cores()
            sys.setswitchinterval(SHORT_SWITCH_S)
            try:
                work()
            # The end of a thread: reported by `status`, never raised in a worker.
            except Exception as error:  # noqa: BLE001
                if self._receiver is receiver:
                    self._fault = _fault(error)
            finally:
                sys.setswitchinterval(USUAL_SWITCH_S)
            if self._receiver is receiver:
                self._busy = False
                tell(ticket, {"error": "", **self.status()})

        self.thread = threading.Thread(target=guarded, name="weight-transfer", daemon=True)
        self.thread.start()


def _answering(call: Callable[..., Answer | None]) -> Callable[..., Answer]:
    """Return a method of `WeightWorker` that answers with what a call of its `WorkerWeights` says."""

    def method(worker: WeightWorker, *arguments: Any) -> Answer:
        return worker._flotilla_guarded(lambda weights: call(weights, *arguments))

    return method


class WeightWorker:
    """Methods that vLLM adds to its worker, by names that it has not."""

    flotilla_join = _answering(WorkerWeights.join)
    flotilla_stage = _answering(WorkerWeights.stage)
    flotilla_status = _answering(WorkerWeights.status)
    flotilla_prove = _answering(WorkerWeights.prove)
    flotilla_apply = _answering(WorkerWeights.apply)
    flotilla_check = _answering(WorkerWeights.check)
    flotilla_drop = _answering(WorkerWeights.drop)
    flotilla_sleep = _answering(lambda weights: {"freed": weights.kv_memory.give_back()})
    flotilla_wake = _answering(lambda weights: weights.kv_memory.take_again())
    flotilla_use_kernels = _answering(WorkerWeights.use_kernels)
    flotilla_stacks = _answering(WorkerWeights.stacks)

    def _flotilla_guarded(self, call: Callable[[WorkerWeights], Answer | None]) -> Answer:
        weights = getattr(self, "_flotilla_weights", None)
        try:
            if weights is None:
                weights = self._flotilla_weights = WorkerWeights(self)
            return {"error": "", **(call(weights) or {})}
        # The boundary of a worker call: raising would poison vLLM's answer queue.
        except Exception as error:  # noqa: BLE001
            return _fault(error)


def _leave_the_decoder_its_cores() -> None:
    """Let this thread run on any core: it inherited the main thread's CPU pin and would compete with the decoder."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _fault(error: Exception) -> Answer:
    """Return the error with its reason: only the failure of a group is not this worker's own fault."""
    if isinstance(error, FlotillaError):
        return {"error": str(error), "reason": error.reason}
    full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return {"error": f"{type(error).__name__}: {error}", "reason": (Exhausted if full else Internal).reason}
