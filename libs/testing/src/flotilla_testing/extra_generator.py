"""A generator that is started by hand next to a stack, by another description than the stack's.

Invariant: it is gone, with its registration, when the context ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from flotilla_testing.stack import Stack, wait_until

NAME = "generator-9"
GENERATOR = (str(Path(sys.executable).parent / "flotilla-generator"),)


@contextlib.contextmanager
def extra_generator(
    stack: Stack,
    directory: Path,
    description: dict[str, Any],
    *,
    command: Sequence[str] = GENERATOR,
    nats: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """Start it with `description` over that of the stack; it has announced its port when this returns."""
    file = directory / "extra-stack.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(stack.file.read_text()), **description}))
    announced = stack.directory / "instances" / f"{NAME}.json"
    options = ["--name", NAME, "--stack", str(file), *(("--nats", nats) if nats else ())]
    with (directory / "extra-generator.log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        wait_until(f"{NAME} to announce itself", announced.exists)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
