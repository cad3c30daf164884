"""What the file system refuses while a checkpoint is written, as an error with a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from flotilla_core.disk import disk_full
from flotilla_core.errors import FailedPrecondition, FlotillaError

P = ParamSpec("P")
T = TypeVar("T")


def on_disk(folder: Path, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `work` makes of `folder`; a disk that takes no more is DiskFull, one that is gone a FailedPrecondition."""
    try:
        return work(*arguments, **options)
    except OSError as error:
        raise not_written("the checkpoint", Path(error.filename or folder), error) from error


def not_written(what: str, path: Path, error: Exception) -> FlotillaError:
    """Why `what` is not at `path`."""
    text = f"{what} cannot be written"
    return disk_full(error, text, path) or FailedPrecondition(
        text,
        where=str(path),
        why=getattr(error, "strerror", None) or str(error),
        next_step="see whether the disk answers; checkpoint.keep says how many stay",
    )
