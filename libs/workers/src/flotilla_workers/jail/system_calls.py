"""The filter of system calls: what no verdict needs, and what the kernel's namespaces do not fence.

Invariants: the filter names what is refused, and everything else passes, so that Python, numpy and compilers run. No
process changes the limits or the turn of another one by its number, be it of the same user. What is refused gives an
error, not a signal: a library that tries goes on without. A call by another ABI than the machine's own is refused,
because its numbers mean other calls. Only the standard library is imported here: a jail starts with this.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ANY_BIT = 0xFFFFFFFF
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Places in what the kernel shows to a filter."""
X32 = 0x40000000
"""The bit of the numbers of x86-64's second ABI, which has the same name for the kernel."""
NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that make a namespace: mount, cgroup, uts, ipc, user, pid and net."""
FENCED_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6, which a network namespace fences. Others reach beyond it, as vsock the host of a machine."""
PUSH_INPUT = (0x5412, 0x541C)
"""`TIOCSTI` and `TIOCLINUX`: they write into the terminal as if its user had typed."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, arm64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "mq_open": (240, 180),
    "ioprio_set": (251, 30),
}
OF_ITSELF: dict[str, tuple[int, int, int]] = {
    # name: (x86-64, arm64, arguments that are to be 0: those of another process of the same user are not)
    "prlimit64": (302, 261, 1),
    "sched_setaffinity": (203, 122, 1),
    "sched_setparam": (142, 118, 1),
    "sched_setscheduler": (144, 119, 1),
    "sched_setattr": (314, 274, 1),
    "setpriority": (141, 140, 2),
}
ONLY_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154}
UNFENCED: dict[str, tuple[int | None, int | None]] = {
    # What Landlock lets pass: it changes files of the host that the user owns, and memory that the user shares.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
}


@dataclass(frozen=True)
class Machine:
    """The numbers that differ between architectures."""

    audit: int
    """The name of the architecture for the kernel."""
    column: int
    clone: int
    clone3: int
    socket: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 0, 56, 435, 41, 16),
    "aarch64": Machine(0xC00000B7, 1, 220, 435, 198, 29),
}


def program(*, namespaces: bool, machine: str = "") -> bytes:
    """Return the filter as the kernel takes it; without namespaces it refuses what these would fence, sockets too.

    Pairs of sockets can always be made. Raise LookupError on an architecture whose numbers are not written down here.
    """
    name = machine or platform.machine()
    if name not in MACHINES:
        raise LookupError(f"the system calls of {name} are not known")
    return b"".join(
        struct.pack("HBBI", *instruction) for instruction in _instructions(MACHINES[name], namespaces)
    )


def _instructions(machine: Machine, namespaces: bool) -> Iterator[tuple[int, int, int, int]]:
    families = FENCED_FAMILIES if namespaces else ()
    named = REFUSED if namespaces else REFUSED | UNFENCED
    refused = [number for numbers in named.values() if (number := numbers[machine.column]) is not None]
    foreign = [(JUMP_EQUAL, 1, 0, machine.audit), _error(errno.ENOSYS), (LOAD_WORD, 0, 0, NUMBER)]
    if not machine.column:
        refused += ONLY_X86.values()
        foreign += [(JUMP_AT_LEAST, 0, 1, X32), _error(errno.ENOSYS)]
    yield (LOAD_WORD, 0, 0, ARCHITECTURE)
    yield from foreign
    for number in refused:
        yield from ((JUMP_EQUAL, 0, 1, number), _error(errno.EPERM))
    # C libraries fall back to `clone`, whose flags a filter can read.
    yield from ((JUMP_EQUAL, 0, 1, machine.clone3), _error(errno.ENOSYS))
    yield from _by_argument(machine.clone, 0, [(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES), _error(errno.EPERM)])
    asked = [step for code in PUSH_INPUT for step in ((JUMP_EQUAL, 0, 1, code), _error(errno.EPERM))]
    yield from _by_argument(machine.ioctl, 1, asked)
    for *numbers, arguments in OF_ITSELF.values():
        for argument in range(arguments):
            steps = [(JUMP_ANY_BIT, 0, 1, ANY_BIT), _error(errno.EPERM)]
            yield from _by_argument(numbers[machine.column], argument, steps)
    made = [step for family in families for step in ((JUMP_EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW))]
    yield from _by_argument(machine.socket, 0, [*made, _error(errno.EAFNOSUPPORT)])
    yield (RETURN, 0, 0, ALLOW)


def _by_argument(
    number: int, argument: int, steps: list[tuple[int, int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Look at the lower half of an argument of this call, and at the number again for what follows."""
    yield (JUMP_EQUAL, 0, len(steps) + 2, number)
    yield (LOAD_WORD, 0, 0, ARGUMENTS + 8 * argument)
    yield from steps
    yield (LOAD_WORD, 0, 0, NUMBER)


def _error(number: int) -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, ERROR | number)
