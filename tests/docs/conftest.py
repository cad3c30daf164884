"""The chat model of the pages, and the folder of somebody who has the examples and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.doc_pages import ROOT, Reader


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with any chat model (FLOTILLA_TEST_MODEL), or a small one that has learned nothing."""
    given = os.environ.get("FLOTILLA_TEST_MODEL")
    return Path(given).resolve() if given else make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader in a folder with the examples; every fleet that it starts is down at the end."""
    folder = tmp_path_factory.mktemp("reader")
    made = shutil.ignore_patterns("model", "data", "__pycache__")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=made)
    reader = Reader(folder)
    yield reader
    for state in sorted(folder.glob(".flotilla/*/stack.yaml")):
        reader.shell(f"flotilla down --stack {state.parent.name}")
