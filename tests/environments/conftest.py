"""The environments of others, with their packages, and a stage whose jails show them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from packages_of_others import ROOT

from flotilla_core.config import EnvironmentServiceConfig
from flotilla_environment.stage import Stage
from flotilla_workers.jail.jail import find
from flotilla_workers.jail.level import Level


@pytest.fixture
def readable(tmp_path: Path) -> list[str]:
    """What the jails of these tests show beside the packages of the service."""
    return [
        *map(str, ROOT.glob(".venv-*")),
        os.path.realpath(sys.base_prefix),
        str(ROOT / "adapters"),
        str(tmp_path),
    ]


@pytest_asyncio.fixture
async def stage(readable: list[str]) -> AsyncIterator[Stage]:
    jail = replace(find(None, "environment"), readable=tuple(map(Path, readable)))
    if jail.level is not Level.NAMESPACES:
        pytest.skip("this host makes no namespaces")
    kept = Stage(EnvironmentServiceConfig(workers=1))
    kept.holders.jail = jail
    yield kept
    await kept.stop()
