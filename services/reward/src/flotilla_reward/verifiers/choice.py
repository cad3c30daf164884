"""Multiple choice: which option a response claims in the end.

Invariants: letters count where a response claims them, and not where it mentions them. The last claim decides, and one
that names two options names none. Every pattern has bounded repeats, so that the time is linear in the response.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from flotilla_reward.builtin import BuiltinReward, CannotScore, Judged, Sample, answer_of, text_after
from flotilla_reward.verifiers.reading import json_list, one_spaced

LETTERS = tuple("ABCDEFGHIJ")
COLUMNS = ("choices", "options")
MOST_OPTIONS = 100
MOST_CLAIMED = 12

NOT = r"(?:not\b|n['’]t\b|never\b|neither\b)"
NOUN = r"(?:answers?|choices?|solution|guess|(?:correct|right|best|final) (?:option|one|letter|statement)s?)"
# From the noun to its verb, within a sentence and without a negation.
BETWEEN = rf"(?:(?!{NOT})[^.\n:=]){{0,40}}?"
COPULA = r"(?:\b(?:is|are|was|be)\b(?!n['’]t)|:|=|->|→|(?<= )[-–—] )"
VERB = (
    r"(?<!not )(?<!n't )(?<!n’t )"
    r"\b(?:choos(?:e|ing)|chose|pick|select(?:ed)?|going with|go with|opt for|answer with)\b"
)
# "not B but" before the option that is meant.
INSTEAD = r"(?:not [^.\n]{1,40}? but )?"
DECORATION = (
    r"(?:[\s*_()\[{}\"'“‘`$<>:]|\\(?:boxed|text|textbf|textit|mathrm|mathbf)\{|"
    r"\b(?:the|either|both|option|choice|letter|answer|most|likely|probably|clearly|therefore|thus|indeed|simply|"
    r"definitely|actually|statement)\b){0,16}+"
)
CLAIM = (
    rf"(?:\b{NOUN}\b{BETWEEN}{COPULA}|{VERB}|<answer>|\\boxed\{{|答案\W{{0,3}}(?:是|为|為|:)|"
    r"(?:(?<=\s)|(?<![^\n]))(?:therefore|thus|hence|so|wait|actually|I (?:think|believe|say)|"
    r"it(?:['’]s| is| must be| has to be))\b,?"
    r"(?= [(*]{0,3}(?:option )?[(*]{0,3}\w{1,12}[)*]{0,3}(?:[.!\n]|$)))"
    rf"[*_\"']{{0,3}} ?{INSTEAD}{DECORATION}"
)
CLOSING = r"[\s*_)\]}\"'”’`$>,;/|&\\]{0,8}"
JOINED = rf"(?:{CLOSING}(?:\b(?:and|or|nor|plus)\b|[,/&|;]){CLOSING}){DECORATION}"
NO_WORD = r"(?![\w+#]|['’-]\w|[.,]\d)"
# After an article or a pronoun, only such words go on about a letter.
CONNECTIVE = r"(?! (?!(?:because|since|as|for|and|or|while|but)\b)[a-z])"
RIGHT = (
    r"\b(?:is|would be|must be|seems) (?:the |most likely |clearly |definitely ){0,2}"
    r"(?:correct|right|best|true)\b(?! only)"
)
GAP = re.compile(r"[\s\W_]*(?:(?:and|or|also|either|final|the|correct)[\s\W_]*)*", re.IGNORECASE)

BESIDE = re.compile(r"[ *_)\]}.:,\"'\\-]{1,6}")
QUESTION = re.compile(r"[^\w\n]{0,4}\?")
OPTION_WORD = re.compile(r"(?:option|choice|answer)\b", re.IGNORECASE)
# "and C is wrong" says something else.
CLAUSE = re.compile(
    r"[*_)\"']{0,4} (?:is|isn['’]t|was|would|can|cannot|can['’]t|has|does|doesn['’]t|looks|seems)\b"
)
DENIED = re.compile(rf"{NOT} (?:\w+ )?$", re.IGNORECASE)
# Case does not count for `re` where it does for casefold.
SAME_CASE = {0x130: "I", 0x131: "i", 0x17F: "s"}
AROUND = "*_()[]{}\"'`$.: ,!。"


class Claim(NamedTuple):
    """A place where a response names options as its answer."""

    start: int
    end: int
    labels: frozenset[str]


class Options:
    """The options of one question, with the patterns that find them."""

    def __init__(self, labels: tuple[str, ...], texts: tuple[str, ...]) -> None:
        self.by_name = {label.casefold(): label for label in labels}
        self.by_text = {
            _plain(text): label for text, label in zip(texts, labels, strict=False) if _plain(text)
        }
        # The longest first: one text may begin with another.
        names = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        written = [" ".join(one_spaced(text).translate(SAME_CASE).split()).rstrip(".") for text in texts]
        worded = "|".join(map(re.escape, sorted(filter(None, written), key=len, reverse=True))) or r"(?!)"
        texts_pattern = rf"(?<!\w)(?i:{worded})(?!\w)"
        single = rf"(?!(?-i:[AI]\b(?!{CONNECTIVE})|[ai]\b ?['’\w]))(?:{names})"
        self.name = re.compile(rf"{single}{NO_WORD}", re.IGNORECASE)
        self.text = re.compile(texts_pattern)
        self.lead = re.compile(CLAIM, re.IGNORECASE)
        self.joined = re.compile(JOINED, re.IGNORECASE)
        self.reverse = re.compile(
            rf"(?<![\w'’-])(?P<label>(?-i:{names}))\b[)*\"'”]{{0,3}} {RIGHT}", re.IGNORECASE
        )
        self.marked = re.compile(rf"\((?i:({names}))\)|\*\*\(?({names})[.):]?\)?\*\*")
        self.line = re.compile(
            rf"[\s*_(\[\"'`#>-]{{0,8}}(?:option |choice )?[(*]{{0,4}}(?P<label>{names})(?:[.):]|\*\*|$|[)\"'\]}}])",
            re.IGNORECASE,
        )

    def label(self, name: str) -> str | None:
        """Return the label of what an answer of the data names, by label or by text."""
        return self.by_name.get(name.casefold()) or self.by_text.get(_plain(name))


class Choice(BuiltinReward):
    r"""Multiple choice.

    1 when the option that the response claims in the end (`answer is (B)`, `\boxed{B}`, `**B**`, `Option B`, or the
    text of the option) is a right one; else 0, also where it claims two options.
    """

    bounded: ClassVar[bool] = True

    labels: tuple[str, ...] | None = Field(
        default=None,
        min_length=2,
        max_length=MOST_OPTIONS,
        description="Names of the options; by default letters, as many as the row has options, else A to J.",
    )
    after: str | None = Field(
        default=None,
        min_length=1,
        description="Look only at what follows the last such marker; a response without it scores 0.",
    )
    several: Literal["one", "all"] = Field(
        default="one",
        description="Where the answer names several options: `one` of them is enough, or `all` have to be claimed.",
    )

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels and (len({label.casefold() for label in labels}) != len(labels) or not all(labels)):
            raise ValueError("a label is empty or there twice")
        return labels

    def score(self, sample: Sample) -> float:
        options = self._options(sample.info)
        right = _right(answer_of(sample), options)
        text = text_after(self.after, sample.response)
        claimed = (
            claimed_options(one_spaced(text).translate(SAME_CASE), options)
            if text is not None
            else frozenset()
        )
        good = claimed == right if self.several == "all" else len(claimed) == 1 and claimed <= right
        return Judged(good, extracted=", ".join(sorted(claimed)) or None)

    def _options(self, info: dict[str, Any]) -> Options:
        labels, texts = _columns(next((info[name] for name in COLUMNS if info.get(name)), []))
        labels = (
            self.labels or labels or (tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")[: len(texts)] if texts else LETTERS)
        )
        if len(labels) < len(texts):
            raise CannotScore(f"the row has {len(texts)} options, and there are {len(labels)} labels")
        return _compiled(labels, texts)


@lru_cache(maxsize=256)
def _compiled(labels: tuple[str, ...], texts: tuple[str, ...]) -> Options:
    return Options(labels, texts)


def _columns(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return labels and texts of a list of texts, a table of both, or texts by their labels."""
    if (
        isinstance(value, dict)
        and isinstance(value.get("text"), list)
        and isinstance(value.get("label"), list)
    ):
        labels, texts = value["label"], value["text"]
    elif isinstance(value, dict):
        labels, texts = list(value), list(value.values())
    elif isinstance(value, list):
        labels, texts = [], value
    else:
        raise CannotScore("choices of the row are neither a list nor a table")
    if len(texts) > MOST_OPTIONS or (labels and len(labels) != len(texts)):
        raise CannotScore(f"the row has {len(texts)} options and {len(labels)} labels")
    return tuple(map(str, labels)), tuple(map(str, texts))


def _right(answer: str, options: Options) -> frozenset[str]:
    whole = options.label(answer)
    names = [answer] if whole else json_list(answer) or re.split(r"[,;]\s*|\s+(?:and|or)\s+", answer)
    found = [options.label(str(name).strip().strip("()")) for name in names if str(name).strip()]
    if not found or None in found:
        known = ", ".join(options.by_name.values())
        raise CannotScore(f"the answer {answer!r:.200} names none of the options {known:.200}")
    return frozenset(label for label in found if label)


def _plain(text: str) -> str:
    return " ".join(one_spaced(text).translate(SAME_CASE).casefold().split()).rstrip(".")


def claimed_options(text: str, options: Options) -> frozenset[str]:
    """Return the options that a response claims in the end; none or several where it claims no single one."""
    claims = sorted([*_led(text, options), *_confirmed(text, options)])
    if claims:
        last = claims.pop()
        labels, start = last.labels, last.start
        # "Answer: A, answer: B" is one claim of both.
        while claims and (
            claims[-1].end >= start or GAP.fullmatch(text[claims[-1].end : start][:200] or " ")
        ):
            labels, start = labels | claims[-1].labels, min(start, claims[-1].start)
            claims.pop()
        return labels
    lines = [line.strip() for line in text.split("\n") if line.strip(" `*")]
    if not lines:
        return frozenset()
    return _bare(lines, options) or _marked(text, options) or _worded(lines[-1], options)


def _led(text: str, options: Options) -> list[Claim]:
    """Return the claims that words lead to, such as `the answer is`."""
    claims = []
    for lead in options.lead.finditer(text):
        labels, end = _named_at(text, lead.end(), options)
        if labels and not QUESTION.match(text, end):
            claims.append(Claim(lead.start(), end, frozenset(labels)))
    return claims


def _named_at(text: str, place: int, options: Options) -> tuple[set[str], int]:
    """Return the options that are named one after the other from here, and where the last of them ends."""
    labels: set[str] = set()
    end = place
    for _ in range(MOST_CLAIMED):
        worded = options.text.match(text, place)
        named = options.name.match(text, place) if not worded else None
        found = worded or named
        if labels and found and CLAUSE.match(text, found.end()):
            break
        if worded:
            labels.add(options.by_text[_plain(worded[0])])
            end = worded.end()
        elif named:
            labels.add(options.by_name[named[0].casefold()])
            end = named.end()
            # A letter with the text of another option names both.
            beside = BESIDE.match(text, end)
            own = options.text.match(text, beside.end()) if beside else None
            if own and not CLAUSE.match(text, own.end()):
                labels.add(options.by_text[_plain(own[0])])
                end = own.end()
        else:
            break
        joined = options.joined.match(text, end)
        if joined is None:
            break
        place = joined.end()
    return labels, end


def _confirmed(text: str, options: Options) -> list[Claim]:
    """Return the claims that follow their letter, such as `B is correct`."""
    return [
        Claim(found.start(), found.end(), frozenset({options.by_name[found["label"].casefold()]}))
        for found in options.reverse.finditer(text)
    ]


def _bare(lines: list[str], options: Options) -> frozenset[str]:
    """Return the option that a line is or begins with; lines of several options are a list and no claim."""
    for line in (lines[-1], lines[0]):
        bare = line.strip(AROUND)
        bare = bare.removeprefix(found[0]).strip(AROUND) if (found := OPTION_WORD.match(bare)) else bare
        labels, end = _named_at(bare, 0, options)
        if labels and end == len(bare):
            return frozenset(labels)
    begun: set[str] = set()
    for line in lines:
        if found := options.line.match(line[:400]):
            begun |= _named_at(line, found.start("label"), options)[0]
    return frozenset(begun) if len(begun) == 1 else frozenset()


def _marked(text: str, options: Options) -> frozenset[str]:
    found = {options.by_name[(first or second).casefold()] for first, second in options.marked.findall(text)}
    return frozenset(found) if len(found) == 1 else frozenset()


def _worded(line: str, options: Options) -> frozenset[str]:
    """Return the only option whose text the last line has."""
    line = line[-2_000:]
    found: set[str] = set()
    for text in options.text.finditer(line):
        if DENIED.search(line[: text.start()][-30:]):
            continue
        found.add(options.by_text[_plain(text[0])])
    return frozenset(found) if len(found) == 1 else frozenset()
