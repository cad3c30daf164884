"""Malformed requests to every service, drawn from the contract: two thousand each; `tests/chaos` sends twenty."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed_requests import assert_change_nothing

from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(600)

REQUESTS = 2_000


def test_two_thousand_malformed_requests_to_each_service_change_nothing(
    gangs: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_change_nothing(gangs, REQUESTS, arithmetic, tmp_path, capsys)
