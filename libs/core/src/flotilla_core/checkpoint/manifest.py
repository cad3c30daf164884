"""The manifest that seals a checkpoint: every file with its size and its digest.

Invariants: the manifest is written last, when every file that it lists is on disk; a folder passes only when each
listed file is there, byte for byte; a refusal names the first file that is wrong. Digests are SHA-256, so that any tool
can check them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_core.errors import Damaged, Mismatch
from flotilla_core.files import write_atomically

FILE_NAME = "manifest.json"
FORMAT = 1
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SealedFile:
    """One file as it was written."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one folder by relative path."""

    files: dict[str, SealedFile]

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.nbytes for file in self.files.values())

    @classmethod
    def seal(cls, folder: Path) -> Manifest:
        """Bring everything below `folder` to the disk, then write its manifest."""
        manifest = cls({str(path.relative_to(folder)): _flushed(path) for path in _files(folder)})
        manifest._write(folder)
        for directory in (*(child for child in folder.rglob("*") if child.is_dir()), folder):
            flush_directory(directory)
        return manifest

    @classmethod
    def join(cls, folder: Path, parts: Iterable[str]) -> Manifest:
        """Seal a sealed folder once more, with the sealed folders that were put into it; no file is read again."""
        files = dict(cls.read(folder).files)
        for part in parts:
            inside = cls.read(folder / part).files
            files |= {f"{part}/{name}": file for name, file in inside.items()}
            files[f"{part}/{FILE_NAME}"] = _flushed(folder / part / FILE_NAME)
        manifest = cls(files)
        manifest._write(folder)
        flush_directory(folder)
        return manifest

    def renew(self, folder: Path, contents: Mapping[str, str]) -> Manifest:
        """Seal a copy of this folder in which some files get other contents; no other file is read again.

        Files are replaced, never written in place: they may be links to those of the folder that was copied.
        """
        for name, content in contents.items():
            write_atomically(folder / name, content)
        manifest = Manifest({**self.files, **{name: _flushed(folder / name) for name in contents}})
        (folder / FILE_NAME).unlink(missing_ok=True)
        manifest._write(folder)
        for directory in (*(child for child in folder.rglob("*") if child.is_dir()), folder):
            flush_directory(directory)
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder without looking at its files."""
        path = folder / FILE_NAME
        try:
            content = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise _damaged(path, f"it cannot be read: {error!r}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """Read the content of a manifest."""
        try:
            content = json.loads(text)
            written_as = content["format"]
            if written_as == FORMAT:
                return cls({name: _entry(entry) for name, entry in content["files"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(where, f"it cannot be read: {error!r}") from error
        raise Mismatch(
            f"the checkpoint has format {written_as}, this Flotilla reads {FORMAT}",
            where=where,
            next_step="use the Flotilla that wrote it",
        )

    @classmethod
    def verified(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder whose files are as they were sealed; Damaged names the first that is not."""
        manifest = cls.read(folder)
        for name, sealed in manifest.files.items():
            path = folder / name
            try:
                nbytes = path.stat().st_size
                if nbytes != sealed.nbytes:
                    raise _damaged(path, f"it has {nbytes} bytes, {sealed.nbytes} were written")
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                raise _damaged(path, "the file is missing") from None
            except OSError as error:
                raise _damaged(path, f"it cannot be read: {error}") from error
            if digest != sealed.sha256:
                raise _damaged(path, "its SHA-256 is not that of what was written")
        return manifest

    def _write(self, folder: Path) -> None:
        entries = {name: {"bytes": file.nbytes, "sha256": file.sha256} for name, file in self.files.items()}
        path = folder / FILE_NAME
        path.write_text(json.dumps({"format": FORMAT, "files": entries}, indent=1) + "\n", "utf-8")
        _flushed(path)


def flush_directory(path: Path) -> None:
    """Bring the names inside a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE_NAME)


def _flushed(path: Path) -> SealedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return SealedFile(os.fstat(file.fileno()).st_size, digest)


def _entry(entry: dict[str, Any]) -> SealedFile:
    return SealedFile(int(entry["bytes"]), checked_sha256(entry["sha256"]))


def checked_sha256(text: str) -> str:
    """Return the text of a SHA-256; a ValueError for any other text, because hosts name files by it."""
    if not SHA256.fullmatch(text):
        raise ValueError(f"{text!r:.80} is no SHA-256")
    return text


def _damaged(path: Path | str, why: str) -> Damaged:
    return Damaged(
        "the checkpoint is damaged",
        where=str(path),
        why=why,
        next_step="use another one: see `flotilla checkpoint list`",
    )
