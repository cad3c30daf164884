"""The files of a service in a test: real ones below a folder, with or without a coordinator to fetch from."""

from __future__ import annotations

from pathlib import Path

from flotilla_core import rpc
from flotilla_core.errors import Unavailable
from flotilla_core.service import Activities
from flotilla_core.transfer import FileCache, Files
from flotilla_testing.credentials import credential


def files_in(
    folder: Path, coordinator: str = "", *, most_gib: float = 1, activities: Activities | None = None
) -> Files:
    """Return the files of a service whose state is in `folder`."""

    async def address() -> str:
        if not coordinator:
            raise Unavailable("there is no coordinator to fetch files from")
        return coordinator

    cache = FileCache(folder / "files", most_gib)
    return Files(
        cache,
        lambda peer: rpc.connect(peer, credential=credential(folder)),
        address,
        activities or Activities(),
    )


NO_FILES = files_in(Path("/nowhere"))
"""The files of a part that offers nothing and fetches nothing."""


def to_nobody(*_: str) -> None:
    """Tell nobody what a service does."""
