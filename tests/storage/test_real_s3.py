"""Models and checkpoints in a real S3 server, by the client that a user installs.

`make test-storage` installs both into an environment of their own; without them, the tests are skipped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.checkpoint import Manifest
from flotilla_core.errors import Cancelled, DeadlineExceeded, NotFound, PermissionDenied
from flotilla_core.transfer import files as files_module
from flotilla_core.transfer import object_store
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_testing.files import files_in

server = pytest.importorskip("moto.server", reason="no S3 server: make test-storage")
s3fs = pytest.importorskip("s3fs", reason="no client of S3: make test-storage")

pytestmark = pytest.mark.timeout(180)

PART = 6 << 20
LARGE = os.urandom(2 * PART + 17)
MODEL = {"config.json": b"{}", "model.safetensors": LARGE, "tokenizer.json": b"{ }"}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with the bucket `lab`, where the client finds it."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files_module, "STORE_PART_BYTES", PART)
    monkeypatch.setattr(object_store, "PART_BYTES", PART)
    monkeypatch.setattr(files_module, "FIRST_PAUSE_S", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    client = s3fs.S3FileSystem()
    client.mkdir("lab")
    try:
        yield client
    finally:
        client.rm("lab", recursive=True)
        s3fs.S3FileSystem.clear_instance_cache()
        running.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "step-000002"
    (folder / "model").mkdir(parents=True)
    (folder / "coordinator.json").write_bytes(b"{}")
    for name, content in MODEL.items():
        (folder / "model" / name).write_bytes(content)
    Manifest.seal(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def test_a_model_is_fetched_and_a_new_one_under_its_name_is_fetched_anew(
    s3: Any, tmp_path: Path
) -> None:
    for name, content in MODEL.items():
        s3.pipe_file(f"lab/chat/{name}", content)
    copy = await files_in(tmp_path).fetch_url("s3://lab/chat")
    assert contents(copy) == MODEL
    assert await files_in(tmp_path).fetch_url("s3://lab/chat") == copy
    s3.pipe_file("lab/chat/config.json", b"[]")
    assert contents(await files_in(tmp_path).fetch_url("s3://lab/chat")) == {**MODEL, "config.json": b"[]"}


async def test_a_checkpoint_is_copied_and_comes_back_the_same(
    s3: Any, tmp_path: Path, checkpoint: Path
) -> None:
    url = "s3://lab/runs/run-1/step-000002"
    ObjectFolder(url).take_copy(checkpoint, threading.Event())
    assert ObjectFolder("s3://lab/runs/run-1").folders() == ["step-000002"]
    target = tmp_path / "there" / "step-000002"
    target.parent.mkdir()
    await files_in(tmp_path).fetch_checkpoint(url, target)
    assert contents(target) == contents(checkpoint)
    assert contents(await files_in(tmp_path).fetch_url(f"{url}/model")) == MODEL


async def test_half_a_copy_is_not_taken(s3: Any, tmp_path: Path, checkpoint: Path) -> None:
    url = "s3://lab/runs/run-1/step-000002"
    ObjectFolder(url).take_copy(checkpoint, threading.Event())
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Cancelled):
        ObjectFolder(url).take_copy(checkpoint, stopped)
    with pytest.raises(NotFound, match="no whole checkpoint"):
        await files_in(tmp_path).fetch_checkpoint(url, tmp_path / "there")


async def test_a_server_that_goes_away_in_the_middle_costs_what_was_under_way(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in MODEL.items():
        s3.pipe_file(f"lab/chat/{name}", content)
    asked: list[int] = []
    read, goes_away = ObjectFolder.read, threading.Event()

    def watched(store: ObjectFolder, name: str, offset: int, nbytes: int) -> bytes:
        if name != "model.safetensors":
            return read(store, name, offset, nbytes)
        asked.append(offset)
        if offset and not goes_away.is_set():
            goes_away.set()
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            s3fs.S3FileSystem.clear_instance_cache()
            return read(ObjectFolder(store.url), name, offset, nbytes)
        return read(store, name, offset, nbytes)

    monkeypatch.setattr(ObjectFolder, "read", watched)
    monkeypatch.setattr(files_module, "PATIENCE_S", -1.0)
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    with pytest.raises(DeadlineExceeded, match="does not arrive") as away:
        await files_in(tmp_path).fetch_url("s3://lab/chat")
    assert "does not answer as it should" in away.value.why and "s3://lab/chat" in away.value.why
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    assert contents(await files_in(tmp_path).fetch_url("s3://lab/chat")) == MODEL
    assert asked == [0, PART, PART, 2 * PART]


def test_a_missing_bucket_and_missing_credentials_are_named(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="no such bucket or folder") as missing:
        ObjectFolder("s3://nowhere/chat").manifest()
    assert "'nowhere'" in missing.value.next_step
    with pytest.raises(NotFound):
        ObjectFolder("s3://lab/nothing").manifest()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(PermissionDenied, match="refuses us") as nobody:
        ObjectFolder("s3://lab/chat").manifest()
    assert "credentials that s3fs finds" in nobody.value.next_step
