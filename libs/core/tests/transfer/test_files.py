"""Folders between hosts: what may be read, what arrives, and what is left when something goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import files_pb2 as pb
from flotilla.common.v1 import files_pb2_grpc
from flotilla_core import rpc
from flotilla_core.errors import (
    Damaged,
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.transfer import FileServicer, Offers, shared_folder, shares
from flotilla_core.transfer import files as files_module
from flotilla_core.transfer.folders import FolderManifest, found_files, stamp_of
from flotilla_testing.credentials import credential, ours
from flotilla_testing.files import files_in
from flotilla_testing.servers import serving

LARGE = os.urandom(3 * PART_BYTES + 17)
MODEL = {"config.json": b"{}", "model.safetensors": LARGE, "tokenizer.json": b""}
FETCH = """
import asyncio, sys
from pathlib import Path
from flotilla_testing.files import files_in
folder, digest, address = sys.argv[1:]
asyncio.run(files_in(Path(folder)).fetch(digest, address, what="the model"))
"""
Change = Callable[[pb.ReadFileRequest, int, bytes], bytes]


class Faulty(FileServicer):
    """Changes or breaks what it sends, as the test says."""

    def __init__(self, offers: Offers) -> None:
        super().__init__(offers)
        self.change: Change = lambda _request, _number, data: data
        self.asked: list[tuple[str, int]] = []
        self.pauses_at = -1
        self.paused = asyncio.Event()

    async def ReadFile(self, request: pb.ReadFileRequest, context: Any) -> AsyncIterator[pb.ReadFileResponse]:
        self.asked.append((request.name, request.offset))
        number = 0
        async for reply in super().ReadFile(request, context):
            if number == self.pauses_at:
                self.paused.set()
                await asyncio.Event().wait()
            yield pb.ReadFileResponse(data=self.change(request, number, reply.data))
            number += 1


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@asynccontextmanager
async def owner(state: Path) -> AsyncIterator[tuple[Any, Faulty]]:
    """A service that offers, under its address."""
    files = files_in(state)
    servicer = Faulty(files.offers)
    async with serving(servicer) as files.address:
        yield files, servicer


async def offered(files: Any, folder: Path) -> pb.FolderReference:
    """Offer a folder under its digest, for which it is read."""
    reference = await files.offer_here(folder)
    reference.digest = (await files.offers.manifest(reference.stamp)).digest
    return reference


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "there" / "model", MODEL)


async def test_a_folder_that_is_not_here_arrives_whole_under_its_digest(tmp_path: Path, model: Path) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = offering.offer(model)
        reference.path = str(tmp_path / "nowhere")
        folder = await files_in(tmp_path / "here", offering.address).here(reference)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == MODEL
        assert folder.name == (await offering.offers.manifest(reference.stamp)).digest
        asked = len(servicer.asked)
        # Another process of this host uses the same copy.
        assert await files_in(tmp_path / "here", offering.address).here(reference) == folder
        assert len(servicer.asked) == asked


async def test_a_folder_that_is_here_is_used_in_place_and_not_read(tmp_path: Path, model: Path) -> None:
    reference = files_in(tmp_path / "owner").offer(model)
    assert reference.digest == "", "the owner has not read it either"
    # Nobody could be asked: the stamp is enough.
    assert await files_in(tmp_path / "here").here(reference) == model


async def test_a_copy_with_other_times_is_used_when_its_content_is_the_same(
    tmp_path: Path, model: Path
) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        same = write(tmp_path / "copied", MODEL)
        os.utime(same / "config.json", (1, 1))
        reference = offering.offer(model)
        reference.path = str(same)
        assert await files_in(tmp_path / "here", offering.address).here(reference) == same
        assert servicer.asked == [], "the digest was compared, and no file was fetched"


async def test_a_folder_with_the_path_but_other_content_is_not_used(tmp_path: Path, model: Path) -> None:
    async with owner(tmp_path / "owner") as (offering, _):
        other = write(tmp_path / "other", {**MODEL, "config.json": b"{ }"})
        reference = offering.offer(model)
        reference.path = str(other)
        folder = await files_in(tmp_path / "here", offering.address).here(reference)
        assert folder != other and (folder / "config.json").read_bytes() == b"{}"


async def test_a_damaged_byte_is_refused_by_the_name_of_its_file(tmp_path: Path, model: Path) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = await offered(offering, model)
        here = files_in(tmp_path / "here")
        servicer.change = lambda request, number, data: (
            data[:-1] + bytes([data[-1] ^ 1]) if (request.name, number) == ("model.safetensors", 1) else data
        )
        with pytest.raises(Damaged, match=r"model\.safetensors arrived damaged"):
            await here.fetch(reference.digest, what="the model", address=reference.address)
        assert not (tmp_path / "here" / "files" / reference.digest).exists()
        servicer.change = lambda _request, _number, data: data
        folder = await here.fetch(reference.digest, what="the model", address=reference.address)
        assert (folder / "model.safetensors").read_bytes() == LARGE


async def test_a_fetch_that_is_cut_off_goes_on_where_it_was(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "FIRST_PAUSE_S", 0.0)

    def cut_off(request: pb.ReadFileRequest, number: int, data: bytes) -> bytes:
        if request.name == "model.safetensors" and number == 2 and not request.offset:
            raise Unavailable("the host went away")
        return data

    async with owner(tmp_path / "owner") as (offering, servicer):
        servicer.change = cut_off
        reference = await offered(offering, model)
        folder = await files_in(tmp_path / "here").fetch(
            reference.digest, reference.address, what="the model"
        )
        assert (folder / "model.safetensors").read_bytes() == LARGE
        offsets = [offset for name, offset in servicer.asked if name == "model.safetensors"]
        assert offsets == [0, 2 * PART_BYTES]


async def test_a_fetch_whose_process_was_killed_is_continued_by_the_next_one(
    tmp_path: Path, model: Path
) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = await offered(offering, model)
        servicer.pauses_at = 2
        credential(tmp_path / "here")
        command = [sys.executable, "-c", FETCH, str(tmp_path / "here"), reference.digest, offering.address]
        process = await asyncio.create_subprocess_exec(*command)
        await asyncio.wait_for(servicer.paused.wait(), 60)
        parts = tmp_path / "here" / "files" / f".{reference.digest}.fetching" / ".parts"
        sha256 = (await offering.offers.manifest(reference.digest)).files["model.safetensors"].sha256
        async with asyncio.timeout(60):
            while not (parts / sha256).exists() or (parts / sha256).stat().st_size < 2 * PART_BYTES:
                await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        servicer.pauses_at = -1
        folder = await files_in(tmp_path / "here").fetch(
            reference.digest, reference.address, what="the model"
        )
        assert (folder / "model.safetensors").read_bytes() == LARGE
        offsets = [offset for name, offset in servicer.asked if name == "model.safetensors"]
        assert offsets == [0, 2 * PART_BYTES]


async def test_one_process_of_a_host_fetches_and_the_others_wait_for_it(tmp_path: Path, model: Path) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = await offered(offering, model)
        fetches = [
            files_in(tmp_path / "here").fetch(reference.digest, what="the model", address=reference.address)
            for _ in range(4)
        ]
        folders = await asyncio.gather(*fetches)
        assert len(set(folders)) == 1
        assert len(servicer.asked) == 2, "each file with content once"


async def test_nothing_can_be_read_that_was_not_offered(tmp_path: Path, model: Path) -> None:
    (tmp_path / "there" / "secret.json").write_text("secret")
    (model / "notes.py").write_text("secret")
    async with owner(tmp_path / "owner") as (offering, _):
        reference = await offered(offering, model)
        async with rpc.connect(offering.address, credential=ours()) as channel:
            stub = files_pb2_grpc.FileServiceStub(channel)

            async def read(digest: str, name: str, offset: int = 0) -> bytes:
                request = pb.ReadFileRequest(digest=digest, name=name, offset=offset)
                stream = rpc.server_stream(stub.ReadFile, request, idle_timeout_s=10)
                return b"".join([reply.data async for reply in stream])

            assert await read(reference.digest, "config.json") == b"{}"
            for name in ("../secret.json", str(model / "config.json"), "notes.py", "", "."):
                with pytest.raises(NotFound):
                    await read(reference.digest, name)
            with pytest.raises(NotFound):
                await read(str(model), "config.json")
            with pytest.raises(InvalidRequest, match="beyond the end"):
                await read(reference.digest, "config.json", 3)
            for name in ("0" * 64, str(model), ""):
                with pytest.raises(NotFound):
                    stream = rpc.server_stream(
                        stub.GetManifest, pb.GetManifestRequest(name=name), idle_timeout_s=10
                    )
                    await anext(stream)
            # What changed since is another file than the one that was offered.
            (model / "config.json").write_text("[]")
            with pytest.raises(FailedPrecondition, match="changed since it was offered"):
                await read(reference.digest, "config.json")


def test_no_link_leads_out_of_a_folder_except_to_the_blobs_of_its_snapshot(
    tmp_path: Path, model: Path
) -> None:
    blob = write(tmp_path / "hub" / "blobs", {"1234": b"{}"}) / "1234"
    snapshot = write(tmp_path / "hub" / "snapshots" / "main", {})
    (snapshot / "config.json").symlink_to(blob)
    assert [file.name for file in found_files(snapshot)] == ["config.json"]
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (model / "more.json").symlink_to(outside)
    with pytest.raises(FailedPrecondition, match="a link leads out of the folder"):
        found_files(model)


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", ".parts/a", "a\\b", "", "a//b", "a/"])
def test_a_name_that_leads_out_of_the_copy_is_refused(name: str) -> None:
    reply = pb.GetManifestResponse(
        digest="0" * 64, files=[pb.OfferedFile(name=name, bytes=1, sha256="0" * 64)]
    )
    with pytest.raises(InvalidRequest, match="no name of a file"):
        FolderManifest.from_proto(reply)


@pytest.mark.parametrize("sha256", ["", "../x", "/x", "0" * 63, "0" * 64 + "/", "A" * 64])
def test_a_digest_that_is_no_digest_is_refused_because_files_are_named_by_it(
    sha256: str, tmp_path: Path
) -> None:
    reply = pb.GetManifestResponse(digest="0" * 64, files=[pb.OfferedFile(name="a", bytes=1, sha256=sha256)])
    with pytest.raises(InvalidRequest, match="is no SHA-256"):
        FolderManifest.from_proto(reply)
    entry = {"a": {"bytes": 1, "sha256": sha256}}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": entry}))
    with pytest.raises(Damaged, match="is no SHA-256"):
        FolderManifest.sealed(tmp_path)


def test_code_travels_with_the_modules_beside_it_that_it_imports(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "code",
        {
            "rewards.py": b"import json\ndef score():\n    from helper import words\n",
            "helper.py": b"import deeper.one\n",
            "unrelated.py": b"",
            "secret.txt": b"secret",
        },
    )
    write(folder / "deeper", {"__init__.py": b"", "one.py": b""})
    write(folder / "deeper" / ".ipynb_checkpoints", {"one-checkpoint.py": b""})
    names = [file.name for file in found_files(folder / "rewards.py")]
    assert names == ["deeper/__init__.py", "deeper/one.py", "helper.py", "rewards.py"]


async def test_a_reward_file_that_was_edited_is_another_one_at_the_next_call(tmp_path: Path) -> None:
    file = write(tmp_path / "there", {"rewards.py": b"one = 1\n"}) / "rewards.py"
    async with owner(tmp_path / "owner") as (offering, _):
        first = offering.offer(file)
        here = files_in(tmp_path / "here", offering.address)
        first.path = "/nowhere/rewards.py"
        assert (await here.here(first)).read_bytes() == b"one = 1\n"
        file.write_bytes(b"two = 22\n")
        second = offering.offer(file)
        second.path = "/nowhere/rewards.py"
        assert (await here.here(second)).read_bytes() == b"two = 22\n"
        assert first.digest != second.digest


async def test_the_cache_removes_what_was_used_longest_ago_and_nothing_in_use(tmp_path: Path) -> None:
    third = len(LARGE) / (1 << 30) * 2.5  # room for two of three
    async with owner(tmp_path / "owner") as (offering, _):
        digests = []
        for number in range(3):
            folder = write(
                tmp_path / str(number), {"config.json": str(number).encode(), "model.safetensors": LARGE}
            )
            digests.append((await offered(offering, folder)).digest)

        async def fetch(digest: str) -> Any:
            # The locks of a process that has ended are gone: here when its files are no longer referred to.
            files = files_in(tmp_path / "here", most_gib=third)
            await files.fetch(digest, what="a model", address=offering.address)
            return files

        first, second = await fetch(digests[0]), await fetch(digests[1])
        with_both = files_in(tmp_path / "here", most_gib=third)
        await with_both.fetch(digests[0], what="a model", address=offering.address)
        for files in (first, second):
            for digest in digests:
                files.release(tmp_path / "here" / "files" / digest)
        await fetch(digests[2])
        left = {folder.name for folder in (tmp_path / "here" / "files").iterdir() if folder.is_dir()}
        assert left == {digests[0], digests[2]}
        with pytest.raises(Exhausted, match="file_cache_gib"):
            await files_in(tmp_path / "elsewhere", most_gib=0.001).fetch(
                digests[0], what="a model", address=offering.address
            )


async def test_a_copy_that_is_let_go_makes_room_and_one_more_than_the_limit_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = len(LARGE) / (1 << 30) * 1.5
    async with owner(tmp_path / "owner") as (offering, _):
        digests = [
            (await offered(offering, write(tmp_path / name, {**MODEL, "config.json": name.encode()}))).digest
            for name in ("a", "b", "c")
        ]
        here = files_in(tmp_path / "here", offering.address, most_gib=one)
        copies = [await here.fetch(digest, what="a model") for digest in digests[:2]]
        assert all(copy.is_dir() for copy in copies), "both are in use"
        for copy in copies:
            here.release(copy)
        await here.fetch(digests[2], what="a model")
        assert not any(copy.exists() for copy in copies)


async def test_a_copy_of_a_checkpoint_goes_on_behind_what_an_earlier_one_brought(
    tmp_path: Path, model: Path
) -> None:
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = await offered(offering, model)
        here = files_in(tmp_path / "here")
        servicer.pauses_at = 1
        first = asyncio.create_task(here.fetch_into(reference, tmp_path / ".step-000001.aaaa.writing"))
        async with asyncio.timeout(10):  # for the first part on disk
            while sum(file.stat().st_size for file in tmp_path.glob(".*.fetching/.parts/*")) < PART_BYTES:
                await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        servicer.pauses_at = -1
        servicer.asked.clear()
        # The next attempt has another place.
        await here.fetch_into(reference, tmp_path / ".step-000001.bbbb.writing")
        assert ("model.safetensors", PART_BYTES) in servicer.asked
        assert (tmp_path / ".step-000001.bbbb.writing" / "model.safetensors").read_bytes() == LARGE
        assert not list(tmp_path.glob(".*.fetching"))


async def test_a_fetch_goes_on_for_as_long_as_bytes_arrive_and_no_longer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(files_module, "PATIENCE_S", 0.5)
    async with owner(tmp_path / "owner") as (offering, servicer):
        reference = await offered(offering, model)

        def cut(request: pb.ReadFileRequest, number: int, data: bytes) -> bytes:
            if number and request.name == "model.safetensors":
                raise Unavailable("cut off")
            return data

        servicer.change = cut
        # One part comes with each attempt.
        folder = await files_in(tmp_path / "here").fetch(reference.digest, reference.address, what="a model")
        assert (folder / "model.safetensors").read_bytes() == LARGE

        def dead(request: pb.ReadFileRequest, number: int, data: bytes) -> bytes:
            raise Unavailable("cut off")

        servicer.change = dead
        with pytest.raises(DeadlineExceeded, match=rf"from {reference.address}.*nothing came.*cut off"):
            await files_in(tmp_path / "there2").fetch(reference.digest, reference.address, what="a model")


async def test_a_model_is_fetched_by_its_name_and_read_once(tmp_path: Path, model: Path) -> None:
    async with owner(tmp_path / "owner") as (offering, _):
        offering.offers.offer_model("model of policy", lambda: model)
        here = files_in(tmp_path / "here", offering.address)
        folder = await here.fetch("model of policy", what="the model")
        assert (folder / "model.safetensors").read_bytes() == LARGE
        assert "model.safetensors" in (tmp_path / "owner" / "files" / "digests.json").read_text()


def test_a_host_that_does_not_find_the_key_does_not_share_the_folder(tmp_path: Path) -> None:
    place = shared_folder(tmp_path)
    assert place == shared_folder(tmp_path)
    assert shares(place)
    (tmp_path / ".key").write_text("another")
    assert not shares(place)
    assert not shares(pb.SharedFolder(path="/nowhere/.key", key="a"))
    with pytest.raises(InvalidRequest):
        shares(pb.SharedFolder(path="/etc/passwd", key="root"))


def test_a_stamp_never_looks_like_a_digest(model: Path) -> None:
    assert stamp_of(found_files(model)).startswith("stamp-")
