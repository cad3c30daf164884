"""What the views of metrics know of each one."""

from __future__ import annotations

import pytest

from flotilla_core.telemetry.metrics import higher_is_better


@pytest.mark.parametrize("of", ["", "hard/"])
@pytest.mark.parametrize(
    ("figure", "higher"),
    [
        ("accuracy", True),
        ("pass@4", True),
        ("accuracy_stderr", None),
        ("step", None),
        ("part:code[total]", None),
        ("unscored_rate", False),
        ("unverifiable_rate", None),
    ],
)
def test_a_figure_of_a_held_out_set_is_better_in_the_direction_of_the_plain_one(
    of: str, figure: str, higher: bool | None
) -> None:
    assert higher_is_better(f"eval/{of}{figure}") is higher
