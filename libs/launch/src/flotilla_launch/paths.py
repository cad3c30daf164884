"""Where one stack keeps its files on this host.

Invariant: everything that a stack writes is below `<state_dir>/<name>/`, except the supervisor's unix socket,
whose path must be short and therefore lies in the user's runtime directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from flotilla_core.errors import FailedPrecondition


@dataclass(frozen=True)
class StackPaths:
    """The files of one stack."""

    directory: Path
    """`<state_dir>/<name>`, absolute."""

    @classmethod
    def of(cls, state_dir: Path, name: str) -> StackPaths:
        return cls((state_dir / name).absolute())

    @property
    def launcher_file(self) -> Path:
        return self.directory / "launcher.json"

    @property
    def stack_file(self) -> Path:
        return self.directory / "stack.yaml"

    @property
    def processes_file(self) -> Path:
        return self.directory / "processes.json"

    @property
    def claim_file(self) -> Path:
        """Locked by whoever may change the stack's processes."""
        return self.directory / "launcher.lock"

    @property
    def up_lock_file(self) -> Path:
        """Locked while a `flotilla up` or `flotilla down` is at work."""
        return self.directory / "up.lock"

    @property
    def instances(self) -> Path:
        return self.directory / "instances"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def nats(self) -> Path:
        return self.directory / "nats"

    def announce_file(self, name: str) -> Path:
        """Written by the service itself as soon as its port is open."""
        return self.instances / f"{name}.json"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def socket(self) -> Path:
        """The supervisor's socket, named by a digest of the stack's directory: no two stacks share it."""
        digest = hashlib.blake2b(str(self.directory.resolve()).encode(), digest_size=8).hexdigest()
        return _runtime_directory() / f"{digest}.sock"

    def make(self) -> None:
        for directory in (self.directory, self.instances, self.logs):
            directory.mkdir(parents=True, exist_ok=True)


def _runtime_directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "flotilla" if base else Path(f"/tmp/flotilla-{os.getuid()}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise FailedPrecondition(
            "the directory for the launcher's socket is open to other users",
            where=str(directory),
            why="whoever can write there could take over the socket",
            next_step=f"remove it, or run: chmod 700 {directory}",
        )
    return directory
