"""Folders in object storage: what is fetched, what is copied, and what is left when something goes wrong.

The storage is a folder by its file:// address; `make test-storage` does the same with an S3 server.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from flotilla_core.checkpoint import Manifest
from flotilla_core.config.model import FolderOrUrl
from flotilla_core.errors import Cancelled, Damaged, FailedPrecondition, NotFound, Unavailable
from flotilla_core.transfer import files as files_module
from flotilla_core.transfer import object_store
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_testing.files import files_in

LARGE = os.urandom(300_000)
MODEL = {"config.json": b"{}", "model.safetensors": LARGE, "notes.bin": b"not of a model"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "STORE_PART_BYTES", 100_000)
    monkeypatch.setattr(object_store, "PART_BYTES", 100_000)
    monkeypatch.setattr(files_module, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    files = {"coordinator.json": b"{}", "model/config.json": b"{}", "model/model.safetensors": LARGE}
    folder = write(tmp_path / "here" / "step-000002", files)
    Manifest.seal(folder)
    return folder


async def test_a_model_is_fetched_once_a_host_and_anew_when_it_changed(tmp_path: Path, bucket: Path) -> None:
    write(bucket / "model", MODEL)
    url = f"file://{bucket}/model"
    copy = await files_in(tmp_path / "state").fetch_url(url)
    assert contents(copy) == {"config.json": b"{}", "model.safetensors": LARGE}
    before = (copy / "model.safetensors").stat().st_ino
    assert await files_in(tmp_path / "state").fetch_url(url) == copy
    assert (copy / "model.safetensors").stat().st_ino == before, "another process used the same copy"
    write(bucket / "model", {"config.json": b"{ }"})
    other = await files_in(tmp_path / "state").fetch_url(url)
    assert other != copy and contents(other)["config.json"] == b"{ }"


async def test_a_fetch_that_is_cut_off_goes_on_behind_what_has_arrived(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(bucket / "model", MODEL)
    asked: list[int] = []
    read = ObjectFolder.read

    def cut_off_once(store: ObjectFolder, name: str, offset: int, nbytes: int) -> bytes:
        if name == "model.safetensors":
            asked.append(offset)
            if asked == [0, 100_000]:
                raise Unavailable("the object storage does not answer as it should")
        return read(store, name, offset, nbytes)

    monkeypatch.setattr(ObjectFolder, "read", cut_off_once)
    copy = await files_in(tmp_path / "state").fetch_url(f"file://{bucket}/model")
    assert asked == [0, 100_000, 100_000, 200_000]
    assert contents(copy)["model.safetensors"] == LARGE


async def test_a_folder_that_changes_meanwhile_is_refused(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(bucket / "model", MODEL)
    read = ObjectFolder.read

    def changes(store: ObjectFolder, name: str, offset: int, nbytes: int) -> bytes:
        write(bucket / "model", {"config.json": b"[]"})
        return read(store, name, offset, nbytes)

    monkeypatch.setattr(ObjectFolder, "read", changes)
    with pytest.raises(FailedPrecondition, match="changed while it was fetched"):
        await files_in(tmp_path / "state").fetch_url(f"file://{bucket}/model")
    kept = {one.suffix for one in (tmp_path / "state" / "files").iterdir() if not one.name.startswith(".")}
    assert kept == {".lock"}


async def test_a_checkpoint_is_copied_and_comes_back_the_same(
    tmp_path: Path, bucket: Path, checkpoint: Path
) -> None:
    url = f"file://{bucket}/runs/run-1/step-000002"
    assert ObjectFolder(url).take_copy(checkpoint, threading.Event()) == Manifest.read(checkpoint).nbytes
    assert contents(bucket / "runs" / "run-1" / "step-000002") == contents(checkpoint)
    target = tmp_path / "there" / "step-000002"
    target.parent.mkdir()
    await files_in(tmp_path / "state").fetch_checkpoint(url, target)
    assert contents(target) == contents(checkpoint)
    Manifest.verified(target)
    model = await files_in(tmp_path / "state").fetch_url(f"{url}/model")
    assert contents(model) == contents(checkpoint / "model")


async def test_a_damaged_copy_is_named_and_none_of_the_file_is_kept(
    tmp_path: Path, bucket: Path, checkpoint: Path
) -> None:
    url = f"file://{bucket}/step-000002"
    ObjectFolder(url).take_copy(checkpoint, threading.Event())
    damaged = bucket / "step-000002" / "model" / "model.safetensors"
    damaged.write_bytes(bytes([LARGE[0] ^ 1]) + LARGE[1:])
    with pytest.raises(Damaged, match=r"model\.safetensors arrived damaged"):
        await files_in(tmp_path / "state").fetch_url(f"{url}/model")
    assert not list((tmp_path / "state" / "files").rglob("model.safetensors"))


async def test_half_a_copy_is_never_taken_also_where_a_whole_one_was_before(
    tmp_path: Path, bucket: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{bucket}/step-000002"
    ObjectFolder(url).take_copy(checkpoint, threading.Event())
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Cancelled):
        ObjectFolder(url).take_copy(checkpoint, stopped)
    assert not (bucket / "step-000002" / "manifest.json").exists()
    with pytest.raises(NotFound, match="no whole checkpoint"):
        await files_in(tmp_path / "state").fetch_checkpoint(url, tmp_path / "there")


def test_what_is_copied_must_be_what_was_sealed(bucket: Path, checkpoint: Path) -> None:
    (checkpoint / "model" / "model.safetensors").write_bytes(bytes([LARGE[0] ^ 1]) + LARGE[1:])
    with pytest.raises(Damaged, match="not what was sealed"):
        ObjectFolder(f"file://{bucket}/step-000002").take_copy(checkpoint, threading.Event())
    assert not (bucket / "step-000002" / "manifest.json").exists()


def test_failures_are_named_with_the_next_step(bucket: Path) -> None:
    with pytest.raises(NotFound, match="no such bucket or folder") as missing:
        ObjectFolder(f"file://{bucket}/nothing").manifest()
    assert missing.value.where == f"file://{bucket}/nothing"
    bucket.mkdir()
    with pytest.raises(NotFound, match="no file of a model"):
        ObjectFolder(f"file://{bucket}").manifest()
    if importlib.util.find_spec("gcsfs") is None:
        with pytest.raises(FailedPrecondition, match="no package here opens gs://") as package:
            ObjectFolder("gs://bucket/model").manifest()
        assert "install gcsfs" in package.value.next_step


@pytest.mark.parametrize("place", ["ftp://host/model", "s3://", "s3:///", "file://a/../b"])
def test_a_place_that_is_none_is_refused_with_the_schemes(place: str) -> None:
    with pytest.raises(ValidationError, match="expected bucket/prefix behind one of s3://"):
        TypeAdapter(FolderOrUrl).validate_python(place)


def test_a_place_stays_as_it_is_written_and_a_folder_is_a_path() -> None:
    read = TypeAdapter(FolderOrUrl).validate_python
    assert read("s3://bucket/model/") == "s3://bucket/model"
    assert read("models/chat") == Path("models/chat")


def test_nobody_who_uses_no_storage_pays_for_it() -> None:
    code = "import sys, flotilla_core.transfer, flotilla_core.service; sys.exit('fsspec' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
