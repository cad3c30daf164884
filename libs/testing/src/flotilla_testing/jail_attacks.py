"""Attacks that code in a jail may try: each snippet says REACHED where it got what it wanted.

`host` holds what there is to reach: a secret in the environment, files, sockets, processes and descriptors of the host.
Its text is the first argument. A keeper gives the others, as to each worker: its channel, and the process that it must
not outlive.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Any

from flotilla_workers.worker import Answers

PRELUDE = """
import ctypes, errno, json, os, platform, resource, select, signal, socket, struct, subprocess, sys, time
host, channel = json.loads(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def reached(what=""):
    print("REACHED", what, flush=True)
def call(of_x86, of_arm, *arguments):
    return libc.syscall(of_x86 if x86 else of_arm, *arguments)
def allowed(of_x86, of_arm, *arguments):
    if call(of_x86, of_arm, *arguments) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        reached(os.strerror(ctypes.get_errno()))
def tries(*actions):
    for action in actions:
        try:
            action()
        except (OSError, MemoryError, ValueError) as error:
            print("held:", error)
        else:
            reached()
"""

ATTACKS = {
    # Files
    "write to the root folder": 'tries(lambda: open("/made", "w"))',
    "write beside the devices": 'tries(lambda: open("/dev/made", "w"))',
    "write to programs of the system": 'tries(lambda: open("/usr/bin/made", "w"), lambda: os.remove("/usr/bin/env"))',
    "add a .pth to the packages": 'tries(lambda: open(host["packages"] + "/made.pth", "w"))',
    "change the code that judges": 'tries(lambda: open(host["grader"], "a"), lambda: os.remove(host["grader"]))',
    "change the file of the reward": 'tries(lambda: open(host["shown"] + "/reward.py", "a"))',
    "make files grant it rights": 'tries(lambda: os.chmod(host["shown"] + "/reward.py", 0o6777))',
    "read a file of the host": 'tries(lambda: open(host["secret_file"]).read())',
    "read it by a link": 'os.symlink(host["secret_file"], "link")\ntries(lambda: open("link").read())',
    "read it by a hard link": 'tries(lambda: os.link(host["secret_file"], "hard"))',
    "list the folder of the host's files": """
try:
    "secret" in os.listdir(os.path.dirname(host["secret_file"])) and reached()
except OSError as error:
    print("held:", error)""",
    "read the passwords": 'tries(lambda: open("/etc/shadow").read())',
    "read what its folder hides": """
for name in (".env", ".keys/key"):
    try:
        told = open(f"{host['shown']}/{name}").read()
    except OSError as error:
        print("held:", error)
    else:
        # The lower level shows a folder whole.
        host["namespaces"] and reached(told)""",
    "read what the kernel shows to root": """
for name in os.listdir("/proc") if host["namespaces"] else ():
    mode = os.lstat(f"/proc/{name}").st_mode
    if mode & 0o170000 == 0o100000 and not mode & 4:
        tries(lambda: open(f"/proc/{name}", "rb").read(1))""",
    "leave by the folders above": 'tries(lambda: open("../" * 30 + host["secret_file"][1:]).read())',
    "open by handle": 'allowed(304, 265, -100, b"x" * 64, 0)',
    "write to settings of the kernel": 'tries(lambda: open("/proc/sys/kernel/core_pattern", "w"))',
    "write to devices of the kernel": 'tries(lambda: open("/sys/power/state", "w"))',
    "read memory of the machine": 'tries(lambda: open("/dev/mem", "rb").read(1), lambda: open("/dev/kmsg").read(1))',
    "make a device": 'tries(lambda: os.mknod("device", 0o600 | 0o060000, os.makedev(254, 0)))',
    "change its root": "allowed(161, 51, b'/')",
    # Environment and descriptors
    "read its own environment": 'host["secret"] in "".join(os.environ.values()) and reached()',
    "read the environment of its first process": """
try:
    host["secret"].encode() in open("/proc/1/environ", "rb").read() and reached()
except OSError as error:
    print("held:", error)""",
    "read the environment of its parent": """
try:
    host["secret"].encode() in open(f"/proc/{os.getppid()}/environ", "rb").read() and reached()
except OSError as error:
    print("held:", error)""",
    "use a descriptor that leaked": """
for number in {*range(3, 1024)} - {channel}:
    try:
        os.fstat(number)
    except OSError:
        continue
    reached(number)""",
    "read its own output before its keeper does": """
try:
    taken = os.open("/proc/self/fd/1", os.O_RDONLY)
except OSError as error:
    print("held:", error)
else:
    taker = os.fork()
    while taker == 0:
        os.read(taken, 1)
    for _ in range(5000):
        os.write(1, b"x")
        os.sched_yield()
    os.kill(taker, signal.SIGKILL)
    os.waitpid(taker, 0)
    signal.alarm(20)  # Nobody would pass on what it prints then, and it would wait for ever.
    os.write(1, b"x" * (1 << 17) + b"\\n")""",
    # Processes
    "see processes of the host": """
try:
    names = os.listdir("/proc")
except OSError as error:
    names = [str(error)]
for name in names:
    if name.isdigit() and int(name) > 1:
        try:
            told = open(f"/proc/{name}/cmdline").read()
        except OSError:
            continue
        host["marked"] in told.replace("\\0", " ").split() and reached(told)""",
    "signal a process of the host": 'tries(lambda: os.kill(host["process"], 0))',
    "kill everything": """
try:
    os.kill(-1, signal.SIGTERM)
except OSError as error:
    print("held:", error)""",
    "trace its parent": "allowed(101, 117, 16, os.getppid(), 0, 0)",
    "trace its first process": "allowed(101, 117, 0x4206, 1, 0, 0)",
    "read memory of its parent": """
local = ctypes.create_string_buffer(8)
allowed(310, 270, os.getppid(), struct.pack("PN", ctypes.addressof(local), 8), 1, struct.pack("PN", 4096, 8), 1, 0)""",
    "write memory of its parent": """
local = ctypes.create_string_buffer(8)
allowed(311, 271, os.getppid(), struct.pack("PN", ctypes.addressof(local), 8), 1, struct.pack("PN", 4096, 8), 1, 0)
tries(lambda: open(f"/proc/{os.getppid()}/mem", "r+b"))""",
    "end or stop its parent": """
parent = os.getppid()
for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    try:
        os.kill(parent, number)
    except OSError as error:
        print("held:", error)
os.getppid() == parent or reached("it ended")""",
    "take a descriptor of its parent": "allowed(438, 438, os.getppid(), 0, 0)",
    "change the limits and the turn of others": """
child = os.fork()
if child == 0:
    time.sleep(600)
for one in (host["process"], os.getppid(), child):
    tries(
        lambda: resource.prlimit(one, resource.RLIMIT_NOFILE, (8, 8)),
        lambda: os.setpriority(os.PRIO_PROCESS, one, 19),
        lambda: os.sched_setaffinity(one, {*os.sched_getaffinity(0)}),
        lambda: os.sched_setscheduler(one, os.SCHED_IDLE, os.sched_param(0)),
    )
    allowed(251, 30, 1, one, 3 << 13)
tries(lambda: os.setpriority(os.PRIO_USER, 0, 19))""",
    "raise its own limits": "tries(lambda: resource.setrlimit(resource.RLIMIT_DATA, (-1, -1)))",
    "raise its priority": "tries(lambda: os.nice(-5))",
    "become root": "tries(*[lambda: os.setuid(0)] * (os.getuid() != 0))",
    "become root by a program": """
before = os.getuid()
told = subprocess.run(["/usr/bin/su", "-c", "id -u"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
before and told.stdout.strip() == "0" and reached()""",
    # Kernel
    "make a user namespace": "allowed(272, 97, 0x10000000)",
    "make a mount namespace": "allowed(272, 97, 0x20000)",
    "make one by clone": "allowed(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "make one by clone3": "allowed(435, 435, struct.pack('11Q', 0x10000000, *[0] * 10), 88)",
    "enter a namespace": "allowed(308, 268, 0, 0)",
    "mount": "allowed(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "mount by the new calls": "allowed(430, 430, b'tmpfs', 0)",
    "a queue of messages": "allowed(240, 180, b'made', os.O_CREAT | os.O_RDWR, 0o600, 0)",
    "io_uring": "allowed(425, 425, 8, ctypes.create_string_buffer(120))",
    "keyctl": "allowed(250, 219, 0, -3, 0)",
    "add_key": "allowed(248, 217, b'user', b'made', b'x', 1, -3)",
    "userfaultfd": "allowed(323, 282, 1)",
    "bpf": "allowed(321, 280, 0, ctypes.create_string_buffer(72), 72)",
    "perf_event_open": "allowed(298, 241, ctypes.create_string_buffer(112), 0, -1, -1, 0)",
    "load a module": "allowed(313, 273, 0, b'', 0)",
    "read the kernel's log": "allowed(103, 116, 3, ctypes.create_string_buffer(64), 64)",
    "set the clock": "allowed(227, 112, 0, struct.pack('qq', 1, 0))",
    "name the host": "allowed(170, 161, b'made', 4)",
    "type into the terminal": "allowed(16, 29, 0, 0x5412, b'x')",
    # Network and other ways to talk
    "TCP to the host": 'tries(lambda: socket.create_connection(("127.0.0.1", host["tcp"]), 2))',
    "TCP to the host by IPv6": 'tries(lambda: socket.create_connection(("::1", host["tcp_6"]), 2))',
    # Nobody answers: the test looks whether it arrived.
    "UDP to the host": """
try:
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"REACHED", ("127.0.0.1", host["udp"]))
except OSError as error:
    print("held:", error)""",
    "a socket in a folder of the host": 'tries(lambda: socket.socket(socket.AF_UNIX).connect(host["unix"]))',
    "a socket or a pipe beside its functions": """
tries(
    lambda: socket.socket(socket.AF_UNIX).connect(host["shown"] + "/socket"),
    lambda: os.open(host["shown"] + "/pipe", os.O_WRONLY | os.O_NONBLOCK),
)""",
    "an abstract socket of the host": 'tries(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + host["abstract"]))',
    "a socket to the machine below": "tries(lambda: socket.socket(40, socket.SOCK_STREAM))",
    "a raw socket": "tries(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))",
    "a socket of the link": "tries(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
    "a socket of the kernel's cryptography": "tries(lambda: socket.socket(38, socket.SOCK_SEQPACKET))",
    "shared memory of the host": """
place = call(29, 194, host["shared_memory"], 0, 0)
place >= 0 and reached(place)""",
    "shared memory of the host by its number": """
host["namespaces"] or call(31, 195, host["shared_memory_number"], 0, 0) == 0 and reached()
host["namespaces"] or allowed(31, 195, host["shared_memory_number"], 2, ctypes.create_string_buffer(256))""",
    # Too much
    "memory": "tries(lambda: bytearray(host['memory'] + (1 << 20)))",
    "memory of many processes": """
reads, writes = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (host["memory"] // 6)
        os.write(writes, b"x")
        time.sleep(600)
os.close(writes)
holding, ended = 0, 0
while holding + ended < 8:
    ended += os.waitpid(-1, os.WNOHANG)[0] != 0
    holding += len(os.read(reads, 1)) if select.select([reads], [], [], 0.01)[0] else 0
# Without groups of the kernel each process is bounded alone.
host["groups"] and not ended and os.waitpid(-1, os.WNOHANG)[0] == 0 and reached(holding)""",
    "a long file": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tries(lambda: open("long", "wb").truncate(host["tmp"] + 1))""",
    "a full disk": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written = 0
try:
    for number in range(host["tmp"] // (8 << 20) + 2):
        with open(f"part-{number}", "wb") as file:
            written += file.write(bytes(8 << 20))
except OSError as error:
    print("held:", error)
host["namespaces"] and written > host["tmp"] and reached(written)""",
    "shared memory without end": """
try:
    with open("/dev/shm/much", "wb") as file:
        for _ in range(host["tmp"] // (8 << 20) + 2):
            file.write(bytes(8 << 20))
    reached()
except OSError as error:
    print("held:", error)""",
    "processes without end": """
made = 0
try:
    # The lower level bounds them together with those of the service's user, where that is not root.
    while made < host["processes"] + (64 if host["namespaces"] else 1200):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
    reached(made)
except OSError as error:
    print("held:", error)""",
    "many small files": """
made = 0
try:
    for made in range(4_000):
        open(f"small-{made}", "w").close()
except OSError as error:
    print("held:", error)
print("made", made)""",
    "a stack without end": """
child = os.fork()
if child == 0:
    def deeper():
        return [*map(lambda _: deeper(), (0,))]
    sys.setrecursionlimit(1 << 30)
    deeper()
print("ended", os.waitpid(child, 0)[1])""",
    "a core dump": """
child = os.fork()
if child == 0:
    os.abort()
os.WCOREDUMP(os.waitpid(child, 0)[1]) and reached()""",
}


def forked(_: object) -> Answers:
    """Return what runs code in a worker that a zygote forked; its channel is its only descriptor."""

    def run(question: dict[str, Any]) -> None:
        (channel,) = _sockets()
        sys.argv = ["-c", question["host"], str(channel)]
        exec(compile(question["code"], "attack", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()

    return run


def _sockets() -> list[int]:
    """Return the sockets among the first descriptors."""
    return [number for number in range(1024) if _is_socket(number)]


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
