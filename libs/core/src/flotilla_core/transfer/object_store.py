"""Folders in object storage, through fsspec: what lies in one, read in parts, and sealed folders that are copied there.

Invariants: a copy has its manifest last, and an older manifest under its name goes first, so half a copy is never taken
for a whole one. A sealed folder, or one inside it, is known by the SHA-256 of its files; any other one by
what the storage says of them (names, sizes, ETags, times), and it is refused where that changes meanwhile. A failure
is an error of ours, with the next step. fsspec is imported by the first use; the package of a scheme is the user's.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flotilla_core.checkpoint.manifest import FILE_NAME, Manifest, SealedFile
from flotilla_core.config.model import STORES
from flotilla_core.errors import (
    Cancelled,
    Damaged,
    DiskFull,
    FailedPrecondition,
    FlotillaError,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from flotilla_core.model_folder import FILES
from flotilla_core.transfer.folders import FolderManifest, safe_name

LISTED = "listed-"
"""Begins what stands for the digest of a file whose content nobody has read."""
PART_BYTES = 16 << 20
FILES_TOGETHER = 4
"""Files that are copied at the same time."""
LARGEST_TEXT = 16 << 20
_SAYS_WHEN = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "VersionId",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
)
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
}


class ObjectFolder:
    """One folder in object storage."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None
        self._opening = threading.Lock()

    def manifest(self, *, sealed: bool = False) -> FolderManifest:
        """Return the files of the folder; refuse one without a manifest of ours where it must be `sealed`."""
        if (known := self._sealed()) is not None:
            return known
        if sealed:
            raise NotFound(
                "there is no whole checkpoint",
                where=self.url,
                why=f"it has no {FILE_NAME}, which is written last",
                next_step="take another one: list the folder above it",
            )
        files = {}
        for name, entry in sorted(self._listed().items()):
            if entry["type"] == "file" and any(fnmatch(name, pattern) for pattern in FILES):
                said = "\0".join(str(entry[key]) for key in _SAYS_WHEN if entry.get(key) is not None)
                token = LISTED + hashlib.sha256(f"{self.url}\0{name}\0{said}".encode()).hexdigest()
                files[safe_name(name)] = SealedFile(int(entry["size"]), token)
        if not files:
            raise NotFound(
                "the folder has no file of a model",
                where=self.url,
                why=f"it has none of {', '.join(FILES)}",
                next_step="check the bucket and the prefix: the folder of a model has config.json",
            )
        return FolderManifest(files)

    def require_unchanged(self, manifest: FolderManifest) -> None:
        """Refuse a folder that is not as it was listed; what was fetched of it meanwhile may be of both."""
        if all(not file.sha256.startswith(LISTED) for file in manifest.files.values()):
            return
        if self.manifest().digest != manifest.digest:
            raise FailedPrecondition(
                "the folder changed while it was fetched",
                where=self.url,
                next_step="write a new model to a new folder, and start again",
            )

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return a part of a file."""
        with self._named(name):
            files, path = self._open()
            content: bytes = files.cat_file(f"{path}/{name}", start=offset, end=offset + nbytes)
            return content

    def read_text(self, name: str) -> str | None:
        """Return a small file; None where there is none."""
        with self._named(name):
            files, path = self._open()
            files.invalidate_cache()
            try:
                content: bytes = files.cat_file(f"{path}/{name}", start=0, end=LARGEST_TEXT)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None
        return content.decode(errors="replace")

    def folders(self) -> list[str]:
        """Return the names of the folders inside."""
        return sorted(name for name, entry in self._listed().items() if entry["type"] == "directory")

    def take_copy(self, folder: Path, stopped: threading.Event) -> int:
        """Copy a sealed folder here, its manifest last; return its size. Raise Cancelled once `stopped` is set."""
        manifest = Manifest.read(folder)
        self.remove(FILE_NAME)
        pool = ThreadPoolExecutor(FILES_TOGETHER)
        try:
            copies = [
                pool.submit(self._copy, folder / name, name, file, stopped)
                for name, file in sorted(manifest.files.items())
            ]
            for copy in copies:
                copy.result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.write(FILE_NAME, (folder / FILE_NAME).read_bytes())
        return manifest.nbytes

    def write(self, name: str, content: bytes) -> None:
        """Write a small file whole."""
        with self._named(name):
            files, path = self._open()
            files.pipe_file(f"{path}/{name}", content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._named(name):
            files, path = self._open()
            files.invalidate_cache()
            if files.exists(f"{path}/{name}"):
                files.rm_file(f"{path}/{name}")

    def _copy(self, source: Path, name: str, sealed: SealedFile, stopped: threading.Event) -> None:
        digest = hashlib.sha256()
        with self._named(name), source.open("rb") as content:
            files, path = self._open()
            with files.open(f"{path}/{name}", "wb", block_size=PART_BYTES) as copy:
                while data := content.read(PART_BYTES):
                    if stopped.is_set():
                        raise Cancelled("the copy was ended", where=f"{self.url}/{name}")
                    digest.update(data)
                    copy.write(data)
            nbytes = int(files.info(f"{path}/{name}")["size"])
        if nbytes != sealed.nbytes or digest.hexdigest() != sealed.sha256:
            raise Damaged(
                "the copy is not what was sealed",
                where=f"{self.url}/{name}",
                why=f"it has {nbytes} bytes, {sealed.nbytes} were sealed, or its SHA-256 is another one",
                next_step="check the checkpoint: flotilla checkpoint verify",
            )

    def _sealed(self) -> FolderManifest | None:
        """Return what a manifest of ours says of the folder: its own, or that of the folder around it."""
        content = self.read_text(FILE_NAME)
        if content is not None and (files := _files_of(content, "")) is not None:
            own = content.encode()
            files[FILE_NAME] = SealedFile(len(own), hashlib.sha256(own).hexdigest())
            return FolderManifest(files)
        around, _, name = self.url.rpartition("/")
        if around.endswith((":/", ":")):
            return None
        try:
            content = ObjectFolder(around).read_text(FILE_NAME)
        except FlotillaError:  # this folder may be readable where the one around it is not
            return None
        files = None if content is None else _files_of(content, f"{name}/")
        return FolderManifest(files) if files else None

    def _listed(self) -> dict[str, dict[str, Any]]:
        with self._named(""):
            files, path = self._open()
            files.invalidate_cache()
            listed = files.ls(path, detail=True)
        found = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in listed}
        return {name: entry for name, entry in found.items() if name}

    def _open(self) -> tuple[Any, str]:
        with self._opening:
            if self._opened is None:
                from fsspec.core import url_to_fs

                local = {"auto_mkdir": True} if self.url.startswith("file:") else {}
                files, path = url_to_fs(self.url, **local)
                self._opened = files, path.rstrip("/")
            return self._opened

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn every failure of the storage, or of its package, into an error of ours."""
        try:
            yield
        except FlotillaError:
            raise
        # Each package has exceptions of its own, with no base that is shared.
        except Exception as error:
            raise _error_of(error, self.url, name) from error


def _files_of(content: str, inside: str) -> dict[str, SealedFile] | None:
    """Return the files that a manifest lists below `inside`; None where it is no manifest of ours."""
    try:
        json.loads(content)["format"]
        sealed = Manifest.parse(content, FILE_NAME).files
    except (ValueError, KeyError, TypeError, Damaged):
        return None
    return {
        safe_name(name.removeprefix(inside)): file for name, file in sealed.items() if name.startswith(inside)
    }


def _error_of(error: Exception, url: str, name: str) -> FlotillaError:
    scheme, _, rest = url.partition("://")
    where, why = f"{url}/{name}" if name else url, f"{type(error).__name__}: {error}"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ImportError):
        return FailedPrecondition(
            f"no package here opens {scheme}://",
            where=where,
            why=str(error),
            next_step=f"install {STORES.get(scheme) or 'fsspec'} into the environment of Flotilla on this host",
        )
    if isinstance(error, PermissionError) or kinds.intersection(_NO_CREDENTIALS):
        return PermissionDenied(
            "the object storage refuses us",
            where=where,
            why=why,
            next_step=f"give credentials that {STORES.get(scheme) or 'the system'} finds, as variables in "
            "`environment` of the section in stack.yaml or as its own files",
        )
    if isinstance(error, FileNotFoundError):
        bucket = rest.partition("/")[0]
        return NotFound(
            "the object storage has no such bucket or folder",
            where=where,
            why=why,
            next_step=f"check the bucket {bucket!r} and the prefix" if bucket else "check the path",
        )
    if isinstance(error, OSError) and error.errno == 28:
        return DiskFull("the folder cannot be written", where=where, why=why, next_step="free space there")
    return Unavailable(
        "the object storage does not answer as it should",
        where=where,
        why=why,
        next_step="check the network and the endpoint (AWS_ENDPOINT_URL for S3 of another vendor)",
    )
