"""Reading of responses and rows, shared by the verifiers.

Invariants: all of it takes time linear in the text, whatever the text, and memory too. Text is folded character by
character, because the normalisation of whole texts is quadratic where many combining marks follow each other.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from flotilla_reward.builtin import Unreadable

INVISIBLE = frozenset({"Cf", "Cc"})
"""Categories of Unicode without a picture: joiners, marks of direction, controls."""
SELECTORS = frozenset({0x34F, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)})
"""Characters that choose a picture of the one before."""
UNUSUAL = re.compile(r"[^\n\t -~]")
SPACES = re.compile(r"[^\S\n]+")
# Han, kana, Thai, Lao, Burmese and Khmer: languages that set no spaces between words.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# Accents and vowel signs, which are part of a word.
MARKS = "\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0981-\u0dff"
LETTER = rf"(?:[^\W_{UNSPACED}]|[{MARKS}])"
WORD = re.compile(rf"[{UNSPACED}]|{LETTER}+(?:[.,'’\-]{LETTER}+)*")
# A letter with few accents: what composes in writing, and never a long run.
COMPOSABLE = re.compile(r"[^\W\d_][\u0300-\u036f]{1,3}")
# Nothing is given back, because a shorter fence before a mark of it is none.
FENCE = re.compile(r"^ {0,3}+(`{3,}+|~{3,}+)([^`\n]*+)$", re.MULTILINE)


class _Folding(dict[int, str]):
    """A table of what characters stand for; each is worked out when it is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        normal = unicodedata.normalize("NFKC", character)
        if character in "\u2028\u2029":
            folded = "\n"
        elif character.isspace():
            folded = character if character in "\n\t\r" else " "
        elif code in SELECTORS or unicodedata.category(character) in INVISIBLE:
            folded = ""
        else:
            folded = normal if len(normal) == 1 else character
        self[code] = folded
        return folded


_FOLDING = _Folding()


def _composed(found: re.Match[str]) -> str:
    return unicodedata.normalize("NFC", found[0])


def visible(text: str) -> str:
    """Return what a reader sees: full-width and styled letters become plain ones, invisible characters go."""
    if UNUSUAL.search(text):
        text = COMPOSABLE.sub(_composed, text.translate(_FOLDING)).replace("\r\n", "\n").replace("\r", "\n")
    return text.strip()


def one_spaced(text: str) -> str:
    """Return visible text with one space where there were several within a line."""
    return SPACES.sub(" ", visible(text))


def words_of(text: str) -> list[str]:
    """Return the words; a character is one where its script sets no spaces."""
    return WORD.findall(text)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and content of each closed fenced block; a shorter fence inside a longer one is content."""
    blocks: list[tuple[str, str]] = []
    fence, language, start = "", "", 0
    for found in FENCE.finditer(text):
        mark, label = found[1], found[2].strip()
        if not fence:
            fence, language, start = mark, label, found.end() + 1
        elif not label and mark.startswith(fence):
            blocks.append((language, text[start : found.start()]))
            fence = ""
    return blocks


class NoJson(Exception):
    """The text is not JSON as RFC 8259 has it, or names a key twice."""


def read_json(text: str) -> Any:
    """Return the value; nesting that Python cannot follow is the response's fault."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error
    # Also of integers with too many digits.
    except ValueError as error:
        raise NoJson(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NoJson("a key is there twice")
    return found


def _constant(name: str) -> Any:
    raise NoJson(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise NoJson(f"{text:.20} is too large")
    return number


def json_list(text: str) -> list[Any] | None:
    """Return the list that a text is in JSON; None for any other text."""
    if not text.startswith("["):
        return None
    try:
        found = read_json(text)
    except (NoJson, Unreadable):
        return None
    return found if isinstance(found, list) else None
