"""The files of a folder that may travel, and the two names by which hosts tell whether they mean the same folder.

Invariants: the stamp is made of names, sizes and modification times, so it costs no reading; the digest is made of
names, sizes and contents, and is the same on every host. A folder is a model (the files that a model has), a sealed
checkpoint (what its manifest lists), or a Python file with the modules beside it that it imports. No link leads out of
it, except to the blobs of a hub snapshot, and modules that the user of a run has linked. A name from another host has
no part that leads out of a folder or hides, and a digest from there is a SHA-256 and nothing else. The section of an
objective names functions of the user's. To look for them changes nothing: a protobuf map makes an entry of every key
that is asked for, so a key is looked up only where it exists.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePosixPath

from filelock import FileLock
from google.protobuf.struct_pb2 import Struct, Value

from flotilla.common.v1 import files_pb2 as pb
from flotilla_core.checkpoint.manifest import FILE_NAME, Manifest, SealedFile, checked_sha256
from flotilla_core.config.model import file_of_function
from flotilla_core.errors import Damaged, FailedPrecondition, InvalidRequest, NotFound
from flotilla_core.files import write_atomically
from flotilla_core.model_folder import FILES
from flotilla_core.rpc.channel import PART_BYTES

REMEMBERED_BYTES = 1 << 20
"""Digests of files from this size on are kept on disk; smaller ones are read again by the next process."""
STAMP = "stamp-"
"""Begins every stamp, so that none looks like a digest."""
_PARTS = ("loss", "advantage")
MOST_MODULES = 1000
"""Modules beside a file of the user's; more are taken for a mistake."""


@dataclass(frozen=True)
class FoundFile:
    """One file of a folder, as it was when it was listed."""

    name: str
    """The path relative to the folder, with "/" between parts."""
    path: Path
    """The path of its content, without links."""
    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, path: Path) -> FoundFile:
        """Look at a file."""
        state = path.stat()
        return cls(name, path, state.st_size, state.st_mtime_ns, state.st_ino)

    def open(self) -> BufferedReader:
        """Open the file for reading; refuse one that is not as it was listed."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise _changed(self, error.strerror or str(error)) from None
        state = os.fstat(descriptor)
        if (state.st_size, state.st_mtime_ns, state.st_ino) != (self.nbytes, self.mtime_ns, self.inode):
            os.close(descriptor)
            raise _changed(self, "it is another file, or was written to")
        return open(descriptor, "rb")


def _changed(file: FoundFile, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        "the file changed since it was offered",
        where=str(file.path),
        why=why,
        next_step="start the run, or the service, again: it offers the files as they are now",
    )


@dataclass(frozen=True)
class FolderManifest:
    """The files of a folder with their digests, by name."""

    files: Mapping[str, SealedFile]

    @property
    def digest(self) -> str:
        """The name of the folder on every host."""
        return _sha256(f"{name}\0{file.nbytes}\0{file.sha256}\n" for name, file in sorted(self.files.items()))

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.nbytes for file in self.files.values())

    @classmethod
    def sealed(cls, folder: Path) -> FolderManifest:
        """Return the manifest of a sealed checkpoint; what it lists is not read again."""
        path = folder / FILE_NAME
        content = path.read_bytes()
        own = SealedFile(len(content), hashlib.sha256(content).hexdigest())
        return cls({**Manifest.read(folder).files, FILE_NAME: own})

    def to_proto(self) -> pb.GetManifestResponse:
        """Write it for the wire."""
        files = (
            pb.OfferedFile(name=name, bytes=file.nbytes, sha256=file.sha256)
            for name, file in sorted(self.files.items())
        )
        return pb.GetManifestResponse(digest=self.digest, files=files)

    @classmethod
    def from_proto(cls, reply: pb.GetManifestResponse) -> FolderManifest:
        """Read one of another host; refuse names that lead out of a folder, and another digest than it says."""
        try:
            manifest = cls(
                {
                    safe_name(file.name): SealedFile(file.bytes, checked_sha256(file.sha256))
                    for file in reply.files
                }
            )
        except ValueError as error:
            raise InvalidRequest("the list of files cannot be used", why=str(error)) from None
        if not manifest.files or manifest.digest != reply.digest:
            raise Damaged(
                "the list of files arrived damaged",
                where=f"folder {reply.digest[:12]}",
                why="its digest is not that of the files in it",
                next_step="fetch it again",
            )
        return manifest


def found_files(path: Path, *, sealed: bool = False) -> list[FoundFile]:
    """List what travels of a model folder, of a sealed checkpoint, or of a Python file with its modules."""
    try:
        if path.suffix == ".py" and path.is_file():
            names = {str(module.relative_to(path.parent)) for module in _modules(path)}
            return [FoundFile.of(name, (path.parent / name).resolve()) for name in sorted(names)]
        if sealed:
            names = {*Manifest.read(path).files, FILE_NAME}
        else:
            names = {file.name for pattern in FILES for file in path.glob(pattern) if file.is_file()}
            names = {name for name in names if not name.startswith(".")}
        found = [FoundFile.of(name, _inside(path, path / name)) for name in sorted(names)]
    except OSError as error:
        raise NotFound(
            "the folder cannot be read",
            where=error.filename or str(path),
            why=error.strerror or str(error),
        ) from error
    if not found:
        raise NotFound(
            "the folder has no file of a model", where=str(path), why=f"it has none of {', '.join(FILES)}"
        )
    return found


def stamp_of(files: Iterable[FoundFile]) -> str:
    """Return the digest of what the files look like from outside."""
    return STAMP + _sha256(f"{file.name}\0{file.nbytes}\0{file.mtime_ns}\n" for file in files)


def _uncounted(_: int) -> None:
    """Count nothing."""


class Digests:
    """The digests of files that were read before, in this process or an earlier one."""

    def __init__(self, remembered: Path) -> None:
        self._remembered = remembered
        self._lock = threading.Lock()
        self._known: dict[str, list[int | str]] = _read(remembered)

    def manifest(
        self, files: Iterable[FoundFile], read: Callable[[int], None] = _uncounted
    ) -> FolderManifest:
        """Return the manifest of files; those that were read before and did not change are not read again.

        `read` is called with the bytes of each part that is read, and of each file that need not be.
        """
        return FolderManifest(
            {file.name: SealedFile(file.nbytes, self._sha256(file, read)) for file in files}
        )

    def _sha256(self, file: FoundFile, read: Callable[[int], None]) -> str:
        key, looks = str(file.path), [file.nbytes, file.mtime_ns, file.inode]
        known = self._known.get(key)
        if known is not None and known[:3] == looks:
            read(file.nbytes)
            return str(known[3])
        hashed = hashlib.sha256()
        with file.open() as content:
            while data := content.read(PART_BYTES):
                hashed.update(data)
                read(len(data))
        digest = hashed.hexdigest()
        with self._lock:
            self._known[key] = [*looks, digest]
            if file.nbytes >= REMEMBERED_BYTES:
                self._remember(key)
        return digest

    def _remember(self, key: str) -> None:
        """Add a digest to those on disk, where other processes of this host have put theirs."""
        self._remembered.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._remembered.with_suffix(".lock")):
            together = _read(self._remembered) | {key: self._known[key]}
            there = {name: entry for name, entry in together.items() if os.path.exists(name)}
            write_atomically(self._remembered, json.dumps(there, indent=1))


def _read(remembered: Path) -> dict[str, list[int | str]]:
    try:
        content = json.loads(remembered.read_text("utf-8"))
        return {str(key): list(entry) for key, entry in content.items() if len(entry) == 4}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # then the files are read again


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def safe_name(name: str) -> str:
    """Return a name from another host; refuse one that leads out of a folder or hides."""
    parts = PurePosixPath(name).parts
    if (
        not parts
        or str(PurePosixPath(name)) != name
        or any(part.startswith((".", "/")) or "\\" in part or "\0" in part for part in parts)
    ):
        raise InvalidRequest(f"{name!r:.200} is no name of a file in a folder", where="the list of files")
    return name


def _inside(folder: Path, file: Path) -> Path:
    """Return the file without links; refuse one that leads out of the folder, except to the blobs of its snapshot."""
    real, home = file.resolve(strict=True), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise FailedPrecondition(
            "a link leads out of the folder",
            where=str(file),
            why=f"it leads to {real}, which nobody offered",
            next_step="put the file itself into the folder",
        )
    return real


def _modules(file: Path) -> set[Path]:
    """Return a Python file and the modules beside it that it imports, directly or through each other."""
    found, pending = {file}, [file]
    while pending:
        one = pending.pop()
        state = one.stat()
        for name in _imported(one, state.st_mtime_ns, state.st_size):
            for beside in (file.parent / f"{name}.py", *sorted((file.parent / name).glob("**/*.py"))):
                if beside not in found and beside.is_file() and not _is_hidden(beside, file.parent):
                    found.add(beside)
                    pending.append(beside)
        if len(found) > MOST_MODULES:
            raise FailedPrecondition(
                f"more than {MOST_MODULES} modules belong to the file",
                where=str(file),
                next_step="move the function to a folder with what it needs",
            )
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    """Return whether an editor's copies, a virtual environment or the like have this file."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


@lru_cache(maxsize=4096)
def _imported(file: Path, mtime_ns: int, nbytes: int) -> frozenset[str]:
    """Return the top-level names that a file imports anywhere; a file that is not Python imports none."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()  # whoever loads it reports that
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return frozenset(names)


def files_of_functions(section: Struct) -> list[Path]:
    """Return the files whose functions the section names."""
    return [file for value in _kinds(section) if (file := file_of_function(value.string_value)) is not None]


def move_functions(section: Struct, there: Path, here: Path) -> None:
    """Let the section name the functions of the file `there` in its copy `here`."""
    for value in _kinds(section):
        if file_of_function(value.string_value) == there:
            value.string_value = f"{here}:{value.string_value.rpartition(':')[2]}"


def _kinds(section: Struct) -> Iterator[Value]:
    for part in _PARTS:
        # The loss of a preference algorithm is a word, and has no parts.
        if part in section.fields and section.fields[part].HasField("struct_value"):
            chosen = section.fields[part].struct_value
            if "type" in chosen.fields:
                yield chosen.fields["type"]
