"""What the file system refuses while a checkpoint is written, as an error with a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flotilla_core.errors import FailedPrecondition

P = ParamSpec("P")
T = TypeVar("T")


def on_disk(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `work` returns; a full disk, or one that is gone, is a FailedPrecondition."""
    try:
        return work(*arguments, **options)
    except OSError as error:
        raise FailedPrecondition(
            "the checkpoint cannot be written",
            where=str(error.filename or arguments[0]),
            why=error.strerror or str(error),
            next_step="see whether the disk is full; checkpoint.keep says how many stay",
        ) from error
