"""Runs the commands of engines: docker, helm, kubectl, and those of Slurm.

Invariant: a command that does not answer, or that its caller leaves, is ended.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence

from flotilla_core.errors import FailedPrecondition, Unavailable
from flotilla_core.subprocess_group import outputs

_END_S = 5.0


async def outcome(
    command: Sequence[str], limit_s: float, missing: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Return the status of a command, what it prints, and what it says of errors."""
    process = await started(command, missing, environment)
    try:
        out, err = await asyncio.wait_for(outputs(process), limit_s)
    except TimeoutError:
        raise Unavailable(
            f"{command[0]} does not answer",
            where=" ".join(command),
            why=f"nothing within {limit_s:.0f} s",
            next_step="try again",
        ) from None
    finally:
        await end(process)
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace").strip()


async def started(
    command: Sequence[str], missing: str, environment: Mapping[str, str] | None = None
) -> Process:
    """Start a command; `missing` is what a user does who does not have it."""
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment
        )
    except OSError as error:
        raise FailedPrecondition(
            f"{command[0]} cannot be run", where="PATH", why=str(error.strerror), next_step=missing
        ) from None


async def end(process: Process) -> None:
    """End a command that was left; one that has ended is left as it is."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def refused(command: Sequence[str], why: str, next_step: str) -> FailedPrecondition:
    """Return the error of a command that ended with an error of its own."""
    where = " ".join(command)
    return FailedPrecondition(
        f"{command[0]} refuses", where=where, why=why or "it says nothing", next_step=next_step
    )
