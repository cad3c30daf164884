"""The service's side of zygotes: workers in jails that are there before somebody asks for one.

A worker of a zygote costs a fork and new namespaces, where another one costs two new interpreters. A verdict in it is
as cold: no code of a user ran in the zygote, nor in the worker before it was given.

Invariants: a worker is given once. It sees the files that are there when it is asked for, as one that starts does. What
is kept here belongs to no event loop. A zygote lives for as long as its workers: their jails are within its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from flotilla_core.errors import Unavailable
from flotilla_workers.jail import zygote
from flotilla_workers.jail.groups import Groups, make
from flotilla_workers.jail.jail import Cell, Jail, user_of
from flotilla_workers.jail.level import Level
from flotilla_workers.process import EXIT_LIMIT_S, START_LIMIT_S, WorkerProcess, log_of_service

MOST_ZYGOTES = 4
"""Zygotes that are kept; the one that was asked longest ago ends for another one, once its workers have."""
RESERVE = 4
"""Workers that wait for an owner, of each zygote that was asked more than once."""
PROBED = "flotilla_workers.functions:user_function"


class ForkedKeeper:
    """A keeper that a zygote forked: the first process of its jail."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        told.setblocking(False)
        self._process = -1
        self._number = 0
        self._status: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """The number of the process on this host; 0 where it was never there."""
        self._hear()
        return self._number

    async def wait(self) -> int:
        while self.returncode is None:
            await _readable(self._process if self._process >= 0 else self._told.fileno())
            known = self._process >= 0
            self._hear()
            if self.returncode is None and (known or self._process < 0):
                self._close()
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        self._hear()
        if self._process < 0 and number == signal.SIGKILL and self.returncode is None:
            self._close()  # Its zygote took no order yet; where it ever does, the worker finds no channel and ends.
        elif self._process >= 0:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._process, number)

    def _hear(self) -> None:
        """Take what the keeper has told."""
        while self.returncode is None:
            try:
                said, processes, _, _ = socket.recv_fds(self._told, 1 << 10, 1)
            except (BlockingIOError, ConnectionError):
                return
            if not said:
                return
            if processes:
                (self._process,) = processes
                self._number = _number_of(self._process)
            else:
                self._status = int(json.loads(said)["ended"])

    def _close(self) -> None:
        status = signal.SIGKILL if self._status is None else self._status
        self.returncode = os.waitstatus_to_exitcode(status)
        self._told.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


class Zygote:
    """One zygote, with the workers that it has in reserve."""

    def __init__(self, jail: Jail, loader: str, functions: Sequence[Path]) -> None:
        self._jail, self._functions = jail, functions
        self._groups = Groups(jail.bounds.memory_bytes, jail.bounds.processes)
        self._asked = 0
        self.reserve: deque[WorkerProcess] = deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sight = json.dumps(jail.sight(functions))
        command = [sys.executable, "-P", "-m", zygote.__name__, loader, str(theirs.fileno()), sight]
        start = jail.zygote(command, functions)
        log = log_of_service()
        with ExitStack() as ours_no_more:
            ours_no_more.callback(theirs.close)
            if log >= 0:
                ours_no_more.callback(os.close, log)
            self.process = subprocess.Popen(
                start.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=start.environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether it takes orders: it says nothing, and its end of the channel closes with it."""
        try:
            self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return self.process.poll() is None
        except OSError:
            pass
        return False

    @property
    def is_new(self) -> bool:
        """Whether nobody has asked it before the one who asks now."""
        return self._asked == 1

    def worker(self, slots: Iterator[int]) -> WorkerProcess:
        """Return a worker, and have others made for those who ask next."""
        self._asked += 1
        given = self.reserve.popleft() if self.reserve else self._fork(next(slots))
        with suppress(OSError):  # Who asks next is told, where it needs another one.
            while self._asked > 1 and len(self.reserve) < RESERVE:
                self.reserve.append(self._fork(next(slots)))
        return given

    def _fork(self, slot: int) -> WorkerProcess:
        cell = Cell(self._jail, self._functions, slot, self._groups)
        bounds = self._jail.bounds
        order = zygote.Order(
            user_of(slot), bounds.processes, bounds.memory_bytes, bounds.tmp_bytes, self._jail.preload
        )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as theirs_alone, ExitStack() as where_it_fails:
            for one in (theirs, tells):
                theirs_alone.callback(one.close)
            for one in (ours, told):
                where_it_fails.callback(one.close)
            with cell.made():
                given = [theirs.fileno(), tells.fileno()]
                for entry in cell.groups:
                    given.append(os.open(entry, os.O_WRONLY | os.O_CLOEXEC))
                    theirs_alone.callback(os.close, given[-1])
                socket.send_fds(self._control, [json.dumps(order._asdict()).encode()], given)
            where_it_fails.pop_all()
        return WorkerProcess(ForkedKeeper(told), ours, cell)

    async def end(self) -> None:
        """Give no further worker; it ends with those that it gave."""
        self._control.close()
        while self.reserve:
            await self.reserve.popleft().kill()
        self._groups.close()


class Zygotes:
    """The zygotes of one process, by what their workers see and load."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Zygote] = {}
        self._former: list[Zygote] = []
        """Those that give no further worker, and are to be ended."""
        self._ending: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    async def worker(
        self, jail: Jail, loader: str, functions: Sequence[Path], slots: Iterator[int]
    ) -> WorkerProcess:
        """Return a worker that has begun, in a jail; where none can be forked, it is started."""
        if not jail.forks:
            return await WorkerProcess.start(loader, Cell(jail, functions, next(slots)))
        latest = time.monotonic() + START_LIMIT_S
        for left in reversed(range(RESERVE + 1)):
            kept, worker = self._take(jail, loader, functions, slots)
            try:
                await worker.begin()
                await self._end_former()
            except Unavailable:
                if worker.in_vain and time.monotonic() >= latest:
                    self._give_up(kept)
                # One of the reserve may have died; the first one of a zygote says that none will do.
                if not left or kept.is_new or time.monotonic() >= latest:
                    raise
            except (asyncio.CancelledError, OSError):
                await worker.kill()
                raise
            else:
                return worker
        raise AssertionError("the last one was given or raised")

    def _take(
        self, jail: Jail, loader: str, functions: Sequence[Path], slots: Iterator[int]
    ) -> tuple[Zygote, WorkerProcess]:
        """Return a worker and its zygote, without a wait: others ask meanwhile."""
        if self._stopped:
            raise Unavailable("a worker did not start", why="its service ends", next_step="Start it again.")
        key = jail, loader, (*functions,), jail.state_of_shown(functions)
        kept = self._kept.pop(key, None)
        if kept is not None and not kept.alive:
            self._former.append(kept)
            kept = None
        try:
            kept = self._kept[key] = kept or Zygote(jail, loader, functions)
            return kept, kept.worker(slots)
        except OSError as error:
            why = f"its zygote took no order: {error.strerror or error}"
            raise Unavailable("a worker did not start", why=why, next_step="Try again.") from error
        finally:
            while len(self._kept) > MOST_ZYGOTES:
                self._former.append(self._kept.pop(next(iter(self._kept))))

    def _give_up(self, stands: Zygote) -> None:
        """End a zygote that takes no orders, and the jails in it."""
        _kill(stands.process)
        for key in [key for key, kept in self._kept.items() if kept is stands]:
            self._former.append(self._kept.pop(key))

    async def _end_former(self) -> None:
        while self._former:
            one = self._former[-1]
            self._ending = [process for process in self._ending if process.poll() is None]
            self._ending.append(one.process)
            await one.end()
            # Others may have ended it too, or added some. Where the wait is cancelled, the next one ends it.
            self._former = [other for other in self._former if other is not one]

    async def stop(self) -> None:
        """End every zygote, and give no further worker; whoever has one has ended it."""
        self._stopped = True
        self._former += self._kept.values()
        self._kept.clear()
        await self._end_former()
        for process in self._ending:
            try:
                await asyncio.to_thread(process.wait, EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                _kill(process)
                await asyncio.to_thread(process.wait)
        self._ending.clear()


async def that_forks(jail: Jail) -> Jail:
    """Return a jail whose workers are forked, where this host lets us."""
    if jail.level is not Level.NAMESPACES:
        return jail
    return replace(jail, forks=await fork_here(jail))


async def fork_here(jail: Jail) -> bool:
    """Return whether workers can be forked into jails on this host.

    Where all are the same user, a group of each bounds its processes: the kernel counts those of a user together.
    """
    if user_of(0) is None and not _makes_groups(jail):
        return False
    zygotes = Zygotes()
    try:
        for _ in range(2):  # The first one leaves the zygote as it is.
            worker = await zygotes.worker(replace(jail, forks=True), PROBED, (), itertools.count())
            await worker.kill()
    except (OSError, Unavailable):
        return False
    finally:
        await zygotes.stop()
    return True


def _makes_groups(jail: Jail) -> bool:
    group = make(jail.bounds.memory_bytes, jail.bounds.processes)
    if group is not None:
        group.close()
    return group is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the first process in the jail of a zygote, and so all that is in it."""
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def _number_of(process: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{process}").read_text().splitlines()
    return max(0, next(int(line.split()[1]) for line in lines if line.startswith("Pid:")))


async def _readable(descriptor: int) -> None:
    # Of its own: several may wait for the same process.
    watched = os.dup(descriptor)
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    loop.add_reader(watched, happened.set)
    try:
        await happened.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
