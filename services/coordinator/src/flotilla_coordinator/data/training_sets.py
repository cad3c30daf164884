"""Reads the data sets of a run as its algorithm needs them, and numbers their prompts through.

Invariants: the prompts of a set have the numbers after those of the set before it, with rows that are left out counted.
An order by difficulty changes no number. A row that lacks the column of teachers, or names a teacher that the run does
not ask, is a bad row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flotilla_coordinator.data.given import load_given
from flotilla_coordinator.data.prompts import (
    LeftOut,
    Load,
    Made,
    Prompt,
    PromptFile,
    Stage,
    load_prompts,
)
from flotilla_coordinator.data.recorded import load_recorded
from flotilla_core.config import (
    DataConfig,
    EvaluationConfig,
    HeldOutSet,
    PolicyConfig,
    RewardMode,
    RewardTermConfig,
    RunConfig,
    StackConfig,
    TrainingSet,
)
from flotilla_core.config.advantages import GdpoAdvantage, GigpoAdvantage
from flotilla_core.config.document import describe
from flotilla_core.config.training import AskedTeachers
from flotilla_core.errors import InvalidConfig
from flotilla_core.generated_tasks import TaskSource, is_generated
from flotilla_core.roles import teacher_role
from flotilla_data.columns import Columns, Reads, value_at
from flotilla_data.files import set_name
from flotilla_data.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedSet:
    """One data set with its prompts."""

    name: str
    path: Path
    file: PromptFile
    share: float
    """The share of the draws, of all levels of a data set together."""
    before: int = 0
    """The number of rows of the sets before it."""
    shown: str = ""
    """The name that its prompts carry; empty where the run has one set."""
    of: int = 0
    """The place of its data set in `data.train`; the levels of one follow each other."""

    def read(self, numbers: Sequence[int], epoch: int = 0) -> list[Prompt | None]:
        """Return the prompts of these rows as those of the run."""
        prompts = self.file.read(numbers)
        if not (epoch or self.before or self.shown):
            return prompts  # They are the run's own already.
        return [
            None
            if prompt is None
            else replace(prompt, epoch=epoch, index=self.before + prompt.index, data_set=self.shown)
            for prompt in prompts
        ]


class JoinedSets(PromptFile):
    """All data sets of a run, as if they were one file."""

    def __init__(self, sets: Sequence[LoadedSet]) -> None:
        super().__init__(
            (),
            dropped=sum(one.file.dropped for one in sets),
            truncated=sum(one.file.truncated for one in sets),
        )
        self._sets = sets
        self.streamed = any(one.file.streamed for one in sets)

    @property
    def rows(self) -> int:
        """The number of rows, with those that are left out."""
        return sum(one.file.rows for one in self._sets)

    @property
    def kept(self) -> int:
        """The number of prompts, as far as it is known."""
        return sum(one.file.kept for one in self._sets)

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt can have."""
        return max(one.file.longest_prompt for one in self._sets)

    @property
    def longest_brought(self) -> int:
        """The tokens of the longest sequence that comes with the data: a prompt with what follows it."""
        return max(one.file.longest_brought for one in self._sets)

    def read(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return the prompts of these rows, which ascend."""
        return [prompt for one, own in self._own(numbers) for prompt in one.read(own)]

    def parts(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Divide rows into those that are read together."""
        for one, own in self._own(numbers):
            for part in one.file.parts(own):
                yield [number + one.before for number in part]

    def _own(self, numbers: Sequence[int]) -> Iterator[tuple[LoadedSet, list[int]]]:
        """Return each set with those of its rows that are asked for."""
        for one in self._sets:
            own = [n - one.before for n in numbers if one.before <= n < one.before + one.file.rows]
            if own:
                yield one, own


def read_sets(config: DataConfig, tokenizer: Tokenizer, load: Load) -> list[LoadedSet]:
    """Read all of `data.train`."""
    sets = config.training_sets
    weights = sum(one.weight for one in sets)
    parts = [(of, path, name) for of, one in enumerate(sets) for path, name in _levels(one)]
    _refuse_equal([name for _, _, name in parts])
    loaded: list[LoadedSet] = []
    before = 0
    for of, path, name in parts:
        file = load(path, config, tokenizer)
        shown = name if len(parts) > 1 else ""
        loaded.append(LoadedSet(name, path, file, sets[of].weight / weights, before, shown, of))
        before += file.rows
    return loaded


def _levels(one: TrainingSet) -> list[tuple[Path, str]]:
    """Return the sources of a data set with their names: one for each level where it names several."""
    if not is_generated(one.path):
        return [(one.path, one.name or set_name(one.path))]
    sources = TaskSource.parse(one.path).by_level
    if len(sources) == 1:
        return [(one.path, one.name or sources[0].name)]
    return [(Path(str(source)), f"{one.name or source.task}.{source.level}") for source in sources]


def copies_folder(stack: StackConfig) -> Path:
    """Return where a stack keeps copies of data that cannot be read where they stand."""
    return stack.state_dir / stack.name / "data"


def _refuse_equal(names: list[str]) -> None:
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InvalidConfig(
            f"several data sets are called {repeated[0]!r}",
            where="data.train",
            why="each has metrics under its name",
            next_step="give each a `name` of its own",
        )


def training_data(config: RunConfig, copies: Path | None = None) -> Load:
    """Return the reader of `data.train`; a client that makes the steps brings its pairs itself."""
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyConfig) and config.data.recorded:
        advantage = algorithm.advantage
        return partial(
            load_recorded,
            copies=copies,
            temperature=config.rollout.sampling.temperature,
            least_samples=advantage.needed_group_samples,
            greedy=advantage.needs_greedy_reward,
            reward_terms=len(advantage.weights) if isinstance(advantage, GdpoAdvantage) else 0,
            states=isinstance(advantage, GigpoAdvantage),
        )
    asked = algorithm.asked_teachers if isinstance(algorithm, PolicyConfig) else None
    if asked is not None and asked.teacher_field is None:
        asked = None
    return _reader(reads_of(config), asked, copies, whole=config.trains_reward_model)


def reads_of(config: RunConfig) -> Reads:
    """Return what a run reads from its training rows; a client that makes the steps gets prompts."""
    if config.loop == "client":
        return Reads.prompts
    if config.learns_from_pairs:
        return Reads.pairs
    return Reads.answers if config.algorithm.type == "sft" else Reads.prompts


@dataclass(frozen=True)
class HeldOut:
    """One held-out file, with all settings that count for its evaluation."""

    name: str
    path: Path
    data: DataConfig
    """The settings by which its rows are read: those of the training rows, but for the split and columns of its own."""
    rewards: tuple[RewardTermConfig, ...]
    reward_mode: RewardMode
    success_at: float
    max_prompts: int
    max_response_tokens: int
    samples_per_prompt: int
    temperature: float
    answer_after: str


def held_out_sets(config: RunConfig) -> list[HeldOut]:
    """Return the held-out files of a run; what one leaves out is that of the evaluation, or of the run."""
    evaluation = config.evaluation
    return (
        [] if evaluation is None else [_held_out(one, evaluation, config) for one in evaluation.sets_of_data]
    )


def _held_out(one: HeldOutSet, evaluation: EvaluationConfig, config: RunConfig) -> HeldOut:
    longest = one.max_response_tokens or evaluation.max_response_tokens
    return HeldOut(
        name=one.shown,
        path=one.path,
        data=_read_like(config.data, one, evaluation),
        rewards=one.rewards or config.rewards,
        reward_mode=one.reward_mode if one.rewards else config.reward_mode,
        success_at=evaluation.success_at if one.success_at is None else one.success_at,
        max_prompts=one.max_prompts or evaluation.max_prompts,
        max_response_tokens=longest or config.rollout.sampling.max_response_tokens,
        samples_per_prompt=one.samples_per_prompt or evaluation.samples_per_prompt,
        temperature=evaluation.temperature if one.temperature is None else one.temperature,
        answer_after=evaluation.answer_after if one.answer_after is None else one.answer_after,
    )


def read_held_out(
    config: RunConfig, tokenizer: Tokenizer, copies: Path | None = None
) -> list[tuple[HeldOut, PromptFile]]:
    """Read all of `evaluation.data`, each set with at most `max_prompts` prompts."""
    reads = Reads.pairs if config.evaluates_pairs else Reads.prompts
    load = _reader(reads, None, copies, whole=config.trains_reward_model)
    files = [(one, load(one.path, one.data, tokenizer)) for one in held_out_sets(config)]
    return [(one, file.cut(one.max_prompts)) for one, file in files]


def _read_like(data: DataConfig, one: HeldOutSet, evaluation: EvaluationConfig) -> DataConfig:
    columns = {
        "prompt_field": one.prompt_field or evaluation.prompt_field or data.prompt_field,
        "answer_field": one.answer_field or evaluation.answer_field or data.answer_field,
        "chosen_field": one.chosen_field or evaluation.chosen_field or data.chosen_field,
        "rejected_field": one.rejected_field or evaluation.rejected_field or data.rejected_field,
    }
    return data.model_copy(update={"split": one.split or evaluation.split, **columns})


def _reader(reads: Reads, asked: AskedTeachers | None, copies: Path | None, *, whole: bool = False) -> Load:
    def load(source: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
        stages: list[Stage] = [] if asked is None else [_ChosenTeacher(asked)]
        if reads is Reads.prompts:
            return load_prompts(source, config, tokenizer, copies, stages)
        return load_given(source, config, tokenizer, copies, reads=reads, whole=whole, stages=stages)

    return load


@dataclass(frozen=True)
class _ChosenTeacher:
    """Adds the role of the teacher that scores a prompt's samples."""

    asked: AskedTeachers

    def require(self, values: dict[str, Any], columns: Columns, where: str) -> None:
        """Refuse a row that names no teacher of the run."""
        column, asked = self._column, self.asked
        name = value_at(values, column)
        if isinstance(name, str) and name in asked.teachers:
            return
        problem = (
            f"is {describe(name)}, which names no teacher of the run" if column in values else "is missing"
        )
        raise InvalidConfig(
            f"column {column!r} {problem}",
            where=where,
            why=f"algorithm.{asked.asked_by}.teacher_field is {column}, and algorithm.{asked.asked_by}.teachers names "
            f"{', '.join(asked.teachers)}",
            next_step="give every row one of these names there, or set "
            f"algorithm.{asked.asked_by}.teacher_field to another column",
        )

    def finish(self, made: list[Made], columns: Columns) -> list[Made | LeftOut]:
        """Return the prompts with their teachers."""
        return [
            one._replace(prompt=replace(one.prompt, teacher=teacher_role(value_at(one.values, self._column))))
            for one in made
        ]

    @property
    def _column(self) -> str:
        assert self.asked.teacher_field is not None
        return self.asked.teacher_field


def data_remarks(files: Sequence[PromptFile]) -> Iterator[str]:
    """Say what is left out, for plans and notices."""
    for file in files:
        yield from file.remarks
