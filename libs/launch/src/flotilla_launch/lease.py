"""The lease under which the processes of a stack run.

    python -I -S lease.py PARENT DIRECTORY SECONDS COMMAND...

The launcher and the guardian of a stack each hold a lock file for as long as they live. This script leaves a small
watcher process behind and then becomes the command. When neither lock was held for so many seconds, the watcher ends
the whole stack in order, and its own service by force where even that fails.
Invariants: only the standard library is used, so the watcher is small and needs no installed package; a command whose
launcher died before it began is never run; the command keeps the process id that the launcher started.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
import time

LOCKS = ("launcher.lock", "guardian.lock")
"""The lock files in the directory of the stack. The kernel frees a lock when its holder dies, however that happens."""
LEASE_S = 20.0
"""The length of the lease: longer than the guardian takes to start a launcher, or a launcher its guardian."""
_POLL_S = 1.0
# struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid.
_FLOCK = "hhqqi"


def lock(descriptor: int) -> bool:
    """Return whether the lock file was free and is ours from now on."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock())
    except BlockingIOError:
        return False
    return True


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock file; asking does not take it, so it disturbs no other user."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock())
    return bool(struct.unpack_from(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def main() -> None:
    """Leave a watcher behind, and become the command."""
    parent, directory, seconds, *command = sys.argv[1:]
    if os.getppid() != int(parent):
        os._exit(1)
    # Twice, so that the watcher is no child of the service, which may wait for any child of its own.
    if os.fork() == 0:
        if os.fork() == 0:
            _watch(directory, float(seconds))
        os._exit(0)
    os.wait()
    os.execvp(command[0], command)


def _flock() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _watch(directory: str, lease_s: float) -> None:
    # Opened once: a directory that is removed under a running stack frees no lock.
    descriptors = [os.open(os.path.join(directory, name), os.O_RDWR | os.O_CREAT, 0o600) for name in LOCKS]
    unheld = 0
    while True:
        time.sleep(_POLL_S)
        # Looks are counted, not seconds: a machine that slept gives the launcher its whole time.
        unheld = 0 if any(map(is_locked, descriptors)) else unheld + 1
        if unheld * _POLL_S < lease_s:
            continue
        # It kills this process, too. Another launcher may also have come to look after the stack meanwhile.
        os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "flotilla_launch.cleanup", directory])
        if not any(map(is_locked, descriptors)):
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
