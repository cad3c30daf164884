"""A light fleet for the tests of this folder: it boots in seconds and trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_testing.stack import Stack, light_stack


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Simulated engine, accepting trainer, real coordinator, rewards, NATS and launcher."""
    with light_stack(arithmetic / "model", tmp_path_factory.mktemp("light")) as running:
        yield running
