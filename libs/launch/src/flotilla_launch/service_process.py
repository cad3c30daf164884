"""One supervised process: a slot of the stack and the child that fills it now.

Invariants: the child is READY only when its own gRPC health says so at the address that it announced itself. At any
time at most one child of a slot lives. Before the next one starts, and after the last one, every process that
descends from the former is gone, with what it left in shared memory. `record` tells the next launcher enough to
continue from any point.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict

from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core.disk import lacks_room
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, FlotillaError, Internal
from flotilla_core.logger import get_logger
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.subprocess_group import UNKNOWN_STATUS
from flotilla_core.trust import Credential
from flotilla_launch import shared_memory
from flotilla_launch.child import Child, RestartBudget, new_mark
from flotilla_launch.environment import Variables, resolved
from flotilla_launch.health import is_serving
from flotilla_launch.logs import failure_excerpt
from flotilla_launch.placement import Slot
from flotilla_launch.process_tree import ProcessTable, end_tree, kill_all, tree_of
from flotilla_launch.records import ProcessRecord
from flotilla_launch.state import read_json

log = get_logger()

STOP_GRACE_S = 10.0
_POLL_S = 0.1
_POLL_SHARE = 0.05
"""A start that takes long is asked about less often: each question takes time from it, and from its neighbours."""
_LONGEST_POLL_S = 1.0
_NAME_THE_WAIT_AFTER_S = 10.0
_LOOK_FOR_ROOM_EVERY_S = 1.0


class ServiceProcess:
    """Starts, watches, restarts and stops the process of one slot."""

    def __init__(
        self,
        slot: Slot,
        *,
        command: list[str],
        wrapper: list[str],
        variables: Variables,
        log_path: Path,
        announce_file: Path,
        ready_timeout_s: float,
        restart_budget: int,
        credential: Credential,
        on_change: Callable[[], None],
    ) -> None:
        self.slot = slot
        self.child: Child | None = None
        self.shared_memory: set[str] = set()
        self.surplus = False
        """True while it is being scaled away."""
        self._command = command
        self._wrapper = wrapper
        self._variables = variables
        self._log_path = log_path
        self._announce_file = announce_file
        self._ready_timeout_s = ready_timeout_s
        self._budget = RestartBudget(restart_budget)
        self._credential = credential
        self._on_change = on_change
        self._mark = ""
        self._status = ProcessStatus(name=slot.name, kind=slot.kind, log_path=str(log_path))
        self._task: asyncio.Task[None] | None = None
        self._first_boot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log_start = 0
        self._status.state = ProcessState.PROCESS_STATE_STOPPED
        self._status.since.GetCurrentTime()

    def status(self) -> ProcessStatus:
        copy = ProcessStatus()
        copy.CopyFrom(self._status)
        return copy

    def record(self) -> ProcessRecord:
        """Return the record that the next launcher needs of it."""
        return ProcessRecord(
            self.slot.name,
            self.child.identity if self.child is not None else None,
            self._mark,
            sorted(self.shared_memory),
            kind=self.slot.kind,
            index=self.slot.index,
            surplus=self.surplus,
            deaths=self._budget.spent,
            log_start=self._log_start,
            status=MessageToDict(self._status),
        )

    @property
    def state(self) -> ProcessState.ValueType:
        return self._status.state

    def start(self) -> None:
        """Begin; `ready()` says how it went."""
        self._first_boot = asyncio.get_running_loop().create_future()
        # No caller may be waiting when it fails; the status holds the error as well.
        self._first_boot.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._budget.refill()
        self._status.restarts = 0
        self._set(ProcessState.PROCESS_STATE_STARTING)
        self._supervise(self._boot_and_keep)

    def take_over(self, record: ProcessRecord) -> None:
        """Go on where the launcher before this one stood: with its process where that lives, else with another one."""
        self._status = ParseDict(record.status, ProcessStatus())
        self._budget.refill(record.deaths)
        self._log_start = record.log_start
        self._mark = record.mark
        self.shared_memory = set(record.shared_memory)
        self.surplus = record.surplus
        if record.identity is not None:
            self.child = Child.adopt(record.identity)
        self._first_boot.set_result(None)
        self._supervise(partial(self._keep_adopted, record.identity))

    async def ready(self) -> None:
        """Wait for the first boot; raises what went wrong."""
        await asyncio.shield(self._first_boot)

    async def stop(self, grace_s: float = STOP_GRACE_S, *, told: bool = False) -> None:
        """SIGTERM, a grace for draining, then SIGKILL of everything that is left.

        One that was `told` has its SIGTERM already; a second one would cut its draining short.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if not self._first_boot.done():
            self._first_boot.cancel()
        await self._end(grace_s, told=told)

    async def _end(self, grace_s: float = STOP_GRACE_S, *, told: bool = False) -> None:
        failed = self.state == ProcessState.PROCESS_STATE_FAILED
        if self._mark and not failed:
            self._set(ProcessState.PROCESS_STATE_STOPPING)
        if self.child is not None:
            await self.note_shared_memory()
            if not told:
                self.child.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.child.wait(), grace_s)
        await self._bury()
        if not failed:
            self._set(ProcessState.PROCESS_STATE_STOPPED)

    async def note_shared_memory(self, table: ProcessTable | None = None) -> None:
        """Remember which shared memory our processes hold while they can still be asked."""
        child = self.child
        if child is not None and shared_memory.any_known():
            tree = await asyncio.to_thread(tree_of, child.identity, self._mark, table)
            held = shared_memory.held_by(process.pid for process in tree)
            if not held <= self.shared_memory:
                self.shared_memory |= held
                self._on_change()

    def _supervise(self, keep: Callable[[], Awaitable[None]]) -> None:
        self._task = asyncio.create_task(self._guarded(keep), name=f"supervise {self.slot.name}")

    async def _guarded(self, keep: Callable[[], Awaitable[None]]) -> None:
        try:
            await keep()
        # The end of a task that is not awaited: an error that is not ours (a full disk, no more processes) must not
        # leave a slot that is neither up nor FAILED, nor a caller that waits for it.
        except Exception as error:
            log.exception("supervision ended", process=self.slot.name)
            failure = Internal(f"{self.slot.name} cannot be supervised", why=repr(error))
            try:
                await self._bury()
            finally:
                # Only now: who sees it FAILED may start the next one.
                if not self._first_boot.done():
                    self._first_boot.set_exception(failure)
                self._give_up(str(failure))

    async def _boot_and_keep(self) -> None:
        try:
            await self._boot()
        except FlotillaError as error:
            self._give_up(str(error))
            self._first_boot.set_exception(error)
            return
        self._first_boot.set_result(None)
        await self._keep_up()

    async def _keep_adopted(self, identity: ProcessIdentity | None) -> None:
        state = self.state
        if self.child is None:
            # Before anything else: what it started may live, under a mark that no record holds any more.
            await self._bury(identity)
        if state in (ProcessState.PROCESS_STATE_STOPPED, ProcessState.PROCESS_STATE_FAILED):
            return
        if state == ProcessState.PROCESS_STATE_STOPPING:
            await self._end()
            return
        if self.child is None:
            await self._keep_up(self._last_words("it ended while no launcher was there"))
            return
        log.info("adopted", process=self.slot.name, pid=self._status.pid, state=ProcessState.Name(state))
        try:
            if state != ProcessState.PROCESS_STATE_READY:
                await self._become_ready(self.child)
        except FlotillaError as error:
            await self._keep_up(str(error))
        else:
            await self._keep_up()

    async def _keep_up(self, died: str = "") -> None:
        """Restart the child whenever it dies, until the budget is spent; `died` says why it has already."""
        while True:
            why = died or await self._death()
            while not await self._restarted(why):
                why = self._status.error
                if self.state == ProcessState.PROCESS_STATE_FAILED:
                    return
            died = ""

    async def _death(self) -> str:
        """Wait for it; returns how it came."""
        assert self.child is not None
        why = self._why_it_died(await self.child.wait(), "while it was in use")
        await self._bury()
        return why

    async def _restarted(self, why: str) -> bool:
        """One attempt within the budget; False leaves why in the status, FAILED when it was the last."""
        backoff = self._budget.spend()
        if backoff is None:
            times = len(self._budget.spent)
            self._give_up(f"{why}\nrestarted {times} times within ten minutes (restart_budget): given up")
            return False
        self._status.restarts += 1
        self._set(ProcessState.PROCESS_STATE_RESTARTING, why)
        log.warning("restarting", process=self.slot.name, why=why, backoff_s=backoff)
        await asyncio.sleep(backoff)
        await self._room()
        try:
            await self._boot()
        except FlotillaError as error:
            self._status.error = str(error)
            return False
        return True

    async def _room(self) -> None:
        """Wait until the disk takes what a service writes at its start: one that ends for want of it has no fault."""
        while full := lacks_room(self._log_path.parent):
            if self._status.error != str(full):
                self._set(ProcessState.PROCESS_STATE_RESTARTING, str(full))
                log.warning("waiting for disk space", process=self.slot.name, why=str(full))
            await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)

    async def _boot(self) -> None:
        """Start a child and wait until it is READY; leaves nothing behind when it does not get there."""
        # At each start anew: a secret may have changed since. Nothing is begun without it.
        variables = await asyncio.to_thread(resolved, self._variables, self.slot.name)
        self._announce_file.unlink(missing_ok=True)
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._mark = new_mark(self._announce_file)
        # Written down before it begins: the next launcher finds it by its mark.
        self._on_change()
        try:
            self.child = await Child.start(
                self._command,
                self._log_path,
                wrapper=self._wrapper,
                mark=self._mark,
                variables=variables,
            )
        except FlotillaError:
            await self._bury()
            raise
        self._status.pid = self.child.identity.pid
        self._on_change()
        await self._become_ready(self.child)

    async def _become_ready(self, child: Child) -> None:
        try:
            await self._until_serving(child)
        except FlotillaError:
            await self.note_shared_memory()
            await self._bury()
            raise
        await self.note_shared_memory()
        self._set(ProcessState.PROCESS_STATE_READY)
        log.info("ready", process=self.slot.name, pid=self._status.pid, address=self._status.address)

    async def _until_serving(self, child: Child) -> None:
        started = time.monotonic()
        named = False
        while True:
            if child.returncode is not None:
                raise FailedPrecondition(
                    f"{self.slot.name} did not start",
                    where=self._command[0],
                    why=self._why_it_died(child.returncode, "before it was ready"),
                    next_step=f"read {self._log_path}, or run: flotilla doctor",
                )
            announced = read_json(self._announce_file) or {}
            if announced.get("pid") == child.identity.pid:
                self._status.address = str(announced.get("address", ""))
                self._status.instance_id = str(announced.get("instance_id", ""))
                if await is_serving(self._status.address, self._credential):
                    return
            waited = time.monotonic() - started
            if waited > self._ready_timeout_s:
                raise DeadlineExceeded(
                    f"{self.slot.name} was not ready after {self._ready_timeout_s:.0f} s",
                    why=self._last_words("it runs but its health does not say SERVING"),
                    next_step=f"read {self._log_path}, or raise ready_timeout_s in the stack file",
                )
            if waited > _NAME_THE_WAIT_AFTER_S and not named:
                named = True
                log.info("waiting for readiness", process=self.slot.name, limit_s=self._ready_timeout_s)
            with contextlib.suppress(TimeoutError):
                pause_s = min(max(_POLL_S, waited * _POLL_SHARE), _LONGEST_POLL_S)
                await asyncio.wait_for(child.wait(), pause_s)

    async def _bury(self, identity: ProcessIdentity | None = None) -> None:
        """End every process of the child and remove what it left; begun again where a cancellation cut it short.

        `identity` is that of a child which ended before it could be adopted.
        """
        if not self._mark:
            return
        leader = self.child.identity if self.child is not None else identity
        tree = await asyncio.to_thread(tree_of, leader, self._mark)
        kill_all(tree)
        left = await asyncio.to_thread(end_tree, leader, self._mark)
        if left:
            log.error("processes could not be ended", process=self.slot.name, pids=[p.pid for p in left])
        if self.child is not None:
            await self.child.wait()
        removed = shared_memory.remove(self.shared_memory)
        if removed:
            log.info("removed shared memory", process=self.slot.name, files=removed)
        self.shared_memory.clear()
        # Not before its processes are gone: `stop` buries what a burial that it interrupted has left.
        self.child, self._mark = None, ""
        self._announce_file.unlink(missing_ok=True)
        self._status.pid, self._status.address, self._status.instance_id = 0, "", ""
        self._on_change()

    def _why_it_died(self, code: int, when: str) -> str:
        if code == UNKNOWN_STATUS:
            how = "ended"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return self._last_words(f"it {how} {when}")

    def _last_words(self, what: str) -> str:
        error, last = failure_excerpt(self._log_path, start=self._log_start)
        lines = [f"  {line}" for line in last]
        return "\n".join([f"{what}{': ' + error if error else ''}", *lines, ""]) if lines else what

    def _give_up(self, why: str) -> None:
        log.error("failed", process=self.slot.name, why=why)
        self._set(ProcessState.PROCESS_STATE_FAILED, why)

    def _set(self, state: ProcessState.ValueType, error: str = "") -> None:
        self._status.state = state
        self._status.error = error
        self._status.since.GetCurrentTime()
        self._on_change()


async def start_together(services: Sequence[ServiceProcess]) -> None:
    """Side by side; returns when all are READY. The first failure, or a cancellation, stops them all."""
    for service in services:
        service.start()
    waits = [asyncio.create_task(service.ready()) for service in services]
    async with contextlib.AsyncExitStack() as unless_ready:
        unless_ready.push_async_callback(_call_off, waits, services)
        await asyncio.gather(*waits)
        unless_ready.pop_all()


async def _call_off(waits: Sequence[asyncio.Task[None]], started: Sequence[ServiceProcess]) -> None:
    """Wait for nothing any more, and stop what was started."""
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await asyncio.gather(*(service.stop() for service in started))
