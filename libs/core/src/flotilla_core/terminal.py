"""Makes text of others safe for a terminal.

A sample, a row, an error or a line of a log may hold escape sequences, which a terminal obeys: they move the cursor,
hide or forge lines, and write to the clipboard. Invariant: what `visible` and `visible_json` return holds none, and
shows what was there.
"""

from __future__ import annotations

import json
import re
from typing import Any

_OBEYED = re.compile(
    # C0 but tab and newline, DEL and C1; halves of surrogate pairs, which no terminal can be sent; marks and overrides
    # that change the direction of text; separators that end a line.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


_NOT_OF_ONE_LINE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


def is_one_line(text: str) -> bool:
    """Return whether a text is of one line, without control characters, so that it may be a name.

    Scripts and signs need marks that nobody sees, such as joiners. They are no reason to refuse a name: those that a
    terminal obeys are made visible where it is shown.
    """
    return _NOT_OF_ONE_LINE.search(text) is None


def visible(text: str) -> str:
    r"""Return the text with each character that a terminal obeys as its escape, such as `\x1b`."""
    return _OBEYED.sub(lambda found: _escape(ord(found[0])), text)


def visible_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON in which each such character is an escape of JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # Within JSON those characters are in strings alone.
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
