"""Texts that a terminal would obey: what samples, rows, errors and logs may hold."""

from __future__ import annotations

import re

SEQUENCES = (
    "\x1b]52;c;aG9zdGlsZQ==\x07",  # the clipboard
    "\x1b]52;p;aG9zdGlsZQ==\x1b\\",
    "\x9d52;c;aG9zdGlsZQ==\x9c",
    "\x1b]0;a title\x07",
    "\x1b]2;a title\x1b\\",
    "\x1b]8;;https://example.org\x1b\\a link\x1b]8;;\x1b\\",
    "\x1b]4;1;rgb:00/00/00\x07",
    "\x1b]9;a notification\x07",
    "\x1b]777;notify;a;b\x07",
    "\x1b]1337;SetMark\x07",
    "\x1b[35;45;8mhidden",
    "\x9b35;45;8mhidden",
    "\x1b[2J",
    "\x1b[3J",
    "\x1b[1;1H",
    "\x1b[9A",
    "\x1b[1K",
    "\x1b[?1049h",
    "\x1b[?2004h",
    "\x1b[?1000h",
    "\x1b[6n",
    "\x1b[c",
    "\x1b[21t",
    "\x1b[4i",
    "\x1bc",
    "\x1b#8",
    "\x1b(0",
    '\x1bP$q"p\x1b\\',
    "\x1b_a command\x1b\\",
    "\x1b^private\x1b\\",
    "\x90$q\x9c",
    "over\rwritten",
    "erased\x08\x08\x08\x08\x08\x08",
    "a bell\x07",
    "\x0e shifted \x0f",
    "\x00\x01\x7f",
    "\x0b\x0c",
    "\x84\x85\x8d",
    "\u202eabc\u202c",
    "\u2066\u2067\u2069",
    "\u200f\u061c",
    "\u2028\u2029",
)
HALF = "\ud800 \udc1b"
"""Halves of surrogate pairs, which JSON can spell and no terminal can be sent."""
MARKUP = "[red]x[/red] [link=https://example.org]y[/link] [/] :smile:"
"""Commands of a library that draws tables; they are shown as they are."""
HOSTILE = " ".join(SEQUENCES)

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def obeyed(text: str) -> list[str]:
    """Return the characters of a text that a terminal obeys."""
    return _OBEYED.findall(text)
