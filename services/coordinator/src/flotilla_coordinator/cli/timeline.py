"""Implements `flotilla timeline`, which writes a run's spans as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from flotilla_client import Client
from flotilla_coordinator.cli.completion import RunId
from flotilla_coordinator.cli.options import Coordinator, Json, Stack, make_folder_of, wait
from flotilla_coordinator.cli.output import print_json, say
from flotilla_coordinator.cli.stack import stack_paths
from flotilla_coordinator.timeline import SpanStore, chrome_trace
from flotilla_core.errors import InvalidRequest, NotFound, Unavailable
from flotilla_launch.paths import StackPaths


def timeline(
    run: RunId,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.")],
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Write the timeline of a run; also works when the coordinator is down or was killed."""
    paths = stack_paths(stack)
    aside = output.with_name(f".{output.name}.part")
    make_folder_of(output)
    try:
        with aside.open("wb") as file:
            try:
                wait(_ask(file, run, step, paths, coordinator))
                source = "coordinator"
            except Unavailable as error:
                if coordinator is not None:
                    raise
                say(f"the coordinator does not answer ({error.what}): reading its span store instead")
                file.seek(0)
                file.truncate()
                file.writelines(_read(run, step, paths))
                source = "spans.sqlite"
        size = aside.stat().st_size
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    if as_json:
        print_json({"file": str(output.absolute()), "bytes": size, "source": source})
    else:
        say(f"wrote {output} ({size:,} bytes); open it in https://ui.perfetto.dev or chrome://tracing")


async def _ask(
    file: BinaryIO, run: str, step: int | None, paths: StackPaths, coordinator: str | None
) -> None:
    async with Client.find(paths.directory.name, paths.directory.parent, coordinator) as client:
        async for chunk in client.timeline(run, step=step):
            file.write(chunk)


def _read(run: str, step: int | None, paths: StackPaths) -> Iterable[bytes]:
    """Read the store's file, for the newest run with "latest", else for the run whose id begins with `run`."""
    spans = paths.directory / "spans.sqlite"
    reader = SpanStore.open_readonly(spans)
    try:
        runs = reader.runs()
        found = runs[:1] if run == "latest" else [known for known in runs if known.startswith(run)]
        if run in found:
            found = [run]
        if not found:
            raise NotFound(
                f"no spans of run {run!r}", where=str(spans), next_step="list runs: flotilla run list"
            )
        if len(found) > 1:
            raise InvalidRequest(f"{run!r} is the start of {len(found)} run ids", why=", ".join(found[:5]))
        recorded = list(reader.spans_of_run(found[0], step))
        if not recorded:
            raise NotFound(f"run {found[0]} has no spans of step {step}", where=str(spans))
        yield from chrome_trace(recorded)
    finally:
        reader.close()
