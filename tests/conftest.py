"""The example's model and data, made afresh once a session: small, real, and in no need of a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ARITHMETIC = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/` of the arithmetic example."""
    folder = tmp_path_factory.mktemp("arithmetic")
    for script, out in (("make_model.py", "model"), ("make_data.py", "data")):
        subprocess.run([sys.executable, ARITHMETIC / script, "--out", folder / out], check=True, timeout=120)
    return folder
