from __future__ import annotations

import time

import pytest

from flotilla_reward.verifiers.reading import code_blocks


@pytest.mark.parametrize("text", ["~" * 50_000 + "`", "`" * 50_000 + " `", "   " + "~" * 50_000 + "\n"])
def test_fences_take_linear_time_whatever_their_length(text: str) -> None:
    started = time.monotonic()
    assert code_blocks(text) == []
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```py\n1\n```", [("py", "1\n")]),
        ("~~~ py\n1\n~~~~", [("py", "1\n")]),
        ("~~~~\n~~~\n~~~~", [("", "~~~\n")]),
        ("```a`b\n1\n```", []),
    ],
)
def test_a_block_ends_with_a_fence_that_is_as_long_as_its_first(
    text: str, blocks: list[tuple[str, str]]
) -> None:
    assert code_blocks(text) == blocks
