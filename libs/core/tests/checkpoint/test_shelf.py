"""A checkpoint is seen whole or not at all, and whatever happened to one of its bytes is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.errors import AlreadyExists, Damaged, InvalidRequest, Mismatch, NotFound


def made(shelf: CheckpointShelf, step: int) -> Path:
    name = CheckpointShelf.name_of(step)
    folder = shelf.begin(name)
    (folder / "shards").mkdir()
    (folder / "shards" / "rank-0").write_bytes(bytes(range(256)))
    (folder / "trainer.json").write_text("{}")
    Manifest.seal(folder)
    return shelf.publish(name)


@pytest.fixture
def shelf(tmp_path: Path) -> CheckpointShelf:
    return CheckpointShelf(tmp_path / "checkpoints")


def test_a_sealed_folder_passes(shelf: CheckpointShelf) -> None:
    manifest = Manifest.verified(made(shelf, 3))
    assert set(manifest.files) == {"shards/rank-0", "trainer.json"} and manifest.nbytes == 258


def flipped(folder: Path) -> None:
    content = bytearray((folder / "shards" / "rank-0").read_bytes())
    content[17] ^= 4
    (folder / "shards" / "rank-0").write_bytes(content)


def truncated(folder: Path) -> None:
    os.truncate(folder / "shards" / "rank-0", 255)


def missing(folder: Path) -> None:
    (folder / "shards" / "rank-0").unlink()


def unlisted_digest(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    del content["files"]["shards/rank-0"]["sha256"]
    (folder / "manifest.json").write_text(json.dumps(content))


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flipped, "shards/rank-0"),
        (truncated, "shards/rank-0"),
        (missing, "shards/rank-0"),
        (unlisted_digest, "manifest.json"),
        (no_manifest, "manifest.json"),
    ],
)
def test_damage_is_named_by_its_file(
    shelf: CheckpointShelf, damage: Callable[[Path], None], named: str
) -> None:
    folder = made(shelf, 3)
    damage(folder)
    with pytest.raises(Damaged, match=named):
        Manifest.verified(folder)


def test_a_part_put_inside_is_sealed_with_the_whole(shelf: CheckpointShelf) -> None:
    aside = shelf.begin("step-000003")
    whole, part = (made(CheckpointShelf(aside / role), 3) for role in ("policy", "critic"))
    part.rename(whole / "critic")
    Manifest.join(whole, ["critic"])
    folder = shelf.publish("step-000003", whole)
    shelf.discard("step-000003")
    assert shelf.names() == ["step-000003"] and folder == shelf.folder("step-000003")
    assert (shelf.path / "latest").read_text() == "step-000003\n"
    assert Manifest.verified(folder).nbytes > 2 * Manifest.verified(folder / "critic").nbytes
    flipped(folder / "critic")
    with pytest.raises(Damaged, match=r"critic/shards/rank-0"):
        Manifest.verified(folder)
    (folder / "critic").rename(shelf.path / "elsewhere")
    with pytest.raises(Damaged, match="the file is missing"):
        Manifest.verified(folder)


def test_another_format_is_refused_as_such(shelf: CheckpointShelf) -> None:
    folder = made(shelf, 3)
    (folder / "manifest.json").write_text('{"format": 99, "files": {}}')
    with pytest.raises(Mismatch, match="format 99"):
        Manifest.verified(folder)


def test_nothing_is_seen_before_it_is_published(shelf: CheckpointShelf) -> None:
    assert shelf.names() == []
    (shelf.begin("step-000001") / "trainer.json").write_text("{}")
    assert shelf.names() == []
    made(shelf, 2)
    assert shelf.names() == ["step-000002"]
    assert not shelf.aside("step-000001").exists()  # what an interrupted write left goes with the next
    assert (shelf.path / "latest").read_text() == "step-000002\n"


def test_a_name_is_used_once_and_means_a_step(shelf: CheckpointShelf) -> None:
    made(shelf, 2)
    with pytest.raises(AlreadyExists):
        shelf.begin("step-000002")
    with pytest.raises(InvalidRequest, match="looks like"):
        shelf.begin("../step-000003")
    with pytest.raises(NotFound, match="there are step-000002"):
        shelf.folder("step-000003")


def test_the_newest_stay(shelf: CheckpointShelf) -> None:
    for step in (2, 4, 1_000_000):
        made(shelf, step)
    assert shelf.prune(2, besides=[2, 7]) == []
    assert shelf.prune(2) == ["step-000002"]
    assert shelf.names() == ["step-000004", "step-1000000"]


def test_a_fall_back_puts_away_what_is_newer_and_pruning_removes_it(shelf: CheckpointShelf) -> None:
    for step in (2, 4, 6):
        made(shelf, step)
    assert shelf.fall_back("step-000004", lineage=1) == ["step-000006"]
    assert shelf.names() == ["step-000002", "step-000004"]
    assert (shelf.path / "latest").read_text() == "step-000004\n"
    made(shelf, 6)
    assert shelf.prune(2) == ["step-000002", "void-1-step-000006"]
    assert sorted(entry.name for entry in shelf.path.iterdir()) == ["latest", "step-000004", "step-000006"]
    assert shelf.fall_back("", lineage=2) == ["step-000004", "step-000006"]
    assert not (shelf.path / "latest").exists()


@pytest.mark.parametrize("goes_on_from", ["step-000002", ""])
def test_a_writer_that_wakes_up_after_a_fall_back_publishes_nothing(
    shelf: CheckpointShelf, goes_on_from: str
) -> None:
    made(shelf, 2)
    paused = CheckpointShelf(shelf.path)
    Manifest.seal(paused.begin("step-000004"))
    assert shelf.fall_back(goes_on_from, lineage=1) == ([] if goes_on_from else ["step-000002"])
    with pytest.raises(FileNotFoundError):
        paused.publish("step-000004")
    before = shelf.names()
    made(shelf, 4)  # by the gang that the run is on now
    paused.discard("step-000004")
    assert shelf.names() == [*before, "step-000004"] and not list(shelf.path.glob(".*"))


def test_a_folder_that_is_written_to_while_it_is_given_up_is_never_seen(
    shelf: CheckpointShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = CheckpointShelf(shelf.path)
    Manifest.seal(paused.begin("step-000004"))
    # As where new files come faster than they go.
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    shelf.fall_back("", lineage=1)
    with pytest.raises(FileNotFoundError):
        paused.publish("step-000004")
    assert shelf.names() == []


def test_a_save_never_shares_its_folder_with_one_that_was_given_up(shelf: CheckpointShelf) -> None:
    given_up = shelf.begin("step-000001")
    again = CheckpointShelf(shelf.path).begin("step-000001")
    assert again != given_up and again.is_dir() and not given_up.exists()
