"""The service's side of one worker: start it, talk to it, kill it.

Invariants: one request at a time; after a timeout, a cancellation or a broken channel the process is killed
together with everything that it started, so a late reply can never be taken for another sample's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from flotilla_core.errors import Unavailable
from flotilla_reward import frames
from flotilla_reward.job import Target

START_LIMIT_S = 60.0
EXIT_LIMIT_S = 5.0


class WorkerDied(Exception):
    """The process ended in the middle of a request; the message says how."""


class WorkerProcess:
    """One running worker."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loaded: set[str] = set()

    @classmethod
    async def start(cls) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Only installed packages: nothing in the current folder can pose as one of them.
                "-P",
                "-m",
                "flotilla_reward.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if sys.stderr else asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await frames.read(worker._reader)
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = await worker.kill()
            raise Unavailable(
                "a reward worker did not start",
                where=f"pid {process.pid}",
                why=f"no sign of life within {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else how,
                next_step="Read the log of the reward service.",
            ) from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    def has_loaded(self, target: Target) -> bool:
        return target.key in self._loaded

    async def load(self, target: Target, limit_s: float) -> dict[str, Any]:
        """Return the worker's reply; raise `TimeoutError` or `WorkerDied`, and then the worker is dead."""
        reply = await self._ask({"do": "load", "target": target.to_json()}, limit_s)
        if "loaded" in reply:
            self._loaded.add(target.key)
        return reply

    async def score(self, target: Target, sample: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the worker's reply; raise `TimeoutError` or `WorkerDied`, and then the worker is dead."""
        return await self._ask({"do": "score", "key": target.key, "sample": sample}, limit_s)

    async def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(frames.encode(request))
                await self._writer.drain()
                return await frames.read(self._reader)
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(await self.kill()) from error
        except (TimeoutError, asyncio.CancelledError):
            await self.kill()
            raise

    async def kill(self) -> str:
        """End the process and all that it started; says how it ended."""
        self._writer.close()
        if self._process.returncode is None:
            # A worker that ends by itself closes its channel shortly before its exit status is there.
            try:
                async with asyncio.timeout(0.2 if self._reader.at_eof() else 0):
                    await self._process.wait()
            except TimeoutError:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        async with asyncio.timeout(EXIT_LIMIT_S):
            code = await self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
