"""No attack reaches anything from within a jail, at each level that this host has, and the host is well after each.

A keeper starts each, as it starts a worker, and ends what it leaves behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing import jail_attacks
from flotilla_testing.jail_attacks import ATTACKS, PRELUDE
from flotilla_workers import keeper
from flotilla_workers.functions import Target
from flotilla_workers.jail import groups
from flotilla_workers.jail.jail import Bounds, Cell, Jail, candidates, why_not
from flotilla_workers.jail.level import Level
from flotilla_workers.zygotes import Zygotes, fork_here

SECRET = f"secret-{secrets.token_hex(8)}"
BOUNDS = Bounds(memory_bytes=1 << 28, processes=48, tmp_bytes=32 << 20)
IPC_CREAT = 0o1000
LIMIT_S = 60.0
FORKED = f"{jail_attacks.__name__}:forked"
SLOTS = itertools.count(64 * os.getpid())
WAYS = {
    "namespaces": (Level.NAMESPACES, False),
    "forked": (Level.NAMESPACES, True),
    "landlock": (Level.LANDLOCK, False),
}
"""Levels of jails, and whether a zygote forks what runs in them."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that any user can reach, as those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="flotilla-escapes-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def host(place: Path) -> Iterator[dict[str, Any]]:
    """All that there is to reach."""
    folder = place / "host"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    shown = folder / "shown"
    shown.mkdir()
    (shown / "reward.py").write_text("")
    (shown / ".env").write_text(SECRET)
    (shown / ".keys").mkdir()
    (shown / ".keys" / "key").write_text(SECRET)
    tcp = socket.create_server(("127.0.0.1", 0))
    try:
        tcp_6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        tcp_6 = tcp  # The kernel has no IPv6, or no address of it.
    udp = socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    udp.setblocking(False)
    unix, beside, abstract = (socket.socket(socket.AF_UNIX) for _ in range(3))
    unix.bind(str(folder / "socket"))
    beside.bind(str(shown / "socket"))
    abstract.bind("\0" + SECRET[:20])
    os.mkfifo(shown / "pipe")
    for path, mode in ((shown / "socket", 0o777), (shown / "pipe", 0o666)):
        path.chmod(mode)
    pipe = os.open(shown / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for listening in (unix, beside, abstract):
        listening.listen()
    libc = ctypes.CDLL(None)
    key = secrets.randbelow(1 << 30)
    shared = libc.shmget(key, 4096, IPC_CREAT | 0o666)
    process = subprocess.Popen(["sleep", "600"])
    os.environ["SECRET"] = SECRET
    group = groups.make(BOUNDS.memory_bytes, BOUNDS.processes)
    if group is not None:
        group.close()
    yield {
        "groups": group is not None,
        "ends_whole": group is not None and len(group.folders) == 1,
        "secret": SECRET,
        "secret_file": str(folder / "secret"),
        "shown": str(shown),
        "packages": sysconfig.get_path("purelib"),
        "grader": keeper.__file__,
        "tcp": tcp.getsockname()[1],
        "tcp_6": tcp_6.getsockname()[1],
        "udp": udp.getsockname()[1],
        "unix": str(folder / "socket"),
        "abstract": SECRET[:20],
        "shared_memory": key,
        "shared_memory_number": shared,
        "process": process.pid,
        "marked": "600",
        "memory": BOUNDS.memory_bytes,
        "tmp": BOUNDS.tmp_bytes,
        "processes": BOUNDS.processes,
        "heard": udp,
    }
    del os.environ["SECRET"]
    assert process.poll() is None, "an attack ended a process of the host"
    process.kill()
    process.wait()
    libc.shmctl(shared, 0, None)
    os.close(pipe)
    for one in (tcp, tcp_6, udp, unix, beside, abstract):
        one.close()


@pytest.fixture(scope="module", params=[*WAYS], ids=str)
def jail(request: pytest.FixtureRequest) -> Jail:
    level, forks = WAYS[request.param]
    tried = {one: why_not(one) for one in candidates(Jail(Level.NONE, bounds=BOUNDS)) if one.level is level}
    for one, why in tried.items():
        if not why and forks and not asyncio.run(fork_here(one)):
            pytest.skip("this host forks no workers into jails")
        if not why:
            return replace(one, forks=forks)
    pytest.skip(f"this host has no such jail: {', '.join(tried.values())}")


class Forked:
    """Workers that one zygote forks: what they print is in one file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._zygotes = Zygotes()

    def run(self, jail: Jail, code: str, told: dict[str, Any]) -> str:
        """Return what code prints in a jail."""
        before = self._log.stat().st_size if self._log.exists() else 0
        asyncio.run(self._run(jail, told["shown"], {"code": code, "host": json.dumps(told)}))
        return self._log.read_bytes()[before:].decode()

    async def _run(self, jail: Jail, shown: str, question: dict[str, Any]) -> None:
        with self._printing_there():
            worker = await self._zygotes.worker(jail, FORKED, [Path(shown)], SLOTS)
        target = Target("builtin", "attack")
        assert await worker.load(target) is None
        assert await worker.ask(target, question, LIMIT_S, lambda said: said) is None
        await worker.kill()

    @contextmanager
    def _printing_there(self) -> Iterator[None]:
        kept = os.dup(2)
        with self._log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)

    def stop(self) -> None:
        asyncio.run(self._zygotes.stop())


@pytest.fixture(scope="module")
def forked(place: Path) -> Iterator[Forked]:
    forked = Forked(place / "log")
    yield forked
    forked.stop()


Run = Callable[[Jail, str, dict[str, Any]], str]


@pytest.fixture
def run(forked: Forked) -> Run:
    """Run code in the jail; its keeper passes on what it prints, as to the log of a service."""

    def run(jail: Jail, code: str, host: dict[str, Any]) -> str:
        told = {name: value for name, value in host.items() if name != "heard"}
        told["namespaces"] = jail.level is Level.NAMESPACES
        leaked = os.open(host["secret_file"], os.O_RDONLY)
        os.set_inheritable(leaked, True)
        try:
            return (forked.run if jail.forks else started)(jail, PRELUDE + code, told)
        finally:
            os.close(leaked)

    return run


def started(jail: Jail, code: str, told: dict[str, Any]) -> str:
    """Return what a new interpreter prints that runs code in a jail."""
    ours, channel = socket.socketpair()
    cell = Cell(jail, [Path(told["shown"])])
    command = [sys.executable, "-I", "-c", code, json.dumps(told)]
    try:
        with cell.start(command) as start:
            kept = [sys.executable, "-I", "-S", keeper.__file__, str(channel.fileno()), ":".join(cell.groups)]
            return subprocess.run(
                [*kept, *start.command],
                env=start.environment,
                pass_fds=(channel.fileno(), *start.descriptors),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            ).stderr
    finally:
        cell.close()
        ours.close()
        channel.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_reaches_anything(run: Run, jail: Jail, attack: str, host: dict[str, Any]) -> None:
    said = run(jail, f"{ATTACKS[attack]}\nprint('OVER')", host)
    assert "REACHED" not in said, said
    assert "Traceback" not in said, said
    if host["ends_whole"] and attack == "memory of many processes":
        assert said == "", "a group of version 2 ends as a whole"
    else:
        # So the host was well after the attack before this one.
        assert said.endswith("OVER\n"), f"the attack did not come to its end: {said}"
    with pytest.raises(BlockingIOError):
        host["heard"].recv(100)


def test_the_host_is_well_after_all_attacks(run: Run, jail: Jail, host: dict[str, Any]) -> None:
    assert run(jail, "print(open(host['shown'] + '/reward.py').read() == '')", host) == "True\n"


def test_a_flood_of_output_reaches_the_log_within_its_bound_and_says_what_is_missing(
    run: Run, jail: Jail, host: dict[str, Any]
) -> None:
    flood = "for _ in range(16):\n    sys.stdout.write('x' * (1 << 20))\nsys.stdout.flush()\nprint('OVER')"
    told = run(jail, flood, host)
    assert keeper.MOST_PRINTED_BYTES <= len(told) < 4 * keeper.MOST_PRINTED_BYTES
    assert "bytes that a worker printed are left out]" in told


def test_nothing_that_was_left_is_found_by_the_next_one_and_links_lead_to_no_removal(
    run: Run, jail: Jail, host: dict[str, Any]
) -> None:
    left = """
home = os.environ["HOME"]
os.symlink(os.path.dirname(host["secret_file"]), os.path.join(home, "link"))
for folder in (home, "/dev/shm"):
    try:
        open(os.path.join(folder, "left"), "w").close()
    except OSError as error:
        print("held:", error)
if os.fork() == 0:
    time.sleep(600)
print("left")
"""
    found = """
for folder in (os.environ["HOME"], "/tmp", "/dev/shm"):
    try:
        "left" in os.listdir(folder) and reached(folder)
    except OSError as error:
        print("held:", error)
"""
    assert run(jail, left, host).endswith("left\n")
    assert "REACHED" not in run(jail, found, host)
    assert Path(host["secret_file"]).read_text() == SECRET


def test_functions_are_read_where_their_owner_alone_may_go(
    run: Run, jail: Jail, host: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "private" / "functions"
    folder.mkdir(parents=True)
    file = folder / "reward.py"
    file.write_text("1")
    for path, mode in ((file, 0o600), (folder, 0o700), (folder.parent, 0o700)):
        path.chmod(mode)
    done = run(jail, "print(open(host['shown'] + '/reward.py').read())", host | {"shown": str(folder)})
    assert done == "1\n", done


def test_the_folder_in_which_a_command_is_called_is_shown_to_nobody(tmp_path: Path) -> None:
    asked = "from flotilla_workers.jail import jail; print(*jail.interpreter_folders(), sep='\\n')"
    (tmp_path / "called.py").write_text(asked)
    for how in (["called.py"], ["-m", "called"]):
        shown = subprocess.run(
            [sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert sys.prefix in shown.splitlines() and not [
            one for one in shown.splitlines() if tmp_path.is_relative_to(one)
        ]


def test_threads_of_the_user_of_the_service_are_not_those_of_a_jail(
    run: Run, jail: Jail, host: dict[str, Any]
) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(2 * BOUNDS.processes)]
    for one in threads:
        one.start()
    try:
        code = "import threading\nmade = threading.Thread(target=print, args=('made',))\nmade.start()\nmade.join()"
        assert run(jail, code, host) == "made\n"
    finally:
        over.set()


def test_what_a_verdict_needs_works(run: Run, jail: Jail, host: dict[str, Any]) -> None:
    code = """
import sqlite3, tempfile
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("1")
told = subprocess.run([sys.executable, "-I", "-c", "print(6 * 7)"], capture_output=True, text=True).stdout
with open("made", "w") as file:
    print(told.strip(), file.write("12"), open(host["shown"] + "/reward.py").read() == "")
"""
    done = run(jail, code, host)
    assert done == "42 2 True\n", done
