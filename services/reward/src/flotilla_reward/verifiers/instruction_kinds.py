"""The kinds of instructions, each a function from a text to whether the text follows it.

Invariants: the name of a function is the kind that a row names, and its keywords with their types are the parameters.
Each takes time linear in the text. Texts come as a reader sees them, but for the kinds in `RAW`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from pydantic import Field

from flotilla_reward.verifiers import reading
from flotilla_reward.verifiers.reading import UNSPACED, visible, words_of

Count = Annotated[int, Field(ge=0)]
Most = Annotated[int | None, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Phrase = Annotated[str, Field(min_length=1)]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
Script = Literal[
    "arabic",
    "bengali",
    "cyrillic",
    "devanagari",
    "greek",
    "han",
    "hangul",
    "hebrew",
    "japanese",
    "latin",
    "tamil",
    "thai",
]

# A dot behind these, or behind a single letter, ends no sentence.
ABBREVIATION = re.compile(
    r"(?:\b(?:dr|mr|mrs|ms|prof|st|vs|fig|approx|e\.g|i\.e|cf|inc|jr|sr)|\b[A-Z])\.$", re.IGNORECASE
)
SENTENCE_END = re.compile(
    rf"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|$|[{UNSPACED}])|[。｡]+[」』”]*|\n[^\S\n]*\n"
)
BULLET = re.compile(r"\s*(?:[*\-+–] +|[•‣] *)\S")
NUMBERED = re.compile(r"\s*\d{1,3}[.)] +\S")
PLACEHOLDER = re.compile(r"(?!(?<=[-*+] )\[[xX]\])\[(?=[^\]\n]*?[^\s\]])[^\[\]\n]{1,200}\](?!\()")
TITLE = re.compile(r"^[\s#*_]{0,6}(?:\w{1,20}: ?\*{0,2})?<<(?=\S)[^<>\n]{1,200}>>", re.MULTILINE)
HIGHLIGHT = re.compile(r"(?<![*\w])(\*{1,3})(?=[^\s*])[^*\n]{1,500}(?<=[^\s*])\1(?![*\w])")
PICTURE = "[\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55\u231a\u231b]"
EMOJI = re.compile(
    rf"[\U0001f1e6-\U0001f1ff]{{2}}|{PICTURE}(?:[\ufe0f\U0001f3fb-\U0001f3ff]|\u200d{PICTURE})*"
)
COMMAS = frozenset(",،、⸲⹁")
QUESTION_MARKS = ("?", "؟", ";")
SCRIPTS = {"han": {"CJK"}, "japanese": {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}}


def _within(count: float, at_least: float, at_most: float | None) -> bool:
    return at_least <= count and (at_most is None or count <= at_most)


def _squeezed(text: str) -> str:
    return " ".join(text.casefold().split())


def _asked(phrase: str) -> str:
    """Return a phrase of the instruction in the form of squeezed texts."""
    return _squeezed(visible(phrase))


@lru_cache(maxsize=1024)
def _pattern(keyword: str) -> re.Pattern[str]:
    """Return the pattern of a keyword as a whole word; scripts without spaces have no ends of words."""
    word = _asked(keyword)
    before = r"(?<!\w)" if re.match(rf"[^\W{UNSPACED}]", word) else ""
    after = r"(?!\w)" if re.search(rf"[^\W{UNSPACED}]$", word) else ""
    return re.compile(before + re.escape(word) + after)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _paragraphs(text: str, divider: str | None = None) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == (divider or ""):
            parts.append([])
        else:
            parts[-1].append(line)
    return [joined for part in parts if (joined := "\n".join(part).strip())]


def _sentences(text: str) -> list[str]:
    found, start = [], 0
    for end in SENTENCE_END.finditer(text):
        goes_on = end[0] in ("...", "…") and text[end.end() : end.end() + 2].strip()[:1].islower()
        if goes_on or ABBREVIATION.search(text[max(start, end.end() - 12) : end.end()]):
            continue
        found.append(text[start : end.end()])
        start = end.end()
    return [sentence for sentence in [*found, text[start:]] if any(map(str.isalpha, sentence))]


def keywords_present(text: str, *, keywords: Phrases) -> bool:
    squeezed = _squeezed(text)
    return all(_pattern(keyword).search(squeezed) for keyword in keywords)


def keywords_absent(text: str, *, keywords: Phrases) -> bool:
    squeezed = _squeezed(text)
    return not any(_pattern(keyword).search(squeezed) for keyword in keywords)


def keyword_count(text: str, *, keyword: Phrase, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(_pattern(keyword).findall(_squeezed(text))), at_least, at_most)


def keywords_in_order(text: str, *, keywords: Phrases) -> bool:
    squeezed, place = _squeezed(text), 0
    for keyword in keywords:
        found = _pattern(keyword).search(squeezed, place)
        if found is None:
            return False
        place = found.end()
    return True


def letter_count(
    text: str,
    *,
    letter: Annotated[str, Field(min_length=1, max_length=1)],
    at_least: Count = 0,
    at_most: Most = None,
) -> bool:
    return _within(text.casefold().count(letter.casefold()), at_least, at_most)


def words(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(words_of(text)), at_least, at_most)


def characters(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(text), at_least, at_most)


def sentences(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(_sentences(text)), at_least, at_most)


def paragraphs(
    text: str, *, at_least: Count = 0, at_most: Most = None, divider: Phrase | None = None
) -> bool:
    return _within(len(_paragraphs(text, divider)), at_least, at_most)


def lines(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(_lines(text)), at_least, at_most)


def digits(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(sum(map(str.isdecimal, text)), at_least, at_most)


def emoji(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(EMOJI.findall(text)), at_least, at_most)


def word_length(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    found = words_of(text)
    return bool(found) and all(_within(len(word), at_least, at_most) for word in found)


def sentence_words(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return all(_within(len(words_of(sentence)), at_least, at_most) for sentence in _sentences(text))


def distinct_words(text: str, *, at_least: Share) -> bool:
    found = words_of(text.casefold())
    return bool(found) and len(set(found)) >= at_least * len(found)


def capital_words(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(sum(map(str.isupper, words_of(text))), at_least, at_most)


def capital_share(text: str, *, at_least: Share = 0.0, at_most: Share = 1.0) -> bool:
    lettered = [word for word in words_of(text) if any(map(str.isalpha, word))]
    return bool(lettered) and _within(sum(map(str.isupper, lettered)) / len(lettered), at_least, at_most)


def upper_case(text: str) -> bool:
    return text.isupper()


def lower_case(text: str) -> bool:
    return text.islower()


def no_commas(text: str) -> bool:
    return COMMAS.isdisjoint(text)


def characters_absent(text: str, *, characters: Phrase) -> bool:
    return set(visible(characters)).isdisjoint(text)


def bullets(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    marked = [line for line in _lines(text) if BULLET.match(line) and any(map(str.isalnum, line))]
    return _within(len(marked), at_least, at_most)


def numbered_items(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(sum(bool(NUMBERED.match(line)) for line in _lines(text)), at_least, at_most)


def sections(text: str, *, marker: Phrase, at_least: Count = 0, at_most: Most = None) -> bool:
    heading = re.compile(
        rf"[\s#*_]{{0,8}}(?i:{re.escape(marker)})[\s.:]{{0,3}}(?:\d{{1,4}}|[IVX]{{1,6}}|[A-Z])\b"
    )
    return _within(sum(bool(heading.match(line)) for line in _lines(text)), at_least, at_most)


def placeholders(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(PLACEHOLDER.findall(text)), at_least, at_most)


def highlights(text: str, *, at_least: Count = 0, at_most: Most = None) -> bool:
    return _within(len(HIGHLIGHT.findall(text)), at_least, at_most)


def code_blocks(
    text: str, *, at_least: Count = 0, at_most: Most = None, language: Phrase | None = None
) -> bool:
    found = [label.casefold() for label, _ in reading.code_blocks(text)]
    return _within(len(found) if language is None else found.count(language.casefold()), at_least, at_most)


def table(text: str) -> bool:
    rows = _lines(text)
    return any(
        "|" in head and "|" in rule and "-" in rule and set(rule) <= set("|-: ")
        for head, rule in pairwise(rows)
    )


def title(text: str) -> bool:
    return TITLE.search(text) is not None


def postscript(text: str, *, marker: Annotated[str, Field(pattern=r"\w")] = "P.S.") -> bool:
    letters = r"\.? ?".join(re.escape(letter) for letter in marker if letter.isalnum())
    return (
        re.search(rf"^[*_ ]{{0,4}}{letters}\b[.:,*_\s-]*+\w", text, re.MULTILINE | re.IGNORECASE) is not None
    )


def quoted(text: str) -> bool:
    inside = text[1:-1]
    depths = accumulate((mark == "“") - (mark == "”") for mark in inside)
    closed = '"' in inside or any(depth < 0 for depth in depths)
    return text[:1] in ('"', "“") and text[-1:] in ('"', "”") and not closed and bool(inside.strip())


def starts_with(text: str, *, phrase: Phrase) -> bool:
    return _squeezed(text).startswith(_asked(phrase))


def ends_with(text: str, *, phrase: Phrase) -> bool:
    return _squeezed(text).endswith(_asked(phrase))


def lines_start_with(text: str, *, phrase: Phrase) -> bool:
    return all(line.casefold().startswith(visible(phrase).casefold()) for line in _lines(text))


def paragraph_starts(
    text: str, *, paragraph: Annotated[int, Field(ge=1)], word: Phrase, divider: Phrase | None = None
) -> bool:
    found, expected = _paragraphs(text, divider), words_of(visible(word).casefold())
    return paragraph <= len(found) and words_of(found[paragraph - 1].casefold())[: len(expected)] == expected


def ends_with_question(text: str) -> bool:
    return text.rstrip("\"'”’)*_ ").endswith(QUESTION_MARKS)


def two_responses(text: str, *, separator: Phrase = "******") -> bool:
    parts = [part.strip() for part in text.split(separator)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeats(text: str, *, prompt: Phrase) -> bool:
    rest = _squeezed(text).removeprefix(_asked(prompt))
    return rest != _squeezed(text) and any(map(str.isalnum, rest))


def one_of(text: str, *, options: Phrases) -> bool:
    return _squeezed(text).rstrip(".") in {_asked(option).rstrip(".") for option in options}


def json_only(text: str) -> bool:
    text = text.strip()
    blocks = reading.code_blocks(text)
    if len(blocks) == 1 and text.startswith("```") and text.endswith("```"):
        text = blocks[0][1]
    try:
        return isinstance(reading.read_json(text), dict | list)
    except reading.NoJson:
        return False


def script(text: str, *, script: Script, at_least: Share = 0.9) -> bool:
    """Most letters are of a script; Japanese has kana among them."""
    names: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            names[unicodedata.name(character, "unnamed").split()[0]] += count
    if script == "japanese" and not names["HIRAGANA"] + names["KATAKANA"]:
        return False
    own = sum(names[name] for name in SCRIPTS.get(script, {script.upper()}))
    return own > 0 and own >= at_least * names.total()


KINDS: dict[str, Callable[..., bool]] = {
    kind.__name__: kind
    for kind in (
        *(
            keywords_present,
            keywords_absent,
            keyword_count,
            keywords_in_order,
            letter_count,
            characters_absent,
        ),
        *(
            words,
            characters,
            sentences,
            paragraphs,
            lines,
            digits,
            emoji,
            word_length,
            sentence_words,
            distinct_words,
        ),
        *(capital_words, capital_share, upper_case, lower_case, no_commas),
        *(
            bullets,
            numbered_items,
            sections,
            placeholders,
            highlights,
            code_blocks,
            table,
            title,
            postscript,
            quoted,
        ),
        *(starts_with, ends_with, lines_start_with, paragraph_starts, ends_with_question),
        *(two_responses, repeats, one_of, json_only, script),
    )
}
RAW = frozenset({"emoji", "json_only"})
"""Kinds that need the invisible characters too."""
