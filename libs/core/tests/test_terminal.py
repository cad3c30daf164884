"""Text of others is shown on a terminal and never obeyed by it."""

from __future__ import annotations

import json

import pytest

from flotilla_core.errors import NotFound
from flotilla_core.terminal import visible, visible_json
from flotilla_testing.hostile_text import SEQUENCES, obeyed


@pytest.mark.parametrize("text", SEQUENCES, ids=ascii)
def test_what_a_terminal_obeys_is_shown_as_its_escape(text: str) -> None:
    assert obeyed(text)
    assert not obeyed(visible(text)) and not obeyed(str(NotFound(text, where=text, why=text, next_step=text)))
    assert not obeyed(visible_json({text: [text]}))
    assert json.loads(visible_json({text: [text]})) == {text: [text]}
    visible(text).encode()


def test_text_that_is_only_read_stays_as_it_is() -> None:
    text = "a line\n\tof 数学 ½ é 👩‍🚀 \\x1b [red]"
    assert visible(text) == text and json.loads(visible_json(text)) == text
    assert visible("\x1b]52;c;QQ==\x07") == r"\x1b]52;c;QQ==\x07" and visible("\u202e") == r"\u202e"
