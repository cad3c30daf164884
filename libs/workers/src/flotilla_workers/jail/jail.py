"""The jail of this host: the highest level that works here, and how a command runs in it.

Invariants: a level counts only where a probe ran in it on this host, with the rights of this process. Whoever demands a
level that is not there gets an error that says why, and nothing runs. A command inherits no descriptor and no variable
of the environment but those that are given by name. Its processes, memory, files and cores are bounded. Where the
service is root with its rights, the command is a user that nobody else is. It keeps one right: to read what the jail
shows, whatever its mode says, because functions and Python may lie where root alone may go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_core.config import IsolationConfig
from flotilla_core.findings import failed, passed, warned
from flotilla_workers.jail import bubblewrap, groups, landlock, system_calls
from flotilla_workers.jail.groups import Group, Groups
from flotilla_workers.jail.level import REFUSED, Level, told

PROBE_LIMIT_S = 20.0
PROBE = "import threading; threading.Thread(target=print, args=('in jail',)).start()"
PRLIMIT, SETPRIV = "/usr/bin/prlimit", "/usr/bin/setpriv"
READS_ANY_MODE = 1 << 2
"""`CAP_DAC_READ_SEARCH` among the rights of a process."""
BECOMES_ANOTHER = 1 << 0 | 1 << 6 | 1 << 7 | 1 << 8
"""`CAP_CHOWN`, `CAP_SETGID`, `CAP_SETUID` and `CAP_SETPCAP`: root has them, unless a container took them away."""
FIRST_USER, USERS = 61_184, 4_096
"""The users that systemd would make on the fly: no account is among them."""
OUT = {
    "reward": "`trusted: true` in the term of the run lets this function out of it",
    "environment": "`trusted: true` in `environment` of the run lets it out of the jail",
}
"""What lets code out of the jail, by the section of the stack that asks for it."""
SAME_ORDER = {"PYTHONHASHSEED": "0"}
"""Sets have the same order in all processes, so that the same code makes the same of the same input again."""
NO_NETWORK = (
    *(errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.ECONNREFUSED),
    *(socket.EAI_AGAIN, socket.EAI_NONAME),  # no server of names answers
)
"""The numbers of errors that a function gets where it has no network."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of what the processes of one jail use."""

    memory_bytes: int = 4 << 30
    """Memory of each process; of all together where the host lets us make groups."""
    processes: int = 128
    tmp_bytes: int = 256 << 20
    """The size of /tmp, and of the longest file."""


@dataclass(frozen=True)
class Start:
    """A command, as it starts in a jail."""

    command: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    """The descriptors that the command inherits beside those of its caller."""


@dataclass(frozen=True)
class Jail:
    """A level that works on this host."""

    level: Level
    why_not_higher: str = ""
    """The reason why the next level does not work here."""
    refusal: str = ""
    """The reason why code of users does not run here, where the level is lower than what is demanded."""
    bwrap: str = ""
    bounds: Bounds = field(default_factory=Bounds)
    readable: tuple[Path, ...] = ()
    """Files and folders that all may read, beside the folders of Python and of its packages."""
    writable: tuple[str, ...] = ()
    """Folders of the jail's own beside /tmp, empty at its start and gone at its end; at the higher level alone."""
    environment: tuple[str, ...] = ()
    """The variables of this process that all see."""
    preload: tuple[str, ...] | None = None
    """The modules of a worker that answers by a new process each time."""
    section: str = "reward"
    """The section of the stack that asks for it."""
    forks: bool = False
    """Workers are forked from a zygote, each into a jail of its own."""

    @property
    def isolation(self) -> str:
        """The name of the level in a registration."""
        return REFUSED if self.refusal else str(self.level)

    @property
    def finding(self) -> Finding:
        """Say how far functions of users are kept from this host."""
        name, found = f"isolation of {self.section}s", told(self.isolation)
        key = f"{self.section}.isolation"
        if self.refusal:
            return failed(name, self.refusal, f"See {key} in services/{self.section}/README.md.")
        if not self.level:
            return warned(name, found, f"Set {key}.unsafe: false in stack.yaml.")
        return passed(name, f"{found}; {self.why_not_higher}" if self.why_not_higher else found)

    @contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        functions: Sequence[Path] = (),
        slot: int = 0,
        folder: Path | None = None,
    ) -> Iterator[Start]:
        """Give what starts a command in a jail; the block lasts until it has started.

        It reads the folders of its `functions`. `folder` is where a level without namespaces lets it write; its caller
        removes it. As root each slot has a user: it owns nothing, and the kernel counts its processes apart.
        """
        if self.level is Level.NONE:
            yield Start([*command], SAME_ORDER | os.environ, ())
            return
        variables, rights, user = self._variables(), _rights(), user_of(slot)
        # At the lower level a user that is the service's own has its threads counted too: Landlock's command adds them.
        with_ours = self.level is Level.LANDLOCK and user is None
        processes = () if with_ours else (f"--nproc={self.bounds.processes}",)
        bounded = [*_becomes(user, rights), PRLIMIT, *processes, *self._limits(), *command]
        shown = [*interpreter_folders(), *self.readable]
        if self.level is Level.LANDLOCK:
            assert folder is not None
            if user is not None:
                os.chown(folder, user, user)
            variables |= {"HOME": str(folder), "TMPDIR": str(folder)}
            counted = self.bounds.processes if with_ours else 0
            script = [sys.executable, "-I", "-S", landlock.__file__, str(folder), str(counted)]
            paths = [
                path for path in (*bubblewrap.SYSTEM, *map(str, (*shown, *functions))) if os.path.exists(path)
            ]
            yield Start([*script, *paths, "--", *bounded], variables, ())
            return
        calls = os.memfd_create("system calls")
        try:
            os.write(calls, system_calls.program(namespaces=True))
            os.lseek(calls, 0, os.SEEK_SET)
            inside = bubblewrap.command(
                self.bwrap,
                bounded,
                readable=shown,
                functions=functions,
                filter_fd=calls,
                environment=variables | {"HOME": bubblewrap.HOME},
                as_another=user is not None,
                tmp_bytes=self.bounds.tmp_bytes,
                writable=self.writable,
            )
            # The first process of the jail is bubblewrap, whose own environment the jail can read.
            yield Start(inside, {"PATH": variables["PATH"]}, (calls,))
        finally:
            os.close(calls)

    def zygote(self, command: Sequence[str], functions: Sequence[Path]) -> Start:
        """Return what starts a zygote of the higher level: in what a jail sees, with the rights of this process."""
        variables = self._variables() | {"HOME": bubblewrap.HOME}
        inside = bubblewrap.command(
            self.bwrap,
            command,
            readable=[*interpreter_folders(), *self.readable],
            functions=functions,
            filter_fd=None,
            environment=variables,
            as_another=user_of(0) is not None,
            tmp_bytes=self.bounds.tmp_bytes,
        )
        return Start(inside, {"PATH": variables["PATH"]}, ())

    def state_of_shown(self, functions: Sequence[Path]) -> Hashable:
        """Return what changes when a zygote that starts now shows other files than one that started before."""
        return bubblewrap.state_of_shown(self.readable, functions)

    def sight(self, functions: Sequence[Path]) -> dict[str, Any]:
        """Return what the jails of a zygote see beside what it sees."""
        another = user_of(0) is not None
        shown = bubblewrap.topmost(bubblewrap.by_depth([*interpreter_folders(), *self.readable, *functions]))
        return {
            "host": bubblewrap.HOST,
            "closed": [*bubblewrap.of_root_alone()] if another or os.getuid() == 0 else [],
            "shown": [*map(str, shown)],
            "reads_any_mode": bool(_rights() & READS_ANY_MODE),
            "own_users": not another,
        }

    def _variables(self) -> dict[str, str]:
        ours = {name: os.environ[name] for name in self.environment if name in os.environ}
        # A jail shows the folders of packages of this process; those that a variable names are found by it alone.
        named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
        packages = {"PYTHONPATH": os.pathsep.join(named)} if named else {}
        fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        return fixed | SAME_ORDER | packages | ours

    def _limits(self) -> list[str]:
        bounds = self.bounds
        return [f"--data={bounds.memory_bytes}", f"--fsize={bounds.tmp_bytes}", "--core=0", "--"]


class Cell:
    """A jail for one worker, and the folder that it may need; `close` when the worker has ended."""

    def __init__(
        self, jail: Jail, functions: Sequence[Path] = (), slot: int = 0, kept: Groups | None = None
    ) -> None:
        self.level = jail.level
        self.preload = jail.preload
        self._jail = jail
        self._functions = functions
        self._slot = slot
        self._folder: Folder | None = None
        self._groups = kept or Groups(jail.bounds.memory_bytes, jail.bounds.processes)
        if kept is None:
            self._groups.close()  # It goes with the cell.
        self._group: Group | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """The entries of the groups that the worker joins."""
        return self._group.entries if self._group else ()

    @contextmanager
    def start(self, command: Sequence[str]) -> Iterator[Start]:
        """Give what starts the worker; the block lasts until it has started, and closes the cell where it raises."""
        with self.made():
            if self.level is Level.LANDLOCK:
                self._folder = Folder()
            folder = None if self._folder is None else self._folder.path
            with self._jail.start(
                command, functions=self._functions, slot=self._slot, folder=folder
            ) as start:
                yield start

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the group of the worker, which starts in the block; where that raises, the cell is closed."""
        with ExitStack() as where_it_raises:
            where_it_raises.callback(self.close)
            if self.level:
                self._group = self._groups.take()
            yield
            where_it_raises.pop_all()

    def way_out(self, number: int, path: str) -> str:
        """Return what to do about an error of the system that is the jail's; nothing where it is none of its."""
        key, out = f"{self._jail.section}.isolation", OUT[self._jail.section]
        if not self.level:
            return ""
        if number in (errno.ENOENT, errno.EACCES) and os.path.isabs(path) and os.path.exists(path):
            return (
                f". The file is there, and the jail does not show it: name it in {key}.readable of the stack"
            )
        if number == errno.EROFS:
            return f". In the jail functions write to temporary folders alone, and no key allows more: {out}"
        if number in NO_NETWORK:
            return f". The jail has no network: {out}"
        if number == errno.ENOMEM:
            gib = self._jail.bounds.memory_bytes / (1 << 30)
            return f". The jail bounds memory to {gib:g} GiB: {key}.memory_gib of the stack"
        return ""

    def way_to_variable(self, name: str) -> str:
        """Return what to do about a missing variable of the environment; nothing outside of a jail."""
        if not self.level:
            return ""
        key = f"{self._jail.section}.isolation.environment"
        return f". The jail has the variables that {key} of the stack names: name {name} there"

    def close(self) -> None:
        """Remove what the worker wrote, and its group."""
        if self._group is not None:
            self._groups.give_back(self._group)
            self._group = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if not self.level:
            # One outside of a jail may have been killed with cells of its own, as those of `code` are at their limit.
            _remove_left()


class Folder:
    """A folder that a jail may write in.

    Its owner holds a lock on it, by which others know that it lives. They may be in another container, with the same
    /tmp and another table of processes.
    """

    def __init__(self) -> None:
        held = None
        while held is None:
            self.path = Path(tempfile.mkdtemp(prefix=f"{groups.PREFIX}-{os.getpid()}-"))
            held = _locked(self.path)  # Whoever saw it before it was locked has removed it.
        self._held = held

    def close(self) -> None:
        """Remove it."""
        _remove(self.path)
        os.close(self._held)


def _locked(folder: Path) -> int | None:
    """Lock a folder; None where it has an owner, is gone, or is not ours to enter."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(folder, follow_symlinks=False)):
            return held
    except OSError:
        pass
    os.close(held)
    return None


def _remove(folder: Path) -> None:
    """Remove a folder: it may be deeper than a stack, and have folders that their owner may not list."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not folder.exists():
            return
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def _remove_left() -> None:
    """Remove the groups of processes that are gone, and the folders that nobody holds."""
    groups.remove_left()
    for folder in Path(tempfile.gettempdir()).glob(f"{groups.PREFIX}-*-*"):
        if (held := _locked(folder)) is not None:
            _remove(folder)
            os.close(held)


NO_JAIL = Jail(Level.NONE)


def no_jail() -> Jail:
    """Return none, for code that its owner vouches for."""
    return NO_JAIL


def _becomes(user: int | None, rights: int) -> list[str]:
    if user is None:
        return []
    left = "-all,+dac_read_search" if rights & READS_ANY_MODE else "-all"
    kept = [f"--{which}={left}" for which in ("bounding-set", "inh-caps", "ambient-caps")]
    return [SETPRIV, f"--reuid={user}", f"--regid={user}", "--clear-groups", *kept, "--no-new-privs", "--"]


def user_of(slot: int) -> int | None:
    """Return the user of a slot; None where this process can become nobody else."""
    return FIRST_USER + slot % USERS if _rights() & BECOMES_ANOTHER == BECOMES_ANOTHER else None


@cache
def _rights() -> int:
    """Return the rights of root that this process has."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))


def shown_for(file: Path) -> Path:
    """Return what a jail shows for a file of functions: its folder, or it alone in one that is everybody's, as /tmp."""
    folder = file.parent
    of_all = folder == Path("/") or (folder.is_dir() and folder.stat().st_mode & stat.S_ISVTX)
    return file if of_all else folder


def interpreter_folders() -> list[Path]:
    """Return the folders that Python and the packages of this process are in."""
    # The first path is that of a script, or the folder in which somebody called a command: it is not meant for all.
    of_python = (sys.base_prefix, sys.prefix, *(sys.path if sys.flags.safe_path else sys.path[1:]))
    return [Path(path) for path in dict.fromkeys(of_python) if os.path.isabs(path) and os.path.isdir(path)]


def find(asked: IsolationConfig | None = None, section: str = "reward") -> Jail:
    """Return the highest level that works here, within what a section of the stack asks for."""
    asked = asked or IsolationConfig()
    if asked.unsafe:
        return replace(NO_JAIL, section=section, environment=asked.environment)
    bounds = Bounds(int(asked.memory_gib * (1 << 30)), asked.processes)
    given = Jail(
        Level.NONE,
        bounds=bounds,
        readable=asked.readable,
        environment=asked.environment,
        preload=asked.preload,
        section=section,
    )
    _remove_left()
    reasons: list[str] = []
    for candidate in candidates(given):
        jail = replace(candidate, why_not_higher="; ".join(dict.fromkeys(reasons)))
        why = why_not(jail)
        if not why:
            break
        reasons.append(f"{jail.level}: {why}")
    else:
        jail = replace(given, why_not_higher="; ".join(dict.fromkeys(reasons)))
    if jail.level >= Level[asked.at_least.upper()]:
        return jail
    way = f"Let this user make namespaces, or set {section}.isolation in stack.yaml."
    demanded = f"this host has no jail of level {asked.at_least}, which functions of users run in"
    return replace(jail, refusal=f"{demanded}: {jail.why_not_higher}. {way}")


def candidates(given: Jail) -> Iterator[Jail]:
    """Give the jails that this host may have, the strictest first."""
    for bwrap in bubblewrap.executables():
        yield replace(given, level=Level.NAMESPACES, bwrap=bwrap)
    yield replace(given, level=Level.LANDLOCK)


def why_not(jail: Jail) -> str:
    """Run a probe; return why it does not work, and nothing where it does."""
    if jail.level is Level.LANDLOCK and (have := landlock.abi()) < landlock.LEAST_ABI:
        return f"the kernel has version {have} of Landlock, and {landlock.LEAST_ABI} is needed"
    for tool in (PRLIMIT, SETPRIV):
        if not os.path.exists(tool):
            return f"there is no {tool} (util-linux)"
    folder = Folder()
    try:
        with jail.start([sys.executable, "-I", "-c", PROBE], folder=folder.path) as start:
            probe = subprocess.run(
                start.command,
                env=start.environment,
                pass_fds=start.descriptors,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT_S,
                check=False,
            )
    except (OSError, LookupError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        folder.close()
    return (
        "" if probe.stdout == "in jail\n" else (probe.stderr.strip().splitlines() or ["it said nothing"])[-1]
    )
