"""The files of a data set are those of one split, in a folder or in the local cache of the hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from flotilla_core.config import RunConfig
from flotilla_core.errors import InvalidConfig, Unavailable
from flotilla_data.files import data_files


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"no split 'test'.*it has train, validation"),
        ("train", "several configurations.*main, socratic"),
    ],
)
def test_a_folder_without_one_answer_is_refused(tmp_path: Path, split: str, message: str) -> None:
    for name in ("main/train-0.parquet", "socratic/train-0.parquet", "main/validation-0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InvalidConfig, match=message):
        data_files(tmp_path, split)
    assert data_files(tmp_path / "main", "train") == [tmp_path / "main" / "train-0.parquet"]


def test_a_hub_name_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "datasets--openai--gsm8k"
    snapshot = folder / "snapshots" / ("a" * 40)
    for name in ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    config = RunConfig.model_validate(
        {"name": "r", "steps": 1, "algorithm": {"type": "sft"}, "data": {"train": "hub:openai/gsm8k"}}
    )
    source = config.with_paths_from(Path("/elsewhere")).data.train
    assert isinstance(source, Path)
    assert data_files(source, "test") == [snapshot / "main/test-00000-of-00001.parquet"]
    assert data_files(Path("hub:openai/gsm8k/main"), "train") == [
        snapshot / "main/train-00000-of-00001.parquet"
    ]
    with pytest.raises(Unavailable, match=r"not in the local cache \(hub:openai/other\)"):
        data_files(Path("hub:openai/other"), "train")
