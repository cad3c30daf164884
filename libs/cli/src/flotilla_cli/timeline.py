"""Implements `flotilla timeline`, which writes a run's spans as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from flotilla_cli.completion import RunId
from flotilla_cli.options import Coordinator, Json, Stack, make_folder_of, wait
from flotilla_cli.output import print_json, say
from flotilla_cli.stack import call, stack_paths, stored_answers
from flotilla_core.errors import Unavailable

if TYPE_CHECKING:
    from flotilla_cli.stack import Answers


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
                call(partial(_write, file, run, step), stack, coordinator)
                source = "coordinator"
            except Unavailable as error:
                if coordinator is not None:
                    raise
                say(f"the coordinator does not answer ({error.what}): reading its span store instead")
                wait(_write(file, run, step, stored_answers(paths)))
                source = "spans.sqlite"
        size = aside.stat().st_size
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    if as_json:
        print_json({"file": str(output.absolute()), "bytes": size, "source": source})
    else:
        say(f"wrote {output} ({size:,} bytes); open it in https://ui.perfetto.dev or chrome://tracing")


async def _write(file: BinaryIO, run: str, step: int | None, answers: Answers) -> None:
    file.seek(0)
    file.truncate()
    async for chunk in answers.timeline(run, step=step):
        file.write(chunk)
