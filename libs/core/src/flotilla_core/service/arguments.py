"""The command line that all services share.

Invariant: missing arguments come from `launcher.json` of the running stack, so a service that is started by
hand (under a debugger, say) finds the fleet; one that is found nowhere ends in a message that says how to give it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla_core.addresses import canonical
from flotilla_core.config import StackConfig, load
from flotilla_core.errors import InvalidConfig
from flotilla_core.judge_generators import read_by

_DEFAULT_STACK = Path(".flotilla/local/stack.yaml")


@dataclass(frozen=True)
class Arguments:
    """Everything that a service process needs to know at its start."""

    name: str
    stack: StackConfig
    nats_url: str
    otlp: tuple[str, ...]
    port: int
    state_dir: Path
    """The directory of the stack: `<state_dir>/<stack>`, absolute."""
    drain_grace_s: float
    """Time that running work has after the process was asked to end."""


DRAIN_GRACE_S = 5.0
MOST_GRACE_S = 86_400.0


def parse_arguments(kind_name: str, arguments: Sequence[str] | None = None) -> Arguments:
    """Read the command line (`sys.argv` by default)."""
    parser = argparse.ArgumentParser(
        prog=f"flotilla-{kind_name}", description=f"The {kind_name} service of a stack."
    )
    parser.add_argument(
        "--name", default=f"{kind_name}-0", help="slot of the stack that it fills (%(default)s)"
    )
    parser.add_argument("--stack", type=Path, help=f"stack file (of the running stack: {_DEFAULT_STACK})")
    parser.add_argument("--nats", metavar="URL", help="NATS server (that of the running stack)")
    parser.add_argument(
        "--otlp",
        metavar="HOST:PORT",
        action="append",
        help="OTLP/gRPC collector, once for each (that of the running stack)",
    )
    parser.add_argument("--port", type=int, help="port to listen on (bind.port of the stack file)")
    parser.add_argument(
        "--advertise-host",
        metavar="HOST",
        help="host that peers dial (bind.advertise_host of the stack file)",
    )
    parser.add_argument(
        "--drain-grace",
        type=_seconds,
        metavar="S",
        default=DRAIN_GRACE_S,
        help="seconds that running work has after SIGTERM (%(default)g)",
    )
    parser.add_argument(
        "--state-dir", type=Path, help="where stacks keep their files (state_dir of the stack file)"
    )
    given = parser.parse_args(arguments)

    stack = read_by(_load_stack(given.stack), given.name)
    if given.advertise_host:
        # Replicas of one description on several hosts differ in this alone.
        bind = stack.bind.model_copy(update={"advertise_host": canonical(given.advertise_host)})
        stack = stack.model_copy(update={"bind": bind})
    state_dir = ((given.state_dir or stack.state_dir) / stack.name).absolute()
    running = _running_stack(state_dir)
    endpoints = [*(given.otlp or [running.get("otlp", "")]), stack.telemetry.otlp_endpoint or ""]
    return Arguments(
        name=given.name,
        stack=stack,
        nats_url=_nats_url(given.nats or stack.nats.url or running.get("nats_url", ""), state_dir),
        otlp=tuple(dict.fromkeys(filter(None, endpoints))) if stack.telemetry.enabled else (),
        port=stack.bind.port if given.port is None else given.port,
        state_dir=state_dir,
        drain_grace_s=given.drain_grace,
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST_GRACE_S:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MOST_GRACE_S:g} seconds")
    return value


def _load_stack(file: Path | None) -> StackConfig:
    if file is None and not _DEFAULT_STACK.exists():
        raise InvalidConfig(
            "no stack file is given and no stack runs here",
            where=str(_DEFAULT_STACK),
            next_step="Give --stack FILE, or start a stack with flotilla up.",
        )
    return load(StackConfig, [file or _DEFAULT_STACK], resolve_paths=True)


def _running_stack(state_dir: Path) -> dict[str, str]:
    try:
        values = json.loads((state_dir / "launcher.json").read_text())
    except (OSError, ValueError):
        return {}  # No stack runs here: then the arguments must say it all.
    return values if isinstance(values, dict) else {}


def _nats_url(url: str, state_dir: Path) -> str:
    if not url:
        raise InvalidConfig(
            "no NATS server is known",
            where=str(state_dir / "launcher.json"),
            why="no stack of that name runs",
            next_step="Start it with flotilla up, or give --nats URL (for example nats://127.0.0.1:4222).",
        )
    return url
