"""Files that other processes of the same user read.

Invariants: a reader sees the old content or the new one, never a part of it; what a stack writes is its owner's alone,
and in UTF-8 whatever the locale. What another author put in the place of a file, such as a named pipe, is never waited
for.
"""

from __future__ import annotations

import codecs
import errno
import locale
import os
import secrets
import stat
import sys
from io import BufferedReader
from pathlib import Path


def keep_private() -> None:
    """Let this process and its children make files and folders that no other user can open."""
    os.umask(0o077)


def speak_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, with its children, where the locale has another encoding.

    What we read and write is UTF-8, and so are the files that torch and others open without a word of their encoding.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    if not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def make_private_folder(path: Path) -> None:
    """Make the folder where it is missing, with its parents, for its owner alone."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: Path, text: str, *, is_lasting: bool = False) -> None:
    """Write aside, for the owner alone, then rename; make the folder where it is missing.

    What `is_lasting` is on disk before it has its name.
    """
    make_private_folder(path.parent)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if is_lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


_OTHER_KINDS = {
    stat.S_IFDIR: "it is a folder",
    stat.S_IFIFO: "it is a named pipe",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes; raise OSError for anything else, which could block or have no end."""
    require_regular(os.stat(path), path)
    # It may be another one by now, and a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def require_regular(found: os.stat_result, path: Path) -> None:
    """Raise OSError where this is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        why = _OTHER_KINDS.get(stat.S_IFMT(found.st_mode), "it is no regular file")
        raise OSError(errno.EINVAL, why, str(path))
