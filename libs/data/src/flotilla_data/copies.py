"""Keeps plain copies of data files that cannot be read where they stand, and the rows of tasks.

Invariants: a copy is made once, under the digest of the content, by a process within bounds
(`flotilla_data.decoding`): this one decodes nothing that another author packed. One such process makes the copies of
all files of a data set, because to start it takes longer than most files. A file that somebody writes meanwhile gets no
copy. Rows of tasks are made once likewise, under a digest of all that they depend on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from flotilla_core.bounded_process import BoundedProcess, Bounds, OutOfBounds
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.generated_tasks import SPLITS, TaskSource, package_version
from flotilla_data.files import Identity, content_digest, identity
from flotilla_data.formats import has_columns

COPY_KEPT_S = 14 * 86_400
"""A copy that no run opened for so long is deleted when another one is made."""
WRITING = ".writing-"
WRITTEN_WITHIN_S = 86_400
"""A folder of a copy that was begun before was left behind by a process that was killed."""
MEMORY_BYTES = 2 << 30
LEAST_CPU_S = 60.0
CPU_S_PER_MIB = 4.0
"""The limit for each MiB of a file: ten times what decoding takes."""
LEAST_UNPACKED_BYTES = 256 << 20
UNPACKED_BYTES_PER_BYTE = 100
TASKS_MEMORY_BYTES = 6 << 30
CPU_S_PER_ROW = 20.0
"""The limit for each row of a task: the slowest one takes two seconds for an item, and one in eight is a test row."""
BYTES_PER_ROW = 1 << 20


def decoder_of(files: Sequence[Identity]) -> BoundedProcess:
    """Return the process that decodes these files; it starts with the first one that has no copy."""
    size = max((file.size for file in files), default=0)
    bounds = Bounds(MEMORY_BYTES, LEAST_CPU_S + CPU_S_PER_MIB * size / 2**20, file_bytes=_most_unpacked(size))
    return BoundedProcess("flotilla_data.decoding:write_plainly", bounds)


def copy_of(file: Identity, copies: Path, decoder: BoundedProcess) -> Path:
    """Return the copy of a file, and make it where there is none of this content."""
    suffix = ".arrow" if has_columns(file.path) else ".jsonl"
    return _kept(copies / f"{content_digest(file)}{suffix}", lambda made: _write(file, made, decoder))


def rows_of_tasks(source: TaskSource, split: str, copies: Path) -> Path:
    """Return the file with the rows of a split, and make them where they are not there."""
    if split not in SPLITS:
        raise InvalidConfig(
            f"tasks have no split {split!r}",
            where=str(source),
            why=f"they have {', '.join(SPLITS)}",
            next_step="set data.split, or evaluation.split",
        )
    made_of = f"{source} {split} {package_version()}"
    digest = blake2b(made_of.encode(), digest_size=16).hexdigest()
    return _kept(copies / f"{digest}.jsonl", lambda made: _generate(source, split, made))


def _kept(target: Path, write: Callable[[Path], None]) -> Path:
    """Return a file, which is written where it is not there; it appears whole or not at all."""
    copies = target.parent
    with suppress(FileNotFoundError):
        os.utime(target)
        return target
    copies.mkdir(mode=0o700, parents=True, exist_ok=True)
    _delete_old(copies)
    with tempfile.TemporaryDirectory(dir=copies, prefix=WRITING) as folder:
        made = Path(folder) / "copy"
        write(made)
        os.chmod(made, 0o600)
        os.replace(made, target)
    return target


def _delete_old(copies: Path) -> None:
    """Delete what nobody needs; who starts another run may be doing the same."""
    now = time.time()
    for old in (*copies.glob("*.arrow"), *copies.glob("*.jsonl")):
        with suppress(FileNotFoundError):
            if old.stat().st_mtime < now - COPY_KEPT_S:
                old.unlink()
    for begun in copies.glob(f"{WRITING}*"):
        with suppress(FileNotFoundError):
            if begun.stat().st_mtime < now - WRITTEN_WITHIN_S:
                shutil.rmtree(begun, ignore_errors=True)


def _generate(source: TaskSource, split: str, target: Path) -> None:
    bounds = Bounds(
        TASKS_MEMORY_BYTES, LEAST_CPU_S + CPU_S_PER_ROW * source.size, file_bytes=BYTES_PER_ROW * source.size
    )
    question = {"source": f"{source}", "split": split, "target": str(target)}
    try:
        with BoundedProcess("flotilla_core.generated_tasks:write_rows", bounds) as process:
            process.ask(question)
    except OutOfBounds as error:
        raise InvalidConfig(
            "the tasks cannot be made within bounds",
            where=str(source),
            why=str(error),
            next_step="ask for fewer of them, or for easier ones",
        ) from None


def _most_unpacked(size: int) -> int:
    return max(LEAST_UNPACKED_BYTES, size * UNPACKED_BYTES_PER_BYTE)


def _write(file: Identity, target: Path, decoder: BoundedProcess) -> None:
    path = file.path
    try:
        decoder.ask({"path": str(path), "target": str(target), "most_bytes": _most_unpacked(file.size)})
    except OutOfBounds as error:
        raise InvalidConfig(
            "the data file cannot be decoded within bounds",
            where=str(path),
            why=str(error),
            next_step="write it again with smaller row groups and batches, for example pyarrow's "
            "write_table(..., row_group_size=1000), or as JSON lines"
            if has_columns(path)
            else "write one object a line (.jsonl)",
        ) from None
    if identity(path) != file:
        raise FailedPrecondition(
            "the data file changed while it was read", where=str(path), next_step="start again"
        )
