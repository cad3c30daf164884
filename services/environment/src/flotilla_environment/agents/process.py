"""The process of an agent: its start in a jail or outside of one, its end, and what it prints, into the log.

Invariants: it ends, with all that it started, when this object is closed and when the service is gone. In a jail it
reaches its gateway and no other network. Its keys are in its environment alone: no argument of a process shows them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flotilla_core.errors import InvalidConfig, Unavailable
from flotilla_core.subprocess_group import signal_child
from flotilla_environment.agents.spec import Command
from flotilla_environment.agents.variables import AGENTS_KEY
from flotilla_environment.gateway.gateway import Gateway
from flotilla_workers import keeper
from flotilla_workers.fork import signal_name
from flotilla_workers.jail import bubblewrap
from flotilla_workers.jail.jail import NO_JAIL, USERS, Cell, Jail, shown_for
from flotilla_workers.jail.level import Level

STARTER = Path(__file__).with_name("start.py")
START_LIMIT_S = 60.0
END_LIMIT_S = keeper.KILL_LIMIT_S + 5.0
MOST_TOLD_BYTES = 4096
PORT = 24711
"""The port of the gateway in a jail, whose network is its own."""
BY_SIGNAL = 128
"""A jail, and a shell, end with this and the number of the signal that ended their command."""
KERNEL = ("/proc", "/dev", "/sys")
"""Folders of the kernel, with ways to all of the host."""
OF_OTHERS = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", AGENTS_KEY)
"""Variables that clients would use beside those that an agent is given, and the key of agents of others."""
_slots = itertools.count(64 * os.getpid() + USERS // 2)
"""The users of jails: those of workers, and of other services of this host, are elsewhere."""


@dataclass(frozen=True)
class Exit:
    """The end of an agent's process."""

    status: int
    printed: str
    """The last of what it printed."""

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return self.status < 0 or BY_SIGNAL < self.status < BY_SIGNAL + signal.NSIG

    @property
    def told(self) -> str:
        """Return it for people."""
        if self.killed:
            number = -self.status if self.status < 0 else self.status - BY_SIGNAL
            ended = f"was ended by {signal_name(number)}"
        else:
            ended = f"exited with status {self.status}"
        last = self.printed.strip().rpartition("\n")[2]
        return f"{ended}: {last}" if last else ended


class AgentProcess:
    """A running agent."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket, cell: Cell) -> None:
        self._process = process
        self._channel = channel
        self._cell = cell
        self._answers: asyncio.Server | None = None
        """What answers in its jail."""
        self._closing: asyncio.Task[None] | None = None
        self._printed = bytearray()
        self.exit: asyncio.Task[Exit] = asyncio.create_task(self._ended(), name="agent")

    @classmethod
    async def start(
        cls, command: Command, jail: Jail, gateway: Gateway, variables: Callable[[str], Mapping[str, str]]
    ) -> AgentProcess:
        """Start an agent, with the variables that it has where the gateway has this URL."""
        cell = cell_of(command, jail)
        try:
            agent = await cls._made(cell)
        except OSError as error:  # no memory, no descriptor, no process more
            raise Unavailable("an agent did not start", why=str(error)) from error
        async with AsyncExitStack() as where_it_fails:
            where_it_fails.push_async_callback(agent.close)
            await agent._become(command, gateway, variables)
            where_it_fails.pop_all()
        return agent

    @classmethod
    async def _made(cls, cell: Cell) -> AgentProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ExitStack() as at_once, ExitStack() as where_it_fails:
            at_once.callback(theirs.close)
            where_it_fails.callback(ours.close)
            with cell.start([sys.executable, "-I", "-S", str(STARTER)]) as start:
                keeps = (sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()))
                process = await asyncio.create_subprocess_exec(
                    *(*keeps, ":".join(cell.groups), *start.command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env=start.environment,
                    pass_fds=(theirs.fileno(), *start.descriptors),
                    start_new_session=True,
                )
            where_it_fails.pop_all()
        return cls(process, ours, cell)

    async def _become(
        self, command: Command, gateway: Gateway, variables: Callable[[str], Mapping[str, str]]
    ) -> None:
        jailed = self._cell.level is not Level.NONE
        url = f"http://127.0.0.1:{PORT}" if jailed else await gateway.start()
        asked = {
            "port": PORT if jailed else 0,
            "folder": str(command.folder),
            "command": command.arguments,
            "variables": {**_surroundings(url), **variables(url)},
            "without": OF_OTHERS,
        }
        line = json.dumps(asked).encode() + b"\n"
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.get_running_loop().sock_sendall(self._channel, line)
                if jailed:
                    self._answers = await gateway.answer(await self._socket())
        except (OSError, EOFError, TimeoutError) as error:
            raise Unavailable("an agent did not start", why=str(error) or "it took too long") from error

    async def _socket(self) -> socket.socket:
        """Return the socket at which the jail listens."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel, ready.set)
        try:
            waits = asyncio.ensure_future(ready.wait())
            await asyncio.wait((waits, self.exit), return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            if not ready.is_set():
                raise EOFError(self.exit.result().told)
        finally:
            loop.remove_reader(self._channel)
        said, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not said or not descriptors:
            raise EOFError("it gave no socket")
        listening = socket.socket(fileno=descriptors[0])
        listening.setblocking(False)
        return listening

    async def _ended(self) -> Exit:
        printed = self._process.stderr
        assert printed is not None
        while part := await printed.read(1 << 16):
            self._printed = (self._printed + part)[-MOST_TOLD_BYTES:]
            if sys.stderr:
                with suppress(OSError):  # A log that takes nothing ends no agent.
                    await asyncio.to_thread(os.write, keeper.LOG, part)
        return Exit(await self._process.wait(), self._printed.decode(errors="replace"))

    def end(self) -> asyncio.Task[None]:
        """Begin its end, where that has not begun; what it held is free when the task is done."""
        self._closing = self._closing or asyncio.create_task(self._close(), name="end of an agent")
        return self._closing

    async def close(self) -> None:
        """End it, and free what it held; whoever closes it again waits for the same end."""
        await asyncio.shield(self.end())

    async def _close(self) -> None:
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        signal_child(self._process, signal.SIGCONT)
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await asyncio.shield(self.exit)
        except TimeoutError:
            signal_child(self._process, signal.SIGKILL)
        finally:
            self.exit.cancel()
            self._channel.close()
            if self._answers is not None:
                self._answers.close()
            await asyncio.to_thread(self._cell.close)


def cell_of(command: Command, jail: Jail) -> Cell:
    """Return the jail of an agent; raise InvalidConfig where none keeps it from the network, and it is not trusted."""
    if command.trusted or (jail.level is Level.NONE and not jail.refusal):
        return Cell(NO_JAIL)
    why = jail.refusal or (
        jail.level is not Level.NAMESPACES
        and f"an agent needs the level namespaces, and this host has {jail.level}: {jail.why_not_higher}"
    )
    if why:
        raise InvalidConfig(
            "an agent cannot run here",
            why=str(why),
            next_step="Or let the run vouch for it: environment.trusted.",
        )
    if _is_of_the_host(command.folder.resolve()):
        raise InvalidConfig(
            "an agent cannot run here",
            where=f"environment.parameters.folder: {command.folder}",
            why="a jail shows its agent the whole folder, and this one is no agent's: it is the host's, or everybody's",
            next_step="Name a folder with the files of the agent alone. Or let the run vouch for it: "
            "environment.trusted.",
        )
    return Cell(jail, [command.folder], next(_slots))


def _is_of_the_host(folder: Path) -> bool:
    """Return whether a folder would show the host, or hide what the jail has there of its own."""
    of_the_jail = [*map(Path, (*bubblewrap.SYSTEM, *KERNEL, bubblewrap.HOME))]
    holds_one = any(one.is_relative_to(folder) for one in of_the_jail)
    return holds_one or any(map(folder.is_relative_to, KERNEL)) or shown_for(folder / "any") != folder


def _surroundings(url: str) -> dict[str, str]:
    """Return the variables by which `python` is that of the service, and no proxy stands before the gateway."""
    found = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    usual: Sequence[str] = ("/usr/local/bin", "/usr/bin", "/bin")
    path = os.pathsep.join(dict.fromkeys(filter(None, (*found, *usual))))
    without = [*os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(","), urlsplit(url).hostname]
    proxies = ",".join(filter(None, without))
    return {"PATH": path, "NO_PROXY": proxies, "no_proxy": proxies}
