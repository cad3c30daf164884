"""What counts as a full disk, and what a state directory must be."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from pathlib import Path

import pytest

from flotilla_core.checkpoint import on_disk
from flotilla_core.disk import check_state_directory, disk_full, lacks_room, names_full_disk, why_full
from flotilla_core.errors import DiskFull, FailedPrecondition
from flotilla_core.logs import LossyStream


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_the_system_says_it(number: int, tmp_path: Path) -> None:
    named = disk_full(OSError(number, os.strerror(number)), "it cannot be written", tmp_path / "file")
    assert named is not None
    assert str(tmp_path / "file") in str(named) and "MiB free of" in str(named)


def test_sqlite_says_it(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(DiskFull, match="the disk is full"), names_full_disk("it", tmp_path):
        db.execute("CREATE TABLE t (x)")
        db.execute("INSERT INTO t VALUES (zeroblob(100000))")


def test_a_library_that_keeps_no_number_says_it() -> None:
    assert why_full(RuntimeError("I/O error: No space left on device (os error 28)")) == "the disk is full"


def test_nothing_else_is_a_full_disk(tmp_path: Path) -> None:
    for other in (
        OSError(errno.EFBIG, "File too large"),
        PermissionError(errno.EACCES, "no"),
        ValueError("x"),
    ):
        assert why_full(other) == ""
    with pytest.raises(sqlite3.OperationalError), names_full_disk("it", tmp_path):
        sqlite3.connect(tmp_path / "db").execute("SELECT nothing")


def test_a_checkpoint_that_a_full_disk_refuses_is_told_apart_from_other_failures(tmp_path: Path) -> None:
    def refuse(error: OSError) -> None:
        raise error

    with pytest.raises(DiskFull, match=r"the checkpoint cannot be written \(.*step-000001"):
        on_disk(tmp_path / "step-000001", refuse, full())
    with pytest.raises(FailedPrecondition, match="Input/output error"):
        on_disk(tmp_path / "step-000001", refuse, OSError(errno.EIO, os.strerror(errno.EIO)))


def test_a_state_directory_is_made_and_tried(tmp_path: Path) -> None:
    check_state_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert lacks_room(tmp_path / "a" / "b") is None


def test_a_state_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "stack"):
        with pytest.raises(FailedPrecondition, match=r"the state directory cannot be used .*state_dir"):
            check_state_directory(wrong)


def test_a_probe_that_a_full_disk_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object) -> io.BytesIO:
        raise full()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(DiskFull, match="the state directory cannot be written"):
            check_state_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise full()

        def flush(self) -> None:
            raise full()

    stream = LossyStream(Full())
    assert stream.write("a line\n") == 7
    stream.writelines(["one", "two"])
    stream.flush()
