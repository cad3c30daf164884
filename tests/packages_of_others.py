"""The environments in which packages of others are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python_of(name: str) -> Path:
    """Return the interpreter that has the packages of others; skip where they are not installed."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python.parent.parent.name}: make test-environments")
    return python
