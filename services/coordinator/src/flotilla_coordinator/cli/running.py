"""Runs the asyncio part of a command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from flotilla_coordinator.cli.exit_codes import INTERRUPTED

Result = TypeVar("Result")


def wait(work: Coroutine[Any, Any, Result], *, interrupted: str = "interrupted") -> Result:
    """The result; on Ctrl-C the work is cancelled in order, then `interrupted` is said and the exit code is 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{interrupted}\n")
        sys.exit(INTERRUPTED)
