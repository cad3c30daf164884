"""The reward of this example: 1 where a response does what its prompt asks, else 0.

The column `checks` of a row says what is asked: each key names a function below, and its value is what the function
compares with. A response counts only where all checks hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def words(text: str) -> list[str]:
    """The words of a text, without the marks around them."""
    return [word for word in (part.strip(".,;:!?\"'()*-") for part in text.split()) if word]


def has(text: str, word: str) -> bool:
    """Whether a text holds a word, in any casing, alone or in the plural."""
    return re.search(rf"\b{re.escape(word)}(s|es)?\b", text, re.IGNORECASE) is not None


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "mentions": has,
    "also_mentions": has,
    "avoids": lambda text, word: not has(text, word),
    "least_words": lambda text, count: len(words(text)) >= count,
    "most_words": lambda text, count: len(words(text)) <= count,
    "first_word": lambda text, word: words(text)[0].lower() == word.lower(),
    "items": lambda text, count: _items(text) == count,
    "last_number": lambda text, number: re.findall(r"\d+", text)[-1:] == [str(number)],
    "whole": lambda text, _: text[-1] in ".!?\"'",
    "ends_with": lambda text, mark: text.endswith(mark),
    "lines": lambda text, count: len(text.splitlines()) == count,
}


def _items(text: str) -> int:
    """How many different items a list has, on lines of their own, with commas or with "and" between them."""
    parts = [part.strip(" .*-0123456789") for part in re.split(r",|\n|\band\b", text.lower())]
    items = [part for part in parts if part]
    short = all(len(item.split()) <= 4 for item in items)
    return len(items) if short and len(set(items)) == len(items) else 0


def follows(prompt: str, response: str, answer: str, info: dict[str, Any]) -> float:
    """1.0 if the response passes each check of its row."""
    text = response.strip()
    if not words(text):
        return 0.0
    return float(all(CHECKS[name](text, wanted) for name, wanted in info["checks"].items()))
