"""The example's model and data, made afresh once a session: small, real, and in no need of a network."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ARITHMETIC = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/` of the arithmetic example."""
    folder = tmp_path_factory.mktemp("arithmetic")
    for name in ("model", "data"):
        runpy.run_path(str(ARITHMETIC / f"make_{name}.py"))[f"make_{name}"](folder / name)
    return folder
