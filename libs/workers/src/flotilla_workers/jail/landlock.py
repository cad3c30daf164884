"""The lower level, where no namespaces can be made: Landlock and the filter of system calls.

Run as `python -I -S landlock.py WRITABLE PROCESSES READABLE... -- COMMAND...`. It reads the standard library and the
filter beside this file alone, takes rights from itself and becomes the command. With PROCESSES above 0 it bounds how
many there can be of this user: the kernel counts them with all threads that the user has on the host.

Invariants: the command reads the folders that it is given, writes in one, and in no other; it makes no socket, so it
reaches no network and no service of this host, and sends no signal but to its own. It sees no /proc. It changes neither
the mode nor the time of a file. Its folder is as large as the disk: that is why the level is the lower one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import struct
import sys
from pathlib import Path

LEAST_ABI = 6
"""The first one that fences signals."""
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
VERSION = 1
EVERY_FILE_RIGHT = (1 << 16) - 1
READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute a file, read it, and list a folder."""
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""The rights that a file can have; the others are those of folders."""
TCP = 1 << 0 | 1 << 1
ABSTRACT_SOCKETS_AND_SIGNALS = 1 << 0 | 1 << 1
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
OTHERS = 1024
"""Threads that the user's other programs may start while a jail runs, such as engines that start later."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the version of Landlock that the kernel has; 0 where it has none."""
    return max(0, int(_libc.syscall(CREATE_RULESET, None, 0, VERSION)))


def restrict(writable: str, readable: list[str], filter_program: bytes) -> None:
    """Take from this process, for ever, whatever the jail does not leave it."""
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    attributes = struct.pack("QQQ", EVERY_FILE_RIGHT, TCP, ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = _checked(_libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for path in readable:
        _allow(ruleset, path, READ)
    for path in DEVICES:
        _allow(ruleset, path, READ | 1 << 1)
    _allow(ruleset, writable, EVERY_FILE_RIGHT & ~(1 << 6 | 1 << 11 | 1 << 15))
    _checked(_libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    described = struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(instructions))
    _checked(_libc.prctl(PR_SET_SECCOMP, FILTER, described, 0, 0))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # What is not there needs no right.
    if not os.path.isdir(path):
        rights &= OF_FILES
    try:
        rule = struct.pack("=Qi", rights, place)
        _checked(_libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(place)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _bound_processes(processes: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = _threads_of_user() + OTHERS + processes
    bound = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))


def _threads_of_user() -> int:
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path("/proc", name, "status").read_text(errors="replace").splitlines()
        except OSError:
            continue
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        if int(told["Uid"].split()[0]) == os.getuid():
            found += int(told["Threads"])
    return found


def main() -> None:
    place = sys.argv.index("--")
    writable, processes, readable, command = (
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3:place],
        sys.argv[place + 1 :],
    )
    if processes:
        _bound_processes(processes)
    # By its path: no folder of packages is searched here.
    calls = runpy.run_path(str(Path(__file__).with_name("system_calls.py")))
    os.chdir(writable)
    restrict(writable, readable, calls["program"](namespaces=False))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
