"""`flotilla logs`: what the processes of a stack wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flotilla_coordinator.cli.options import Json, Stack

if TYPE_CHECKING:
    from pathlib import Path


def logs(
    name: Annotated[str | None, typer.Argument(help="Process; all, merged by time, when left out.")] = None,
    stack: Stack = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines of the past.")] = 100,
    as_json: Json = False,
) -> None:
    """Show the logs of a stack, of a stopped one too."""
    from flotilla_coordinator.cli.running import wait

    wait(_print(_chosen(name, stack), lines, follow=follow, as_json=as_json), interrupted="")


def _chosen(name: str | None, stack: str | None) -> dict[str, Path]:
    from flotilla_coordinator.cli.stack_choice import stack_paths
    from flotilla_core.errors import NotFound

    stack_directory = stack_paths(stack)
    paths = {path.stem: path for path in sorted(stack_directory.logs.glob("*.log"))}
    nats = stack_directory.nats / "nats.log"
    if nats.exists():
        paths["nats"] = nats
    if not paths:
        raise NotFound(
            f"stack {stack_directory.directory.name!r} has no logs",
            where=str(stack_directory.logs),
            why="it was never started here",
            next_step="start it: flotilla up",
        )
    if name is None:
        return paths
    if name not in paths:
        raise NotFound(
            f"there is no log of {name!r}",
            where=str(stack_directory.logs),
            next_step=f"logs are there of: {', '.join(paths)}",
        )
    return {name: paths[name]}


async def _print(paths: dict[str, Path], lines: int, *, follow: bool, as_json: bool) -> None:
    """With `--json` one object a line, because a log has no end."""
    import json
    import sys

    from flotilla_launch.logs import read_logs

    width = max(map(len, paths))
    async for name, line in read_logs(paths, lines, follow=follow):
        if as_json:
            text = json.dumps({"name": name, "line": line}, ensure_ascii=False)
        else:
            text = line if len(paths) == 1 else f"{name:{width}} | {line}"
        sys.stdout.write(text + "\n")
        if follow:
            sys.stdout.flush()
