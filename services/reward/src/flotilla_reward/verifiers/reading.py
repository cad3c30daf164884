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

INVISIBLE = frozenset({"Cf", "Cc", "Mn"})
"""Categories of Unicode that stand for no letter: joiners, marks of direction, controls, variation selectors."""
SPACES = re.compile(r"[^\S\n]+")
# Han, kana, Thai, Lao, Burmese and Khmer: languages that set no spaces between words.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+(?:[.,'’\-][^\W_{UNSPACED}]+)*")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)


class _Folding(dict[int, str]):
    """What each character stands for, worked out when it is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character in "\n\t\r":
            folded = character
        elif unicodedata.category(character) in INVISIBLE and not unicodedata.combining(character):
            folded = ""
        else:
            folded = unicodedata.normalize("NFKC", character)
        self[code] = folded
        return folded


_FOLDING = _Folding()


def visible(text: str) -> str:
    """Return what a reader sees: full-width and styled letters become plain ones, invisible characters go."""
    return text.translate(_FOLDING).replace("\r\n", "\n").replace("\r", "\n").strip()


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
