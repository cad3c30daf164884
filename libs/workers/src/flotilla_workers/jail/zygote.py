"""A zygote: it has loaded what a worker needs, and forks workers, each into a jail of its own.

Run by bubblewrap as `python -P -m flotilla_workers.jail.zygote LOADER CONTROL_FD SIGHT`, in what a jail sees. An order
of its service names the bounds of a worker. With it come the channel, a socket for what is told of the worker, and the
files by which it joins groups of the kernel. The parent of the worker is a keeper, as of any other one, and here the
first process of the jail. It tells how it can be reached, then how the worker ended.

Invariants: no code of a user runs in a zygote, and it reads nothing but orders. A worker shares no namespace with any
process but its keeper. All that it can write is new: /tmp, /dev/shm, and the table of processes. Before it loads
anything of a user's, it holds no right of the zygote's, and no descriptor but its channel. A zygote ends with the last
of its workers, once its service is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flotilla_workers import keeper, worker
from flotilla_workers.jail import system_calls

NEW_MOUNTS, NEW_GROUPS, NEW_NAMES, NEW_IPC, NEW_PROCESSES, NEW_NETWORK = (
    *(0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000),
)
"""The flags of `unshare`."""
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS, AGAIN, BIND, RECURSIVE, PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384, 1 << 18),
)
"""The flags of `mount`."""
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 8, 24, 38, 47
RAISE = 2
CAPABILITIES = 0x20080522
"""The version of what `capset` takes."""
READS_ANY_MODE = 2
"""The number of `CAP_DAC_READ_SEARCH`."""
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
WRITABLE = ("/tmp", "/dev/shm")
WRITTEN_BY_ROOT = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
MOST_ORDER_BYTES, MOST_DESCRIPTORS = 1 << 16, 16
MOST_OPEN = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class Order(NamedTuple):
    """The order of a service for one worker."""

    user: int | None
    """The user of the jail; None where that is the zygote's own, in a user namespace."""
    processes: int
    memory_bytes: int
    tmp_bytes: int
    preload: Sequence[str] | None


class Sight(NamedTuple):
    """The things that jails of a zygote see beside those that it sees."""

    host: str
    closed: list[str]
    """The files of the kernel that root alone may read."""
    shown: list[str]
    """Places of files of the host, of which new folders may cover some."""
    reads_any_mode: bool
    own_users: bool
    """The zygote is in a user namespace of its own."""


class Zygote:
    """The loader, the filter and the orders of the workers of one zygote."""

    def __init__(self, load: worker.Loader, control: socket.socket, sight: Sight) -> None:
        self._load, self._control, self._sight = load, control, sight
        self._filter = system_calls.program(namespaces=True)
        self._ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork a worker for each order, until the service is gone and the last worker has ended."""
        # How keepers ended they have told; the time that they took is counted where it is asked for.
        signal.signal(signal.SIGCHLD, lambda *_: keeper.reap())
        gc.collect()
        gc.freeze()
        while True:
            said, descriptors, _, _ = socket.recv_fds(self._control, MOST_ORDER_BYTES, MOST_DESCRIPTORS)
            if not said:
                break
            try:
                self._fork(said, descriptors)
            except OSError as error:
                # Who asked sees that its channel closes, and the jails that are there go on.
                with suppress(OSError):
                    sys.stderr.write(f"a zygote forked no worker: {error}\n")
            for descriptor in descriptors:
                os.close(descriptor)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _fork(self, said: bytes, descriptors: Sequence[int]) -> None:
        # Back from the table of the child before, so that the next child alone is the first process of a new one.
        _checked(_libc.setns(self._ours, NEW_PROCESSES), "own table of processes")
        _checked(_libc.unshare(NEW_PROCESSES), "new table of processes")
        if os.fork() == 0:
            with keeper.Alone():
                self._keep(Order(**json.loads(said)), *descriptors)

    def _keep(self, order: Order, channel: int, told: int, *groups: int) -> None:
        os.close(self._control.detach())
        os.close(self._ours)
        tells = socket.socket(fileno=told)
        for group in groups:
            os.write(group, b"0")
            os.close(group)
        _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.setsid()
        self._enter(order)
        ended = os.pidfd_open(os.getpid())
        socket.send_fds(tells, [b'{"began": true}'], [ended])
        os.close(ended)
        status = keeper.keep(channel, lambda: self._work(order, channel, in_group=bool(groups)))
        tells.send(json.dumps({"ended": status}).encode())

    def _enter(self, order: Order) -> None:
        """Put this process, the first one of its table, into a jail."""
        _checked(_libc.unshare(NEW_MOUNTS | NEW_GROUPS | NEW_NAMES | NEW_IPC | NEW_NETWORK), "new namespaces")
        socket.sethostname(self._sight.host)
        _loopback_up()
        _mount("none", "/", "", RECURSIVE | PRIVATE)
        places = [*_opened(self._sight.shown)]
        _mount("proc", "/proc", "proc", NO_SETUID | NO_DEVICES | NO_PROGRAMS)
        _mount("devpts", "/dev/pts", "devpts", NO_SETUID | NO_PROGRAMS, "newinstance,ptmxmode=0666,mode=620")
        for folder, size in zip(WRITABLE, (order.tmp_bytes, order.tmp_bytes // 4), strict=True):
            _mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_DEVICES, f"mode=01777,size={size}")
        for path, place in places:
            _show(path, place)
        for path in filter(os.path.exists, WRITTEN_BY_ROOT):
            _close(path, path)
        for path in self._sight.closed:
            _close("/dev/null", path)
        _mount("tmpfs", "/proc/1", "tmpfs", NO_SETUID | NO_DEVICES | READ_ONLY, "mode=0755")

    def _work(self, order: Order, channel: int, *, in_group: bool) -> None:
        """Give up every right, and be the worker."""
        # A file of its own: all who share an open one can change its state for the others.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.closerange(3, channel)
        os.closerange(channel + 1, MOST_OPEN)
        # In a user namespace of ours the kernel counts those of all jails together, so there the group bounds them.
        if order.user is not None or not in_group:
            resource.setrlimit(resource.RLIMIT_NPROC, (order.processes, order.processes))
        for what, most in (
            (resource.RLIMIT_DATA, order.memory_bytes),
            (resource.RLIMIT_FSIZE, order.tmp_bytes),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))
        _give_up_rights(order.user, self._sight.reads_any_mode)
        os.chdir(os.environ["HOME"])
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        system_calls.install(self._filter)
        worker.answer_until_gone(channel, self._load, order.preload)


def _give_up_rights(user: int | None, reads_any_mode: bool) -> None:
    kept = 1 << READS_ANY_MODE if user is not None and reads_any_mode else 0
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new rights")
    for number in range(64):
        if not kept >> number & 1:
            _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # What the kernel does not know it refuses.
    if user is not None:
        _checked(_libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "rights of another user")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _checked(
        _libc.capset(struct.pack("Ii", CAPABILITIES, 0), struct.pack("6I", kept, kept, kept, 0, 0, 0)),
        "fewer rights",
    )
    if kept:
        _checked(_libc.prctl(PR_CAP_AMBIENT, RAISE, READS_ANY_MODE, 0, 0), "to read any mode")


def _opened(shown: list[str]) -> Iterator[tuple[str, int]]:
    for path in shown:
        if not any(path == folder or path.startswith(f"{folder}/") for folder in WRITABLE):
            continue
        with suppress(FileNotFoundError):
            yield path, os.open(path, os.O_PATH | os.O_CLOEXEC)


def _show(path: str, place: int) -> None:
    """Show again what a new folder covers."""
    before = os.umask(0o022)
    if stat.S_ISDIR(os.fstat(place).st_mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "a").close()
    os.umask(before)
    _mount(f"/proc/self/fd/{place}", path, "", BIND | RECURSIVE)
    os.close(place)


def _close(with_what: str, path: str) -> None:
    """Let nobody write to this, nor open a device that covers it."""
    _mount(with_what, path, "", BIND | RECURSIVE)
    _mount("none", path, "", BIND | AGAIN | READ_ONLY | NO_SETUID | NO_DEVICES | NO_PROGRAMS)


def _loopback_up() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as asked:
        named = struct.pack("16sH22x", b"lo", 0)
        _, flags = struct.unpack("16sH22x", fcntl.ioctl(asked, GET_FLAGS, named))
        fcntl.ioctl(asked, SET_FLAGS, struct.pack("16sH22x", b"lo", flags | UP))


def _mount(what: str, place: str, kind: str, flags: int, data: str = "") -> None:
    given = (what.encode(), place.encode(), kind.encode(), flags, data.encode() or None)
    _checked(_libc.mount(*given), place)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def main() -> None:
    loader, control, sight = sys.argv[1], int(sys.argv[2]), Sight(**json.loads(sys.argv[3]))
    if sight.own_users:
        _no_more_user_namespaces()
        _own_table(control)
    module, _, name = loader.partition(":")
    load: Callable[..., Any] = getattr(importlib.import_module(module), name)
    Zygote(load, socket.socket(fileno=control), sight).serve()


def _no_more_user_namespaces() -> None:
    """Let no jail make a user namespace, where it is in one of ours: the filter refuses it too."""
    with suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _own_table(control: int) -> None:
    """Go on in a table of processes that belongs to this user namespace: only to such a one can a process come back."""
    _checked(_libc.unshare(NEW_PROCESSES), "table of processes")
    child = os.fork()
    if child:
        os.close(control)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


if __name__ == "__main__":
    main()
