"""Exports go through a process of their own, which costs the coordinator nothing and shares nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.parquet import export_parquet
from flotilla_coordinator.records.report import Exporter
from flotilla_core.errors import DiskFull, Internal
from flotilla_testing.children import children_that_run
from flotilla_testing.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.timeout(60)

EXPORT = "-m flotilla_coordinator.records.report"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = RunDirectory.create(tmp_path / "run")
    for step in range(3):
        directory.write_metrics(step, {"reward/mean": step / 2})
    return directory.path


async def test_exports_of_one_run_at_once_all_end_with_whole_files(run_dir: Path) -> None:
    exporter = Exporter()
    answers = await asyncio.gather(*(exporter.export(run_dir) for _ in range(3)))
    assert answers == [[run_dir / "parquet" / "metrics.parquet"]] * 3
    assert len(pq.read_table(answers[0][0])) == 3
    assert [file.name for file in (run_dir / "parquet").iterdir()] == ["metrics.parquet"]


async def test_two_coordinators_that_export_one_run_do_not_take_each_others_files(run_dir: Path) -> None:
    for _ in range(10):
        first, second = await asyncio.gather(
            *(asyncio.to_thread(export_parquet, run_dir) for _ in range(2)), return_exceptions=True
        )
        assert first == second == [run_dir / "parquet" / "metrics.parquet"]


async def test_a_caller_that_gives_up_takes_the_process_with_it(run_dir: Path) -> None:
    exporter = Exporter()
    call = asyncio.create_task(exporter.export(run_dir))
    async with asyncio.timeout(20):
        while not children_that_run(EXPORT):
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not children_that_run(EXPORT)
    assert await exporter.export(run_dir)


async def test_a_process_that_fails_is_an_error_that_names_the_run(tmp_path: Path) -> None:
    with pytest.raises(Internal, match=r"the export failed .*nowhere"):
        await Exporter().export(tmp_path / "nowhere")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        with small_disk(tmp_path / "disk", mib=1) as mounted:
            yield mounted
    except PermissionError as error:
        pytest.skip(str(error))


async def test_an_export_that_finds_no_room_tells_its_caller_which_disk_is_full(
    run_dir: Path, disk: SmallDisk
) -> None:
    run_dir = Path(shutil.copytree(run_dir, disk.path / "run"))
    disk.fill()
    with pytest.raises(DiskFull, match="the Parquet files cannot be written") as refused:
        await Exporter().export(run_dir)
    assert str(disk.path) in refused.value.why and refused.value.next_step == "free space there"
    disk.free()
    assert await Exporter().export(run_dir)
