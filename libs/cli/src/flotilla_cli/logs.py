"""Implements `flotilla logs`, from files on this machine, from services on other machines, and from Kubernetes.

Invariants: a service whose log is on this machine is never called, so the logs of a stopped or hanging stack can be
read. Where one log cannot be read, the others are shown.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from flotilla.common.v1.operate_pb2 import TailLogRequest
from flotilla_cli.options import Coordinator, Json, Stack, wait
from flotilla_cli.output import print_json_line, print_line, say
from flotilla_cli.services import ServiceAddress, find_services
from flotilla_cli.stack import stack_paths
from flotilla_core import rpc
from flotilla_core.errors import FlotillaError, NotFound
from flotilla_launch.kubernetes.engine import KubernetesEngine, PodLog
from flotilla_launch.launcher import KUBERNETES, launcher_of
from flotilla_launch.logs import read_logs

Source: TypeAlias = ServiceAddress | PodLog

_FIND_S = 4.0
_FIRST_LINE_S = 5.0
_PAST_ENDS_S = 0.5
"""The silence after which the past of a log counts as complete; a later line is printed as it arrives."""
_FOLLOW_S = 24 * 3600.0

Line: TypeAlias = tuple[str, str]
"""The name of a log, and one line of it."""
Came: TypeAlias = "asyncio.Queue[Line | FlotillaError | None]"
"""The lines of logs; where a log ends, None or the error."""


def logs(
    name: Annotated[
        str | None,
        typer.Argument(help="Process, service or kind of services; all, merged by time, when left out."),
    ] = None,
    stack: Stack = None,
    coordinator: Coordinator = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, max=100_000, help="Past lines to show.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Show the logs of a stack, also of a stopped one and of services on other machines."""
    wait(_show(name, stack, coordinator, lines, follow=follow, as_json=as_json), interrupted="")


async def _show(
    name: str | None, stack: str | None, coordinator: str | None, lines: int, *, follow: bool, as_json: bool
) -> None:
    """Print the lines; with `--json`, one object per line, because a log has no end."""
    elsewhere: dict[str, Source] = {**await _of_pods(stack)} if coordinator is None else {}
    # Files of a stack that is in pods are those of an earlier start on this machine.
    here = {} if elsewhere else _files(stack)
    if not elsewhere and name not in here:
        elsewhere = {**await _elsewhere(stack, coordinator, here)}
    names = _chosen(name, stack, here, elsewhere)
    width = max(map(len, names))
    files = {one: here[one] for one in names if one in here}
    sources = [elsewhere[one] for one in names if one in elsewhere]
    async with aclosing(_read(files, sources, lines, follow=follow)) as found:
        async for source, line in found:
            if as_json:
                print_json_line({"name": source, "line": line})
            else:
                print_line(line if len(names) == 1 else f"{source:{width}} | {line}")
            if follow:
                sys.stdout.flush()


def _files(stack: str | None) -> dict[str, Path]:
    """Return the log files of this machine, by the name of the process."""
    paths = stack_paths(stack)
    found = {path.stem: path for path in sorted(paths.logs.glob("*.log"))}
    return found | {"nats": paths.nats_log} if paths.nats_log.exists() else found


async def _of_pods(stack: str | None) -> dict[str, PodLog]:
    """Return the logs of the pods of a stack on Kubernetes; none for one that is elsewhere."""
    paths = stack_paths(stack)
    return await KubernetesEngine(paths).logs() if launcher_of(paths).name == KUBERNETES else {}


async def _elsewhere(
    stack: str | None, coordinator: str | None, here: dict[str, Path]
) -> dict[str, ServiceAddress]:
    """Return the services without a log file here; none where no coordinator answers."""
    try:
        async with asyncio.timeout(_FIND_S if here else None):
            services = await find_services(stack, coordinator)
    except (FlotillaError, TimeoutError):
        if coordinator is not None and not here:
            raise
        return {}
    return {name: service for name, service in services.items() if name not in here}


def _chosen(
    name: str | None, stack: str | None, here: dict[str, Path], elsewhere: dict[str, Source]
) -> list[str]:
    """Return the names of all logs, or the one that was named; those of all replicas where it names their kind."""
    known = [*here, *elsewhere]
    paths = stack_paths(stack)
    if not known:
        raise NotFound(
            f"stack {paths.directory.name!r} has no logs",
            where=str(paths.logs),
            why="it was never started here",
            next_step="start it: flotilla up",
        )
    if name is None:
        return known
    if name in known:
        return [name]
    of_kind = [one for one in known if re.fullmatch(rf"{re.escape(name)}-\d+", one)]
    if not of_kind:
        raise NotFound(
            f"there is no log of {name!r}",
            where=str(paths.logs),
            why="no file here has that name, and no running service of another machine",
            next_step=f"name one of: {', '.join(known)}",
        )
    return of_kind


async def _read(
    files: dict[str, Path], sources: list[Source], lines: int, *, follow: bool
) -> AsyncGenerator[Line]:
    """Yield the last lines of all logs merged by time, then new ones as they arrive."""
    came: Came = asyncio.Queue()

    async def read_files(past: dict[str, list[str]]) -> None:
        async for line in read_logs(files, lines, follow=follow, others=past):
            await came.put(line)
        await came.put(None)

    tasks = [asyncio.create_task(_tail(source, lines, came, follow=follow)) for source in sources]
    try:
        past, open_logs = await _past(came, len(sources), alone=not files and len(sources) == 1)
        tasks.append(asyncio.create_task(read_files(past)))
        open_logs += 1
        while open_logs:
            item = await came.get()
            if isinstance(item, tuple):
                yield item
                continue
            open_logs -= 1
            if item is not None:
                say(f"a log ends here: {item}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _past(came: Came, open_logs: int, *, alone: bool) -> tuple[dict[str, list[str]], int]:
    """Collect what the services send at once, and count those that are still sending."""
    past: dict[str, list[str]] = {}
    patience_s = _FIRST_LINE_S
    while open_logs:
        try:
            item = await asyncio.wait_for(came.get(), patience_s)
        except TimeoutError:
            break
        patience_s = _PAST_ENDS_S
        if isinstance(item, tuple):
            past.setdefault(item[0], []).append(item[1])
            continue
        open_logs -= 1
        if item is not None:
            if alone:
                raise item
            say(f"a log cannot be read: {item}")
    return past, open_logs


async def _tail(source: Source, lines: int, came: Came, *, follow: bool) -> None:
    """Put each line of a log into `came`; at the end None, or why it ended."""
    if isinstance(source, ServiceAddress):
        found = _lines_of(source, lines, follow=follow)
    else:
        found = source.tail(lines, follow=follow)
    try:
        async with aclosing(found):
            async for line in found:
                await came.put((source.name, line))
    except FlotillaError as error:
        await came.put(error)
    else:
        await came.put(None)


async def _lines_of(service: ServiceAddress, lines: int, *, follow: bool) -> AsyncGenerator[str]:
    """Yield the lines of a log that the service itself reads."""
    request = TailLogRequest(lines=lines, follow=follow)
    async with service.operated() as stub:
        silence_s = _FOLLOW_S if follow else _FIRST_LINE_S
        async with aclosing(rpc.server_stream(stub.TailLog, request, idle_timeout_s=silence_s)) as stream:
            async for answer in stream:
                yield answer.line
