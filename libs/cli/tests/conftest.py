"""The `flotilla` command in an empty directory, and the coordinator that it calls."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from flotilla_cli.main import main
from flotilla_testing.credentials import credential
from flotilla_testing.servers import serving

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """What a command closes to others is its own matter: later tests of this process write as they would alone."""
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def flotilla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flotilla", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a coordinator in the background, with other services at its address, and names it to the command."""
    monkeypatch.chdir(tmp_path)
    own = credential(Path(".flotilla/local"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = AsyncExitStack()

    def start(*servicers: object) -> str:
        begun = servers.enter_async_context(serving(*servicers, credential=own))
        address = asyncio.run_coroutine_threadsafe(begun, loop).result(10)
        monkeypatch.setenv("FLOTILLA_COORDINATOR", address)
        return address

    yield start
    asyncio.run_coroutine_threadsafe(servers.aclose(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
