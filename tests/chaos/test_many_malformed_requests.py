"""Malformed requests to every service, drawn from the contract: twenty thousand each; `tests/integration` sends two."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed_requests import assert_change_nothing

from flotilla_testing.stack import sim_stack

pytestmark = pytest.mark.timeout(1800)

REQUESTS = 20_000


def test_twenty_thousand_malformed_requests_to_each_service_change_nothing(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sim_stack(arithmetic / "model", tmp_path) as stack:
        assert_change_nothing(stack, REQUESTS, arithmetic, tmp_path, capsys)
