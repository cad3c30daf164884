"""Finds the files of a data set, and tells one state of a file from another.

Invariants: the files of a data set come in the order of their names, so its rows have one order. All are regular files
that can be read to their end. What a folder says about its files names files of that folder alone. A hub name is
resolved to files of the local cache, and the network is needed only where they are not there yet; the hub's client
loads only for such names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from flotilla_core.config.model import HUB
from flotilla_core.errors import InvalidConfig, Unavailable
from flotilla_core.files import open_regular, require_regular
from flotilla_core.json_text import read_json_object
from flotilla_data.formats import COLUMNS, LINES, NEXT, PACKED, is_data, unreadable

LEAST_SPARSE_BYTES = 64 << 20
MOST_HOLES = 100
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


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
            if found := _matching(source):
                return found
            raise InvalidConfig("no data file fits the pattern", where=str(source), next_step=NEXT)
        if os.path.exists(source):
            require_regular(source.stat(), source)
    except OSError as error:
        raise unreadable(source, error) from None
    raise InvalidConfig("the data file does not exist", where=str(source), next_step=NEXT)


def _matching(pattern: Path) -> list[Path]:
    """Return the files that fit a pattern; folders are not followed through links, which may go in circles."""
    at = next(place for place, part in enumerate(pattern.parts) if has_magic(part))
    folder, rest = Path(*pattern.parts[:at]), "/".join(pattern.parts[at:])
    found = folder.glob(f"{rest}/*" if rest.endswith("**") else rest)
    return sorted(
        path
        for path in found
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


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
        return _saved_files(folder)
    found = sorted(path for path in folder.rglob("*") if is_data(path) and path.is_file())
    if not found:
        raise InvalidConfig(
            "the folder has no data files",
            where=shown,
            why=f"none ends with {', '.join(LINES + COLUMNS)}",
            next_step="name the folder that has them, or a file",
        )
    return _of_split(found, folder, split, shown)


def _saved_files(folder: Path) -> list[Path]:
    """Return the files that `datasets` lists in its `state.json`, which lie beside it."""
    where = folder / "state.json"
    listed = read_json_object(where).get("_data_files")
    names = (
        [one.get("filename") if isinstance(one, dict) else None for one in listed or ()]
        if isinstance(listed, list)
        else [None]
    )
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise InvalidConfig(
                "state.json of a saved data set names no file of its folder",
                where=str(where),
                why=f"_data_files has {str(name)[:200]!r} in place of the name of a file beside it",
                next_step="save it again (`save_to_disk`), or name the files themselves by a pattern",
            )
    return [folder / str(name) for name in names]


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
    names = read_json_object(path).get("splits")
    return [str(name)[:100] for name in names[:20]] if isinstance(names, list) else []


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


class Identity(NamedTuple):
    """A file as it is now: what changes when somebody writes or replaces it."""

    path: Path
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def identity(path: Path) -> Identity:
    """Return the identity of a file, without reading it; refuse what is no file, or would take for ever to read."""
    try:
        found = path.stat()
        require_regular(found, path)
    except OSError as error:
        raise unreadable(path, error) from None
    # No file system packs text a hundredfold, so that most of such a file was never written.
    if found.st_size > LEAST_SPARSE_BYTES and found.st_blocks * 512 * MOST_HOLES < found.st_size:
        raise InvalidConfig(
            "the data file consists of holes",
            where=str(path),
            why=f"of its {found.st_size:,} bytes {found.st_blocks * 512:,} were written",
            next_step=NEXT,
        )
    return Identity(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=4096)
def content_digest(file: Identity) -> str:
    """Return the digest of the file's bytes, computed once while the file does not change."""
    try:
        with open_regular(file.path) as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise unreadable(file.path, error) from None
