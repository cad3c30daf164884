"""The clients without asyncio are what their generator makes of `Client` and `Loop`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla_client import Client, Loop, SyncClient, SyncLoop

GENERATOR = Path(__file__).resolve().parents[3] / "scripts" / "generate_sync_client.py"


def public_methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_the_generated_clients_are_fresh() -> None:
    check = subprocess.run(
        [sys.executable, GENERATOR, "--check"], check=False, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


def test_every_call_has_a_twin_that_waits() -> None:
    assert public_methods(Client) - public_methods(SyncClient) == {"get_run_and_config"}
    assert public_methods(Loop) - public_methods(SyncLoop) == {"open"}


@pytest.mark.parametrize(("model", "twin"), [(Client, SyncClient), (Loop, SyncLoop)])
def test_a_twin_takes_the_same_arguments(model: type, twin: type) -> None:
    for name in public_methods(model) & public_methods(twin):
        taken = dict(inspect.signature(getattr(model, name)).parameters)
        # It would be called in the background thread.
        taken.pop("tell", None)
        assert dict(inspect.signature(getattr(twin, name)).parameters) == taken, name
