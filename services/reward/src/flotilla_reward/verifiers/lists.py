"""Overlap with a reference, and lists of items.

Invariant: both take time linear in the response for each reference of the row.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from typing import Any, ClassVar

from pydantic import Field

from flotilla_reward.builtin import BuiltinReward, CannotScore, Sample, answer_of, text_after
from flotilla_reward.verifiers.reading import UNSPACED, json_list, visible

REFERENCES = ("answers", "references")
ARTICLES = frozenset({"a", "an", "the"})
PUNCTUATION = re.compile(rf"[{re.escape(string.punctuation)}‘’“”«»…–—。、「」]")
TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")

ITEM_MARK = re.compile(r"[ \t]*(?:[-*•–]|\d{1,6}[.)])[ \t]+")
ENDS = re.compile(r"[\n,;、]")
AND = re.compile(r"(?:and|&)\s+", re.IGNORECASE)
BRACKETS = {"[": "]", "(": ")", "{": "}"}
QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "‘": "’"}

AFTER = "Look only at what follows the last such marker; a response without it scores 0."


def tokens_of(text: str) -> list[str]:
    """Return the words without case, punctuation and articles, as SQuAD compares them.

    A character is a token where its script sets no spaces. A text of articles alone keeps them.
    """
    tokens = TOKEN.findall(PUNCTUATION.sub("", visible(text).casefold()))
    return [token for token in tokens if token not in ARTICLES] or tokens


class F1(BuiltinReward):
    """Overlap of words with a reference.

    The harmonic mean of precision and recall of the response's words, for the reference that fits best.
    """

    bounded: ClassVar[bool] = True
    rules: ClassVar[int] = 2

    after: str | None = Field(default=None, min_length=1, description=AFTER)

    def score(self, sample: Sample) -> float:
        answer = sample.answer.strip()
        told = [_of_squad(answer) or json_list(answer) or answer, *map(sample.info.get, REFERENCES)]
        counted = [Counter(tokens_of(text)) for one in told for text in _texts(one)]
        counted = [tokens for tokens in counted if tokens]
        if not counted:
            raise CannotScore(
                f"the row has no reference with words: neither as the answer nor in {', '.join(REFERENCES)}"
            )
        text = text_after(self.after, sample.response)
        tokens = Counter(tokens_of(text)) if text is not None else Counter()
        return max(_f1(tokens, reference) for reference in counted)


def _of_squad(answer: str) -> Any:
    """Return the answers of SQuAD that a text of JSON is; None for any other text."""
    found = json_list(f"[{answer}]") if answer.startswith("{") else None
    return found[0] if found and isinstance(found[0], dict) and "text" in found[0] else None


def _texts(reference: Any) -> list[str]:
    """Return the texts of a reference, of which there may be several, as SQuAD has them too; none of a null."""
    if isinstance(reference, dict) and "text" in reference:
        reference = reference["text"]
    if isinstance(reference, list):
        return [text for one in reference for text in _texts(one)]
    if reference is None:
        return []
    if not isinstance(reference, str | int | float):
        raise CannotScore(f"a reference is neither text nor number: {reference!r:.200}")
    return [str(reference)]


def _f1(tokens: Counter[str], reference: Counter[str]) -> float:
    same = (tokens & reference).total()
    return 2 * same / (tokens.total() + reference.total())


class ExactList(BuiltinReward):
    """Comparison of lists.

    1 when the items of the response are those of the answer, each as often; else 0. Both are JSON or text with
    separators.
    """

    bounded: ClassVar[bool] = True

    after: str | None = Field(default=None, min_length=1, description=AFTER)
    ordered: bool = Field(default=True, description="The order counts.")
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="What stands between items; by default a line's end, a comma or a semicolon.",
    )
    ignore_case: bool = Field(default=False, description="Upper and lower case are the same.")

    def score(self, sample: Sample) -> float:
        expected = self._items(answer_of(sample))
        if not expected:
            raise CannotScore(f"the answer {sample.answer!r:.200} has no items")
        text = text_after(self.after, sample.response)
        items = self._items(text) if text is not None else []
        if self.ordered:
            return float(items == expected)
        return float(Counter(items) == Counter(expected))

    def _items(self, text: str) -> list[str]:
        text = visible(text)
        listed = json_list(text)
        if listed is not None:
            items = [item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in listed]
        else:
            if text[:1] in BRACKETS and text.endswith(BRACKETS[text[0]]):
                text = text[1:-1]
            items = text.split(self.separator) if self.separator else ENDS.split(text)
            items = [_bare(item) for item in items]
            if len(items) > 1:
                items[-1] = AND.sub("", items[-1], count=1) if AND.match(items[-1]) else items[-1]
        items = [" ".join(item.split()) for item in items if item.strip()]
        return [item.casefold() for item in items] if self.ignore_case else items


def _bare(item: str) -> str:
    """Return an item without the mark of its line and its quotes."""
    mark = ITEM_MARK.match(item)
    item = item[mark.end() :].strip() if mark else item.strip()
    if len(item) > 1 and item[0] in QUOTES and item.endswith(QUOTES[item[0]]):
        return item[1:-1]
    return item
