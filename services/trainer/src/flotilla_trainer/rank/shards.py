"""Write sharded tensors to files, one for each rank, and read them into a gang of any size.

Invariants: a piece is a range of rows of a whole tensor, and says which; reading asks for rows and never for ranks, so
the number of ranks that wrote does not matter; files are safetensors, because nothing is unpickled; a tensor that is
missing or of another shape is named before a number is used.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flotilla_core.checkpoint import not_written
from flotilla_core.errors import Damaged, Mismatch
from flotilla_trainer.rank.cut import Cut
from flotilla_trainer.wire.settings import SHARDS

Piece = tuple[Cut, torch.Tensor]
"""The rows of a whole tensor that a rank holds, and which they are."""


def write_shard(folder: Path, rank: int, ranks: int, pieces: dict[str, Piece], facts: dict[str, Any]) -> None:
    """Write this rank's file; `facts` are small and the same on all ranks."""
    path = folder / SHARDS / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
    places = {name: [cut.offset, list(cut.whole)] for name, (cut, _) in pieces.items()}
    try:
        path.parent.mkdir(exist_ok=True)
        save_file(
            {name: rows.contiguous() for name, (_, rows) in pieces.items()},
            path,
            {"places": json.dumps(places), "facts": json.dumps(facts)},
        )
    except (OSError, SafetensorError) as error:
        raise not_written("the checkpoint", path, error) from error


class _Source(NamedTuple):
    """The file that holds the rows [first, last) of a tensor."""

    first: int
    last: int
    file: Any


class ShardReader:
    """All shard files of a checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SHARDS
        self._open = ExitStack()
        self._sources: dict[str, list[_Source]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.facts: dict[str, Any] = {}
        try:
            for path in sorted(self._folder.glob("rank-*.safetensors")):
                self._add(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            self._open.close()
            raise Damaged("the checkpoint cannot be read", where=str(self._folder), why=str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def names(self) -> set[str]:
        """Return the names of all tensors that any file holds a piece of."""
        return set(self._shapes)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or has another shape."""
        if self._shapes.get(name) != shape:
            raise Mismatch(
                "the checkpoint is for another model than the trainer holds",
                where=str(self._folder),
                why=f"{name} is {self._shapes.get(name, 'absent')} there and {shape} here",
                next_step="start the stack with the model that the run was started with",
            )

    def part(self, name: str, cut: Cut) -> torch.Tensor:
        """Read the rows of a part, from the files that hold them."""
        parts, at, end = [], cut.offset, cut.offset + cut.size
        try:
            for source in sorted(self._sources[name], key=lambda source: source.first):
                last = min(source.last, end)
                if source.first <= at < last:
                    parts.append(source.file.get_slice(name)[at - source.first : last - source.first])
                    at = last
        except SafetensorError as error:
            raise Damaged(f"{name} cannot be read", where=str(self._folder), why=str(error)) from error
        if at < end:
            raise Damaged(f"{name} is not whole", where=str(self._folder), why=f"no file holds its row {at}")
        return torch.cat(parts) if parts else torch.empty((0, *self._shapes[name][1:]))

    def _add(self, path: Path) -> None:
        file = self._open.enter_context(safe_open(path, framework="pt"))
        metadata = file.metadata()
        self.facts = json.loads(metadata["facts"])
        for name, (first, whole) in json.loads(metadata["places"]).items():
            self._shapes[name] = tuple(whole)
            rows = file.get_slice(name).get_shape()[0]
            self._sources.setdefault(name, []).append(_Source(first, first + rows, file))
