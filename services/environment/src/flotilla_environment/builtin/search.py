"""An environment with a search over a corpus on the disk of the service, by BM25.

Invariants: the corpus is read once in a worker, for all its episodes, and again where the file has changed. It is read
before the first turn, so what is wrong with it is an error of the environment and never told to the policy.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from flotilla_environment.builtin.answers import WORD, holds
from flotilla_environment.environment import Begun, Task
from flotilla_environment.tools import ToolEnvironment
from flotilla_workers.functions import Refusal

K1, B = 1.5, 0.75
LONGEST_HIT = 1_000


class Index:
    """The passages of a corpus, and for each word those that have it, with how often."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self._of: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = []
        for number, passage in enumerate(passages):
            words = WORD.findall(passage.casefold())
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._of[word].append((number, count))
        self._mean = sum(self._lengths) / len(passages)

    def best(self, query: str, most: int) -> list[str]:
        """Return the passages that fit best, the best one first."""
        scores: dict[int, float] = defaultdict(float)
        for word in {*WORD.findall(query.casefold())}:
            having = self._of.get(word, ())
            rare = math.log(1 + (len(self.passages) - len(having) + 0.5) / (len(having) + 0.5))
            for number, count in having:
                long = 1 - B + B * self._lengths[number] / self._mean
                scores[number] += rare * count * (K1 + 1) / (count + K1 * long)
        order = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.passages[number] for number in order[:most]]


def read(corpus: Path) -> list[str]:
    """Return the passages of a file: `text` (and `title`) of each line of .jsonl, else what blank lines part."""
    text = corpus.read_text("utf-8")
    if corpus.suffix != ".jsonl":
        passages = [part.strip() for part in re.split(r"\n\s*\n", text)]
    else:
        # A text in JSON may hold other ends of lines.
        lines = enumerate(text.split("\n"), 1)
        passages = [_passage(line, number) for number, line in lines if line.strip()]
    if not any(passages):
        raise ValueError("it has no text")
    return [passage for passage in passages if passage]


def _passage(line: str, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is no JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # A number too long, or lists too deep.
        raise ValueError(f"line {number} is no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"line {number} is no object with a text")
    return f"{row['title']}\n{row['text']}" if row.get("title") else str(row["text"])


@cache
def _index(corpus: Path, changed: int) -> Index:
    return Index(read(corpus))


class Search(ToolEnvironment):
    """A search over a corpus to answer the prompt with: reward `correct` where the answer holds the right one."""

    def __init__(self, corpus: str, *, hits: int = 3) -> None:
        super().__init__()
        self._corpus, self._hits = Path(corpus).absolute(), hits

    def begin(self, task: Task) -> Begun:
        try:
            self._index = _index(self._corpus, self._corpus.stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            raise Refusal(f"corpus {self._corpus} cannot be read: {error}") from None
        return super().begin(task)

    def tools(self) -> list[Callable[..., Any]]:
        return [self.search]

    def search(self, query: str) -> str:
        """Search the corpus, and return the passages that fit the query best."""
        found = [passage[:LONGEST_HIT] for passage in self._index.best(query, self._hits)]
        return (
            "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(found, 1)) or "nothing found"
        )

    def score(self, answer: str) -> dict[str, float]:
        return {"correct": float(holds(answer, self.task.answer))}
