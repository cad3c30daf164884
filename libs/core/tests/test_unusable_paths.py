"""A path that no file system has is refused like a missing one, with the reason and without a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flotilla_core.checkpoint import CheckpointShelf, Manifest, on_disk
from flotilla_core.disk import check_state_directory, nearest
from flotilla_core.errors import FlotillaError, InvalidConfig, InvalidRequest, NotFound
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import model_folder, stored_shapes, tokenizer_digest

LONG_NAME = "x" * 300
NOBODY = 65534
LONG_PATHS = {"name": f"/{LONG_NAME}", "whole": "/x" * 2500, "relative name": LONG_NAME}


@pytest.fixture(params=[*LONG_PATHS, "closed"])
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a path that is too long, or one below a folder that this user may not enter."""
    if request.param in LONG_PATHS:
        yield Path(LONG_PATHS[request.param])
        return
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    user = os.geteuid()
    # Root enters every folder.
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield closed / "model"
    finally:
        os.seteuid(user)


READERS: dict[str, Callable[[Path], object]] = {
    "model_folder": model_folder,
    "tokenizer_digest": tokenizer_digest,
    "stored_shapes": stored_shapes,
    "read_json_object": read_json_object,
    "Manifest.read": Manifest.read,
    "Manifest.verified": Manifest.verified,
    "CheckpointShelf.folder": lambda path: CheckpointShelf(path).folder("step-000001"),
    "CheckpointShelf.begin": lambda path: on_disk(path, CheckpointShelf(path).begin, "step-000001"),
    "check_state_directory": check_state_directory,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_unusable_path_gives_a_typed_error(read: Callable[[Path], object], unusable: Path) -> None:
    with pytest.raises(FlotillaError):
        read(unusable)


@pytest.mark.parametrize("find", [model_folder, tokenizer_digest])
def test_unusable_model_folder_does_not_exist(find: Callable[[Path], object], unusable: Path) -> None:
    with pytest.raises(NotFound, match="the model folder does not exist"):
        find(unusable)


def test_unusable_path_has_a_nearest_folder(unusable: Path) -> None:
    assert nearest(unusable).is_dir()


@pytest.mark.parametrize("name", [f"organisation/{LONG_NAME}", "organisation/a b", "organisation/-a"])
def test_what_cannot_be_a_hub_name_names_no_model(name: str) -> None:
    with pytest.raises(NotFound, match="the hub did not give the model"):
        model_folder(name)


def test_number_that_no_run_reaches_names_no_checkpoint() -> None:
    with pytest.raises(InvalidRequest, match="is not the name of a checkpoint"):
        CheckpointShelf.step_of(f"step-{'1' * 5000}")


def test_folder_in_the_place_of_a_file_of_the_model_gives_a_typed_error(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        tokenizer_digest(tmp_path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        stored_shapes(tmp_path / "model.safetensors")
