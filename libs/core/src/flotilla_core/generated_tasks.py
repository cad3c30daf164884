"""Tasks of the package reasoning_gym: how sources of data name them, how their rows are made, and what a row keeps.

Invariants: a row depends on its task, level, parameters, seed, place and split, and on the versions of the package and
of numpy alone. A question is of one split for ever: its digest says which, whatever the seed, the size and the
difficulty, so rows of two splits are never equal. An entry is unpacked as it was made, types included. The package is
optional: nothing here imports it before a row is made or scored.
"""

from __future__ import annotations

import difflib
import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig

TASKS = "reasoning_gym:"
"""Begins the name of a source of generated rows."""
COLUMN = "reasoning_gym"
"""The column of a row that scoring needs."""
PACKAGE = "reasoning-gym"
INSTALL = f"{sys.executable} -m pip install 'flotilla[reasoning-gym]'"
"""Names the interpreter: a pip of another one would take another project called flotilla from the index."""

SHARES = {0: "test", 1: "validation"}
"""The splits of two digests of eight; all others are for training."""
SPLITS = ("train", "validation", "test")
BOUNDS = {"size": (1, 100_000), "seed": (0, 4000), "level": (0, 99)}
"""The least and the most of each key that is not the task's own."""
STRIDE = 1 << 20
"""The distance between the first items of two seeds."""
TOGETHER = 500
"""The size of the data sets of the package that items are taken from; some make other items for another size."""
UNSTABLE = {"time_intervals": ("start_time", "end_time")}
"""Keys of metadata that have the day on which an item was made; no score reads them."""
DRAWS_PER_ROW, MORE_DRAWS = 64, 2048
"""Items that are looked at for a row at most, because most are of another split, or were there before."""


@dataclass(frozen=True)
class TaskSource:
    """A source of generated rows, written `reasoning_gym:TASK?size=500&seed=1&level=2&PARAMETER=JSON`."""

    task: str
    size: int = 500
    seed: int = 1
    level: int | None = None
    """The level of the task's own curriculum; without one its defaults hold."""
    highest: int | None = None
    """The last level of a range, which a curriculum of the run begins at `level`."""
    parameters: tuple[tuple[str, str], ...] = ()
    """Keys of the task's configuration, with values as JSON."""

    @classmethod
    def parse(cls, source: Path | str) -> TaskSource:
        """Return the source of a name, with or without what begins it; a ValueError says what is wrong."""
        task, _, query = str(source).removeprefix(TASKS).partition("?")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", task):
            raise ValueError(f"{TASKS} is followed by the name of a task, as in {TASKS}countdown?size=500")
        given: dict[str, str] = {}
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not equals or not key.isidentifier() or key in given:
                raise ValueError(f"{part!r} of {source} is no key=value, or a second one of its key")
            given[key] = value
        if {"level", "levels"} <= {*given}:
            raise ValueError(f"{source} has level and levels: name one of them")
        ends: tuple[int | None, int | None] = (None, None)
        if "levels" in given:
            ends = _levels(given.pop("levels"))
        own: dict[str, Any] = {
            key: _integer(key, given.pop(key), least, most)
            for key, (least, most) in BOUNDS.items()
            if key in given
        }
        parameters = tuple(sorted((key, _canonical(value)) for key, value in given.items()))
        return replace(cls(task, level=ends[0], highest=ends[1], parameters=parameters), **own)

    def __str__(self) -> str:
        return f"{TASKS}{self.kind}{'&' if '?' in self.kind else '?'}size={self.size}&seed={self.seed}"

    @property
    def kind(self) -> str:
        """The task with its difficulty, without what chooses its rows."""
        level = [] if self.level is None else [("level", str(self.level))]
        if self.highest is not None:
            level = [("levels", f"{self.level}-{self.highest}")]
        query = "&".join(f"{key}={value}" for key, value in (*level, *self.parameters))
        return f"{self.task}?{query}" if query else self.task

    @property
    def name(self) -> str:
        """The name of its metrics."""
        return self.task if self.level is None else f"{self.task}.{self.level}"

    @property
    def by_level(self) -> list[TaskSource]:
        """A source for each level; itself where it names no range."""
        if self.highest is None or self.level is None:
            return [self]
        return [replace(self, level=at, highest=None) for at in range(self.level, self.highest + 1)]


def _levels(value: str) -> tuple[int, int]:
    ends = re.fullmatch(r"(\d{1,2})-(\d{1,2})", value)
    if ends is None or int(ends[1]) >= int(ends[2]):
        raise ValueError(f"levels is a range such as 0-4, got {value!r}")
    return int(ends[1]), int(ends[2])


def _integer(key: str, value: str, least: int, most: int) -> int:
    if not value.isdecimal() or len(value) > 9 or not least <= int(value) <= most:
        raise ValueError(f"{key} is a whole number from {least:,} to {most:,}, got {value!r}")
    return int(value)


def _canonical(value: str) -> str:
    """Return a value as JSON; what is none is a text."""
    try:
        return json.dumps(json.loads(value))
    except (ValueError, RecursionError):
        return json.dumps(value)


def is_generated(source: Path | str) -> bool:
    """Return whether a source of data names tasks in place of files."""
    return str(source).startswith(TASKS)


def package_version() -> str:
    """Return the version of the package; raise where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise InvalidConfig(
            f"the package {PACKAGE} is not installed here",
            where="data.train, evaluation.data or rewards",
            why=f"tasks that begin with {TASKS} are made and scored by it",
            next_step=f"{INSTALL}, beside the coordinator and beside the reward service",
        ) from None


def data_set(source: TaskSource, seed: int = 0, size: int = TOGETHER) -> Any:
    """Return the package's data set of a task at its difficulty, which makes items and scores answers."""
    package_version()
    factory = importlib.import_module("reasoning_gym").factory
    if source.task not in factory.DATASETS:
        close = difflib.get_close_matches(source.task, factory.DATASETS, n=1)
        raise InvalidConfig(
            f"there is no task {source.task!r}{f' (did you mean {close[0]}?)' if close else ''}",
            where=f"{TASKS}{source.kind}",
            next_step=f"Tasks of {PACKAGE} {package_version()}: {', '.join(sorted(factory.DATASETS))}.",
        )
    values = {key: json.loads(value) for key, value in source.parameters}
    try:
        chosen = {} if source.level is None else _of_level(factory, source.task, source.level)
        return factory.create_dataset(source.task, **(chosen | values | {"seed": seed, "size": size}))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidConfig(
            f"task {source.task} cannot be made like this",
            where=f"{TASKS}{source.kind}",
            why=str(error) or type(error).__name__,
            next_step=f"its keys are those of its configuration in {PACKAGE}",
        ) from None


def _of_level(factory: Any, task: str, level: int) -> dict[str, Any]:
    """Return the configuration of a level, by the task's own curriculum."""
    curriculum = factory.create_curriculum(task)
    highest = max((len(one.levels) - 1 for one in curriculum.attributes.values()), default=0)
    if level > highest:
        raise ValueError(f"its curriculum has the levels 0 to {highest}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration()
    return {field.name: getattr(config, field.name) for field in fields(config)}


def split_of(question: str) -> str:
    """Return the split that a question is of."""
    return SHARES.get(_digest(question)[0] % 8, "train")


def _digest(question: str) -> bytes:
    return blake2b(question.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def generated_rows(source: TaskSource, split: str) -> Iterator[dict[str, Any]]:
    """Make the rows of a split, whose questions all differ."""
    seen: set[bytes] = set()
    of_package, most, drawn = package_version(), min(MORE_DRAWS + DRAWS_PER_ROW * source.size, STRIDE), 0
    for seed in count(source.seed * STRIDE, TOGETHER):
        tasks = data_set(source, seed)
        for index in range(TOGETHER):
            if drawn == most:
                raise _too_few(source, split, drawn, len(seen))
            drawn += 1
            entry = item(tasks, seed, index)
            digest = _digest(entry["question"])
            if split_of(entry["question"]) != split or digest in seen:
                continue
            seen.add(digest)
            for key in UNSTABLE.get(source.task, ()):
                del entry["metadata"][key]
            answer = entry["answer"]
            kept = {"task": source.kind, "version": of_package, "seed": seed, "index": index}
            yield {
                "prompt": entry["question"],
                "answer": "" if answer is None else str(answer),
                COLUMN: kept | {"entry": packed(entry, str(source))},
            }
            if len(seen) == source.size:
                return


def _too_few(source: TaskSource, split: str, drawn: int, found: int) -> InvalidConfig:
    return InvalidConfig(
        f"the task has too few different questions for {source.size:,} rows",
        where=str(source),
        why=f"{drawn:,} items have {found:,} of the split {split}",
        next_step=f"ask for size={found}, or for more difficult items",
    )


def write_rows(question: dict[str, Any]) -> None:
    """Write the rows of `source` and `split` to `target`, as lines of JSON; a process within bounds does this."""
    rows = generated_rows(TaskSource.parse(question["source"]), question["split"])
    with Path(question["target"]).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def item(tasks: Any, seed: int, index: int) -> dict[str, Any]:
    """Return one item, the same each time: some tasks draw from generators that all of a process share."""
    random.seed(seed + index)
    sys.modules["numpy"].random.seed(seed + index)
    found: dict[str, Any] = tasks[index]
    return found


def packed(entry: dict[str, Any], where: str) -> str:
    """Return an item as a text from which `unpacked` makes an equal one; raise where it cannot."""
    text = json.dumps(_tagged(entry))
    if unpacked(text) != entry:
        raise InvalidConfig(
            "the items of this task cannot be kept in rows", where=where, next_step="leave the task out"
        )
    return text


def _tagged(value: Any) -> Any:
    """Write what JSON has not as an object with one key of its own."""
    if isinstance(value, dict):
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        pairs = [[_tagged(key), _tagged(one)] for key, one in value.items()]
        return dict(pairs) if plain else {"$dict": pairs}
    if isinstance(value, list | tuple):
        items = [_tagged(one) for one in value]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        return {"$set": sorted(map(_tagged, value), key=repr)}
    if callable(getattr(value, "item", None)):  # A number of numpy.
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


MADE_OF: dict[str, Callable[[Any], Any]] = {"$dict": dict, "$tuple": tuple, "$set": set}


def unpacked(text: str) -> Any:
    """Return the item in a text."""
    return json.loads(text, object_hook=_untagged)


def _untagged(value: dict[str, Any]) -> Any:
    key = next(iter(value), "")
    return MADE_OF[key](value[key]) if key.startswith("$") else value
