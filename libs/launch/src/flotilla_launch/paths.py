"""The files of one stack on this host.

Invariant: everything that a stack writes is below `<state_dir>/<name>/`, except the supervisor's unix socket,
whose path must be short and therefore lies in the user's runtime directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from flotilla_core.disk import check_state_directory
from flotilla_core.errors import FailedPrecondition, InvalidConfig, PermissionDenied
from flotilla_core.files import make_private_folder
from flotilla_launch.lease import LOCKS


class _Below:
    """A file or folder in the directory of a stack."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, paths: StackPaths, owner: type[StackPaths]) -> Path:
        return paths.directory.joinpath(*self._parts)


@dataclass(frozen=True)
class StackPaths:
    """The files of one stack."""

    directory: Path
    """The directory of the stack: `<state_dir>/<name>`, absolute."""
    launcher_file = _Below("launcher.json")
    stack_file = _Below("stack.yaml")
    processes_file = _Below("processes.json")
    launcher_lock_file = _Below(LOCKS[0])
    """Locked by the process that may change the stack's processes: the launcher, or a cleanup."""
    guardian_lock_file = _Below(LOCKS[1])
    """Locked by the guardian for as long as it lives."""
    guardian_file = _Below("guardian.json")
    """Names the process of the guardian."""
    credential_file = _Below("credential.pem")
    """The stack's own credential, where the stack file names no other one."""
    ended_file = _Below("ended.json")
    """Says why the stack is no longer supervised, if its guardian gave it up."""
    placed_file = _Below("placed.json")
    """Says which launcher has the stack, if it is not the local one."""
    endpoints_file = _Below("endpoints.json")
    """Tells the agents of other nodes where NATS and the coordinator are."""
    nodes = _Below("nodes")
    """The folder of what agents tell about their nodes."""
    up_lock_file = _Below("up.lock")
    """Locked while a `flotilla up` or `flotilla down` is at work."""
    instances = _Below("instances")
    logs = _Below("logs")
    nats = _Below("nats")
    nats_log = _Below("nats", "nats.log")

    @classmethod
    def of(cls, state_dir: Path, name: str) -> StackPaths:
        return cls((state_dir / name).absolute())

    def node_file(self, node: str) -> Path:
        return self.nodes / f"{node}.json"

    def announce_file(self, name: str) -> Path:
        """Written by the service itself as soon as its port is open."""
        return self.instances / f"{name}.json"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def socket(self) -> Path:
        """Return the supervisor's socket, named by a digest of the stack's directory: no two stacks share it."""
        digest = hashlib.blake2b(str(self.directory.resolve()).encode(), digest_size=8).hexdigest()
        return _runtime_directory() / f"{digest}.sock"

    def check_access(self) -> None:
        """Raise PermissionDenied where this user cannot enter the stack's directory."""
        try:
            # Only a user who may search the directory gets to know what is not in it.
            (self.directory / "any").exists()
        except PermissionError as error:
            raise PermissionDenied(
                f"stack {self.directory.name!r} belongs to another user",
                where=str(self.directory),
                why=str(error.strerror),
                next_step="work as that user, or give your stack another name or state_dir",
            ) from None
        except OSError as error:
            raise InvalidConfig(
                "the stack's directory cannot be used",
                where=str(self.directory),
                why=str(error.strerror),
                next_step="set state_dir in the stack file to another one",
            ) from None

    def make(self) -> int:
        """Make the folders, for their owner alone; return how much of what others could open had to be closed to them.

        What lies open in a folder that is closed is closed as well, and does not count: nobody could reach it.
        """
        if self.directory.exists() and self.directory.stat().st_uid != os.geteuid():
            raise FailedPrecondition(
                "the stack's directory belongs to another user",
                where=str(self.directory),
                why=f"its owner is uid {self.directory.stat().st_uid}",
                next_step="work as that user, or give your stack another name or state_dir",
            )
        reachable = self.directory.exists() and self.directory.stat().st_mode & 0o077
        for directory in (self.directory, self.instances, self.logs):
            check_state_directory(directory)
        closed = _close_to_others(self.directory.resolve())
        return closed if reachable else 0


def _runtime_directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "flotilla" if base else Path(f"/tmp/flotilla-{os.getuid()}")
    make_private_folder(directory)
    status = directory.lstat()
    # A link proves nothing: in /tmp any user can make one.
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise FailedPrecondition(
            "the directory for the launcher's socket is open to other users",
            where=str(directory),
            why="any user who can write there could take over the socket",
            next_step=f"remove it, or run: chmod 700 {directory}",
        )
    return directory


def _close_to_others(directory: Path) -> int:
    """Take group and others out of the modes of a folder and all that it holds; return how many had them.

    The outermost folder comes first: from then on no other user reaches what is inside. Links are not followed.
    """
    closed = 0
    for _, _, files, folder in os.fwalk(directory, follow_symlinks=False):
        closed += _close(folder)
        for name in files:
            try:
                file = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
            except OSError:
                continue  # A link, a socket, or gone meanwhile: nothing that others could read.
            try:
                closed += _close(file)
            finally:
                os.close(file)
    return closed


def _close(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    if not status.st_mode & 0o077 or status.st_uid != os.geteuid():
        return False
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~0o077)
    return True
