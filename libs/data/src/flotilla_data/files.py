"""Finds the files of a data set and reads what is in them: lines of JSON, or batches of Arrow columns.

Invariants: the files of a data set come in the order of their names, so its rows have one order. A hub name is resolved
to files of the local cache, and the network is needed only where they are not there yet. pyarrow and the hub's client
load only for data that need them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from glob import glob, has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import zstandard

from flotilla_core.config.model import HUB
from flotilla_core.errors import InvalidConfig, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst")
COLUMNS = (".parquet", ".arrow")
MOST_ARRAY_BYTES = 1 << 30
"""Limit of a JSON file that is one list, which has to be read whole; lines have no limit."""
BATCH_ROWS = 4096
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_NEXT = "set data.train or evaluation.data"


def data_files(source: Path, split: str) -> list[Path]:
    """Return the files of a data set, which `data.train` or `evaluation.data` names; each exists."""
    if str(source).startswith(HUB):
        return _files_of_hub(str(source).removeprefix(HUB), split)
    try:
        if source.is_file():
            return [source]
        if source.is_dir():
            return _files_of_folder(source, split, str(source))
        if has_magic(str(source)):
            if found := sorted(Path(name) for name in glob(str(source), recursive=True)):
                return [path for path in found if path.is_file()]
            raise InvalidConfig("no data file fits the pattern", where=str(source), next_step=_NEXT)
    except OSError as error:
        raise unreadable(source, error) from None
    raise InvalidConfig("the data file does not exist", where=str(source), next_step=_NEXT)


def unreadable(path: Path, error: Exception) -> InvalidConfig:
    """Make the error for a data file that the system or its reader refuses."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InvalidConfig("the data file cannot be read", where=str(path), why=why, next_step=_NEXT)


def set_name(source: Path) -> str:
    """Return the name of a data set that is given none."""
    whole = source.with_suffix("") if source.suffix in PACKED else source
    return (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", source.parent.name if has_magic(source.name) else whole.stem)
        or "data"
    )


def _files_of_folder(folder: Path, split: str, shown: str) -> list[Path]:
    """Return the files of a split: of a saved `datasets` folder, or of a folder as the hub has it."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / split).is_dir():
            raise _no_split(shown, split, _names_in(folder / "dataset_dict.json"))
        folder = folder / split
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_bytes())
        return [folder / file["filename"] for file in state["_data_files"]]
    found = sorted(path for path in folder.rglob("*") if is_data(path) and path.is_file())
    if not found:
        raise InvalidConfig(
            "the folder has no data files", where=shown, why=f"none ends with {', '.join(LINES + COLUMNS)}"
        )
    return _of_split(found, folder, split, shown)


def _of_split(found: list[Path], folder: Path, split: str, shown: str) -> list[Path]:
    """Choose by the words in the names; names without any split are one data set."""
    words = {path: set(re.split(r"[-_./]", path.relative_to(folder).as_posix().lower())) for path in found}
    splits = {word for own in words.values() for word in own if word in {*SPLITS, split.lower()}}
    if not splits:
        return found
    chosen = [path for path in found if split.lower() in words[path]]
    if not chosen:
        raise _no_split(shown, split, sorted(splits))
    parts = {path.relative_to(folder).parts[0] for path in chosen if path.parent != folder}
    parts = {
        part for part in parts if not {part.lower(), *re.split(r"[-_.]", part.lower())} & {*SPLITS, "data"}
    }
    if len(parts) > 1:
        raise InvalidConfig(
            "the data set has several configurations",
            where=shown,
            why=f"{', '.join(sorted(parts))} each have a split {split!r}",
            next_step=f"name one: {shown}/{min(parts)}",
        )
    return chosen


def _names_in(path: Path) -> list[str]:
    return [str(name) for name in json.loads(path.read_bytes()).get("splits", [])]


def _no_split(shown: str, split: str, there: Sequence[str]) -> InvalidConfig:
    return InvalidConfig(
        f"the data set has no split {split!r}",
        where=shown,
        why=f"it has {', '.join(there) or 'none'}",
        next_step="set data.split, or evaluation.split",
    )


def _files_of_hub(name: str, split: str) -> list[Path]:
    """Return the files of `owner/name`, `owner/name@revision` or `owner/name/part`, from the cache or the hub."""
    owner, _, rest = name.partition("/")
    repository, _, part = rest.partition("/")
    repository, _, revision = repository.partition("@")
    if not owner or not repository:
        raise InvalidConfig(
            f"{HUB}{name} is no name of a data set", next_step=f"write {HUB}owner/name, or the path of a file"
        )
    folder = _snapshot(f"{owner}/{repository}", revision or None, part)
    shown = f"{HUB}{name}"
    if not part:
        return _files_of_folder(folder, split, shown)
    if (folder / part).is_dir():
        return _files_of_folder(folder / part, split, shown)
    if found := sorted(path for path in folder.glob(part) if path.is_file()):
        return found
    raise InvalidConfig(f"the data set has no {part}", where=shown)


def _snapshot(repository: str, revision: str | None, part: str) -> Path:
    try:
        import httpx
        import huggingface_hub as hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise InvalidConfig(
            "names of the hub need the package huggingface_hub",
            where=f"{HUB}{repository}",
            next_step="install it beside the coordinator, or download the files and name their folder",
        ) from None
    ends = [end + packed for end in (*LINES, *COLUMNS) for packed in ("", *PACKED)]
    try:
        return Path(
            hub.snapshot_download(
                repository,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[f"{part}*{end}" for end in ends] + ([part] if part else []),
            )
        )
    except (OSError, ValueError, HfHubHTTPError, httpx.HTTPError) as error:
        raise Unavailable(
            "the data set cannot be fetched from the hub and is not in the local cache",
            where=f"{HUB}{repository}",
            why=str(error).strip().partition("\n")[0],
            next_step="check the name and the network, or fetch it once where there is one and name its folder; "
            "this host has no file or folder of that name",
        ) from None


def is_data(path: Path) -> bool:
    """Return whether the name is that of a file that can be read here."""
    suffix, packed = _suffixes(path)
    return suffix in LINES or (suffix in COLUMNS and not packed)


def _suffixes(path: Path) -> tuple[str, str]:
    """Return the suffix of the content and that of its compression."""
    packed = path.suffix if path.suffix in PACKED else ""
    return Path(path.name.removesuffix(packed)).suffix, packed


def has_columns(path: Path) -> bool:
    """Return whether the file holds Arrow columns rather than JSON; an unknown ending is taken for lines."""
    return _suffixes(path)[0] in COLUMNS


def has_plain_lines(path: Path) -> bool:
    """Return whether the file's bytes are its lines, so that each can be read where it stands."""
    suffix, packed = _suffixes(path)
    if packed:
        return False
    if suffix != ".json":
        return True
    with path.open("rb") as file:
        return file.read(256).lstrip()[:1] != b"["


def unpacked_lines(path: Path) -> Iterator[bytes]:
    """Return the lines of a compressed file, or the items of a JSON list as a line each."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            yield from _lines_or_items(path, cast("IO[bytes]", gzip.GzipFile(fileobj=raw)))
        elif path.suffix == ".zst":
            stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            yield from _lines_or_items(path, io.BufferedReader(cast("Any", stream)))
        else:
            yield from _lines_or_items(path, raw)


def _lines_or_items(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        first = file.readline()
        while first.isspace():
            yield b"\n"
            first = file.readline()
        if not first.lstrip().startswith(b"[") or _suffixes(path)[0] != ".json":
            yield first
            yield from file
            return
        text = first + file.read(MOST_ARRAY_BYTES)
        if len(text) > MOST_ARRAY_BYTES:
            raise InvalidConfig(
                "the JSON list is too large",
                where=str(path),
                why=f"it has more than {MOST_ARRAY_BYTES} bytes and has to be read whole",
                next_step="write one object a line (.jsonl), or Parquet",
            )
        for item in json.loads(text):
            yield json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (OSError, EOFError, ValueError, RecursionError, zstandard.ZstdError) as error:
        raise unreadable(path, error) from None


def record_batches(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns of a Parquet or an Arrow file, piece by piece."""
    pa = _pyarrow(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            parquet = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            return parquet.schema_arrow, _guarded(
                path, parquet.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
            )
        source = pa.OSFile(str(path), "rb")
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # a stream, as the library `datasets` writes it
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            return stream.schema, _guarded(path, iter(stream))
        return file.schema, _guarded(path, (file.get_batch(at) for at in range(file.num_record_batches)))
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from None


def _guarded(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pa = _pyarrow(path)
    try:
        yield from batches
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError:
        raise InvalidConfig(
            "Parquet and Arrow files need the package pyarrow",
            where=str(path),
            next_step="install the coordinator with its extra `report`, or write the data as JSON lines",
        ) from None
    return pa


Identity = tuple[Path, int, int, int]
"""A file as it is now: path, inode, size, time of its last change."""


def identity(path: Path) -> Identity:
    """Return what changes when somebody writes the file, without reading it."""
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return path, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=4096)
def content_digest(file: Identity) -> str:
    """Return the digest of the file's bytes, computed once while the file does not change."""
    try:
        with file[0].open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise unreadable(file[0], error) from None
