"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Stack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        envvar="FLOTILLA_STACK",
        metavar="FILE",
        show_default="stack.yaml, or the arithmetic example's",
        help="Stack file, or the name of a stack that runs here.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="FLOTILLA_COORDINATOR",
        metavar="HOST:PORT",
        show_default="that of the stack",
        help="Coordinator to ask.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help='Id, unique prefix of an id, or "latest".')]
