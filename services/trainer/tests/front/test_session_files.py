"""Where a session reads and writes: in the run's directory where the gang shares it, else on its own host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.errors import InvalidRequest
from flotilla_core.transfer import Files, FileServicer, shared_folder
from flotilla_testing.credentials import credential
from flotilla_testing.files import files_in
from flotilla_testing.servers import serving
from flotilla_trainer.front.session_files import SessionFiles


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Files]:
    files = files_in(tmp_path / "coordinator")
    async with serving(FileServicer(files.offers), credential=credential(tmp_path)) as files.address:
        yield files


@pytest.fixture
def gang(tmp_path: Path, coordinator: Files) -> SessionFiles:
    files = files_in(tmp_path / "gang", coordinator.address)
    return SessionFiles(files, tmp_path / "gang" / "remote-runs", no_other_host)


async def no_other_host(path: Path, *, sealed: bool, run_id: str) -> None:
    """Bring nothing: the gang is on one host."""


def request_of(run_directory: Path, *, elsewhere: bool = False, run_id: str = "run") -> pb.OpenSessionRequest:
    run_directory.mkdir(exist_ok=True)
    place = shared_folder(run_directory)
    if elsewhere:
        place.path = "/nowhere/.key"
    spec = session_pb2.SessionSpec(run_directory=place, dump_dir=str(run_directory / "dumps"))
    return pb.OpenSessionRequest(run_id=run_id, spec=spec)


def checkpoint(shelf: CheckpointShelf, step: int) -> Path:
    name = shelf.name_of(step)
    folder = shelf.begin(name)
    (folder / "weights").write_bytes(bytes([step]))
    Manifest.seal(folder)
    return shelf.publish(name)


async def test_a_gang_that_shares_the_directory_uses_its_paths(gang: SessionFiles, tmp_path: Path) -> None:
    run = tmp_path / "run"
    opened = await gang.open(request_of(run))
    assert opened.spec.dump_dir == str(run / "dumps")
    assert gang.export_path(str(run / "model")) == run / "model"
    assert gang.shelf(CheckpointShelf(run / "checkpoints")).path == run / "checkpoints"
    assert await gang.offered(run) is None
    path = str(run / "checkpoints" / "step-000001")
    async with gang.checkpoint(pb.LoadCheckpointRequest(path=path)) as folder:
        assert folder == Path(path)


async def test_a_gang_elsewhere_writes_to_its_own_disk_and_forgets_the_run_before(
    gang: SessionFiles, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    await gang.open(request_of(run, elsewhere=True, run_id="before"))
    before = gang.export_path(str(run / "model")).parent
    opened = await gang.open(request_of(run, elsewhere=True))
    own = tmp_path / "gang" / "remote-runs" / "run"
    assert opened.spec.dump_dir == str(own / "dumps")
    assert gang.export_path(str(run / "model")) == own / "model"
    assert own.is_dir() and not before.exists()
    shelf = gang.shelf(CheckpointShelf(run / "checkpoints"))
    for step in (1, 2, 3):
        gang.forget_older(shelf, shelf.name_of(step))
        checkpoint(shelf, step)
    assert shelf.names() == ["step-000002", "step-000003"]
    # After a fall-back the same step is made again.
    gang.forget_older(shelf, "step-000003")
    checkpoint(shelf, 3)


@pytest.mark.parametrize("run_id", ["../run", "/run", "..", ".hidden", "x" * 300])
async def test_a_run_id_that_leads_out_of_the_folder_is_refused(
    gang: SessionFiles, tmp_path: Path, run_id: str
) -> None:
    with pytest.raises(InvalidRequest, match="no name of a folder"):
        await gang.open(request_of(tmp_path / "run", elsewhere=True, run_id=run_id))


async def test_a_gang_loads_its_own_copy_where_it_is_the_same_and_else_the_coordinators(
    gang: SessionFiles, coordinator: Files, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    there = checkpoint(CheckpointShelf(run / "checkpoints"), 3)
    await gang.open(request_of(run, elsewhere=True))
    request = pb.LoadCheckpointRequest(path=str(there), folder=coordinator.offer(there, sealed=True))
    async with gang.checkpoint(request) as fetched:
        assert fetched.is_relative_to(tmp_path / "gang" / "files")
        assert Manifest.verified(fetched).nbytes == 1
    mine = checkpoint(gang.shelf(CheckpointShelf(run / "checkpoints")), 3)
    async with gang.checkpoint(request) as folder:
        assert folder == mine
    (mine / "manifest.json").write_text("damaged")
    async with gang.checkpoint(request) as folder:
        assert folder == fetched


async def test_functions_and_weights_are_named_where_they_are_on_this_host(
    gang: SessionFiles, coordinator: Files, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.py").write_text("def ranked(outcomes): ...\n")
    (there / "config.json").write_text("{}")
    request = request_of(tmp_path / "run", elsewhere=True)
    section: dict[str, Any] = {"advantage": {"type": "/gone/mine.py:ranked"}, "loss": {"type": "ppo"}}
    request.spec.objective.section.update(section)
    code, weights = coordinator.offer(there / "mine.py"), coordinator.offer(there)
    code.path, weights.path = "/gone/mine.py", "/gone"
    request.spec.code.append(code)
    request.spec.initial_folder.CopyFrom(weights)
    spec = (await gang.open(request)).spec
    assert (Path(spec.initial_weights) / "config.json").read_text() == "{}"
    name = spec.objective.section.fields["advantage"].struct_value.fields["type"].string_value
    file, _, function = name.rpartition(":")
    assert function == "ranked" and Path(file).read_text().startswith("def ranked")
    assert spec.objective.section.fields["loss"].struct_value.fields["type"].string_value == "ppo"
    assert request.spec.initial_weights == "", "the caller's request stays as it was"
