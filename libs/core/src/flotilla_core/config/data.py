"""The data of a run and its evaluation: prompts, rollouts and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from flotilla_core.config.model import ConfigModel, DataSource
from flotilla_core.config.rewards import RewardMode, RewardTermConfig
from flotilla_core.evaluations import majority_sizes, team_sizes
from flotilla_core.generated_tasks import TaskSource, is_generated


class TrainingSet(ConfigModel):
    """One of several data sets of prompts."""

    path: DataSource
    """File, folder, pattern, `hub:owner/name` or tasks, as `data.train`."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Weight of the set in the draw: its share is this divided by the sum of all weights, however long the file is."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Names its metrics; empty takes the file name without its extension, or the name of the task."""


def _form(train: Any) -> str | None:
    return "one" if isinstance(train, str | Path) else "several" if isinstance(train, list | tuple) else None


TrainingData = Annotated[
    Annotated[DataSource, Tag("one")]
    | Annotated[tuple[TrainingSet, ...], Field(max_length=1000), Tag("several")],
    Discriminator(
        _form,
        custom_error_type="training_data",
        custom_error_message="a path, or a list of mappings with path, weight and name",
    ),
]


class CurriculumConfig(ConfigModel):
    """Raise the level of tasks that name a range of them, such as `reasoning_gym:countdown?levels=0-4`."""

    every_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """Steps at each level."""
    reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Mean reward of the last `prompts` prompts of a level, all of that level, from which on the next one is drawn."""
    prompts: int = Field(default=64, ge=1, le=100_000)
    """Prompts that `reward` is the mean of."""

    @model_validator(mode="after")
    def _rises_in_one_way(self) -> CurriculumConfig:
        if (self.every_steps is None) == (self.reward is None):
            raise ValueError("name one of every_steps and reward, by which the level rises")
        return self


class DataConfig(ConfigModel):
    """Prompts to train on."""

    train: TrainingData
    """JSONL, JSON or Parquet file, folder, pattern such as `part-*.parquet`, `hub:owner/name`, or
    `reasoning_gym:TASK?size=500&seed=1&level=0`; or a list of several, each with `path`, `weight` and `name`."""
    recorded: bool = False
    """The rows of `train` are samples that a run recorded (`rollout.record`); they train in place of new ones."""
    split: str = Field(default="train", pattern=r"^[A-Za-z0-9_.-]+$")
    """Split to read where a folder or a hub name has several."""
    prompt_field: str = Field(default="prompt", min_length=1)
    """Column with the prompt: text, or a list of chat messages. A dot leads into a nested column: `extra.question`."""
    answer_field: str = Field(default="answer", min_length=1)
    """Column with the correct answer; may be absent if no reward needs it."""
    system_prompt: str = ""
    """Put before chat messages that have no system message; a prompt of plain text becomes a chat message."""
    chosen_field: str = "chosen"
    """Column with the preferred answer of a pair (`dpo`, `reward_model`): text, or chat messages that end with it."""
    rejected_field: str = "rejected"
    """Column with the other answer of a pair, in the same form."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template (always done for lists of messages)."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """Longest prompt; `overlong_prompts` says how longer ones are handled."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of longer prompts; drops and truncations are counted."""
    max_bad_rows: float = Field(default=0.0, ge=0, lt=1)
    """Share of rows that may be unusable, such as broken JSON or a missing prompt; they are left out. 0 refuses the
    first one."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Leave prompts in their files and tokenize each when it is drawn, instead of all before the start. `auto` does so
    above 20,000 rows."""
    order: Literal["shuffled", "as_written", "by_field"] = "shuffled"
    """A new order every epoch, derived from the run's seed; the file's order; or ascending by `difficulty_field`."""
    difficulty_field: str = ""
    """Column with the number that `order: by_field` sorts by, the same in every epoch; ties stay as in the file."""
    rest_epochs: int = Field(default=0, ge=0, le=1023)
    """Maximum number of epochs that a prompt rests after it was solved: 1, after the second time in a row 3, then 7,
    15, and so on. 0 draws every prompt in every epoch."""
    curriculum: CurriculumConfig | None = None
    """How the level of generated tasks rises; absent: each has one level."""

    @property
    def training_sets(self) -> tuple[TrainingSet, ...]:
        """Return every data set as it is written; one alone has no weight and no name of its own."""
        return (TrainingSet(path=self.train),) if isinstance(self.train, Path) else self.train

    @property
    def learns_outcomes(self) -> bool:
        """True where what is drawn depends on what came of earlier prompts."""
        return bool(self.rest_epochs) or (self.curriculum is not None and self.curriculum.reward is not None)

    @model_validator(mode="after")
    def _rises_where_there_are_levels(self) -> DataConfig:
        ranges = [one.path for one in self.training_sets if _is_range(one.path)]
        if ranges and self.curriculum is None:
            raise ValueError(
                f"{ranges[0]} names a range of levels: say in data.curriculum how the level rises"
            )
        if self.curriculum is not None and not ranges:
            raise ValueError(
                "curriculum raises levels, and no data set has levels=0-4 or the like in its name"
            )
        return self

    @model_validator(mode="after")
    def _has_prompts_in_an_order(self) -> DataConfig:
        if self.train == ():
            raise ValueError("train is an empty list: name a file with prompts")
        if (self.order == "by_field") != bool(self.difficulty_field):
            raise ValueError(
                f"order is {self.order} and difficulty_field is {self.difficulty_field!r}: by_field needs the name of "
                "a column with numbers, the other orders look at none"
            )
        return self


def _is_range(path: Path) -> bool:
    return is_generated(path) and TaskSource.parse(path).highest is not None


UNREPRODUCIBLE = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "logit_bias",
    "bad_words",
)
"""Settings of other programs that change the distribution which tokens are drawn from."""


class SamplingConfig(ConfigModel):
    """The sampling of responses."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability that the candidates for a token have (nucleus sampling). Below 1 it is refused for
    training rollouts: the trainer could not reproduce the logprobs."""
    top_k: int = Field(default=0, ge=0, le=10_000_000)
    """0 is off; above 0 is refused for training rollouts."""
    max_response_tokens: int = Field(default=256, ge=1, le=10_000_000)
    """Length limit of a response."""
    min_response_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """No end of sequence before this many tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=10_000_000)], ...] = Field(default=(), max_length=64)
    """Tokens that end a response, beside those of the model. The token stays in the response."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    """Texts that end a response. It keeps the token that completes one whole; rewards get the text up to its end."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_reproduced(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in UNREPRODUCIBLE:
                if key in values:
                    raise ValueError(
                        f"{key} is not offered: it changes the distribution that tokens are drawn from, and the "
                        "trainer computes log-probabilities without it, so each update would be wrong. Remove it; a "
                        "reward can punish what it is meant to avoid"
                    )
        return values

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> SamplingConfig:
        if self.stop and self.min_response_tokens:
            raise ValueError(
                f"min_response_tokens is {self.min_response_tokens}, and a text of stop may come earlier: remove one "
                "of them, or name tokens in stop_token_ids, which min_response_tokens holds back"
            )
        return self

    def shown(self, text: str) -> str:
        """Return the text that a reward gets: up to the end of the first stop text, with it."""
        ends = [place + len(stop) for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


class DynamicSamplingConfig(ConfigModel):
    """Leave out groups whose rewards are all equal, and draw other prompts in their place."""

    max_prompts_per_step: int | None = Field(default=None, ge=1, le=1_000_000)
    """Limit on the prompts drawn for one step; when too few groups have different rewards, the batch is smaller. Empty
    takes four times
    rollout.prompts_per_step."""


class RolloutConfig(ConfigModel):
    """The generation of one step."""

    prompts_per_step: int = Field(default=64, ge=1, le=100_000)
    """Groups in a batch; also the prompts drawn for a step, unless a setting below draws more."""
    samples_per_prompt: int = Field(default=8, ge=1, le=10_000)
    """Number of samples in a group."""
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Updates between the oldest token of a sample and the update that trains it. 0: samples come from the version that
    is being trained; k: generation runs up to k steps ahead of training."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling of training rollouts."""
    sample_timeout_s: float = Field(default=300.0, gt=0, le=604_800)
    """A group that is not done after this long is issued again; one that is admitted n steps ahead has (1 + n) times as
    long."""
    max_attempts: int = Field(default=5, ge=1, le=1000)
    """Times that a sample is issued before the run fails with the generators' last error."""
    resume_partial: bool = False
    """A sample that a generator gives up part-way (it drains, or a sync failed) continues elsewhere after the tokens
    that it has; otherwise it starts again from the prompt."""
    max_reward_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's samples that may end as a reward error or timeout; above it the run fails."""
    record: bool = False
    """Write the samples of each batch to `rollouts/` of the run directory, with all that training needs of them."""
    generators: int | None = Field(default=None, ge=1, le=256)
    """Maximum number of generators for the run; empty: an even share of all, which is all of them for a single run."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train only groups with different rewards; absent: every group is trained."""
    over_issue: float = Field(default=0.0, ge=0, le=1)
    """Extra groups under way, as a share of a batch. The batch consists of the first groups that end; the
    others count for the next step if `max_staleness` allows it, and are given up otherwise."""

    @model_validator(mode="after")
    def _replaces_what_can_be_judged(self) -> RolloutConfig:
        if self.dynamic_sampling is None:
            return self
        limit = self.dynamic_sampling.max_prompts_per_step
        if limit is not None and limit < self.prompts_per_step:
            raise ValueError(
                f"dynamic_sampling.max_prompts_per_step is {limit}, less than prompts_per_step = "
                f"{self.prompts_per_step}: no batch could be full"
            )
        if self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling compares the rewards of a group, and samples_per_prompt is 1: "
                "set it to 2 or more (8 is usual)"
            )
        return self

    @property
    def longest_sample_s(self) -> float:
        """The time limit of a group that is admitted as early as possible."""
        return self.sample_timeout_s * (1 + self.max_staleness)


class HeldOutSet(ConfigModel):
    """One of several held-out files; a key that is left empty takes the one of `evaluation`."""

    path: DataSource
    """File, folder, pattern or `hub:owner/name`, as `data.train`."""
    split: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Split to read where a folder or a hub name has several."""
    prompt_field: str = ""
    """Column with the prompt."""
    answer_field: str = ""
    """Column with the correct answer."""
    chosen_field: str = ""
    """Column with the preferred answer of a pair."""
    rejected_field: str = ""
    """Column with the other answer of a pair."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Names its metrics; empty takes the file name without its extension."""
    rewards: tuple[RewardTermConfig, ...] = Field(default=(), max_length=64)
    """The rewards of its answers; empty takes those of the run."""
    reward_mode: RewardMode = "weighted"
    """Combination of `rewards` of its own, as `reward_mode` of the run."""
    success_at: float | None = Field(default=None, ge=-1e12, le=1e12)
    """An answer is right when its total reward is at least this."""
    max_prompts: int | None = Field(default=None, ge=1, le=100_000)
    """Maximum number of prompts taken from the file."""
    max_response_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Length limit of a response."""
    samples_per_prompt: int | None = Field(default=None, ge=1, le=10_000)
    """Answers drawn for each prompt."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 is greedy."""
    answer_after: str | None = Field(default=None, max_length=256)
    """Text before the final answer of a response, for `eval/maj@k`."""

    @property
    def shown(self) -> str:
        """The name of its metrics."""
        if is_generated(self.path):
            return self.name or TaskSource.parse(self.path).name
        return self.name or self.path.stem

    @model_validator(mode="after")
    def _has_one_level(self) -> HeldOutSet:
        if _is_range(self.path):
            raise ValueError(f"{self.path} names a range of levels: evaluations have one each, as level=4")
        return self


HeldOutData = Annotated[
    Annotated[DataSource, Tag("one")]
    | Annotated[tuple[HeldOutSet, ...], Field(min_length=1, max_length=100), Tag("several")],
    Discriminator(
        _form,
        custom_error_type="held_out_data",
        custom_error_message="a path, or a list of mappings with path, name and settings of its own",
    ),
]


class EvaluationConfig(ConfigModel):
    """Evaluation on held-out prompts or pairs; before, during and after training."""

    data: HeldOutData
    """File, folder, pattern, `hub:owner/name` or tasks, as `data.train`; or a list of several, each with `path`, `name`
    and settings of its own. The first one decides what `stop` sees."""
    split: str = Field(default="test", pattern=r"^[A-Za-z0-9_.-]+$")
    """Split to read where a folder or a hub name has several."""
    prompt_field: str = ""
    """Column with the prompt; empty takes that of `data`."""
    answer_field: str = ""
    """Column with the correct answer; empty takes that of `data`."""
    chosen_field: str = ""
    """Column with the preferred answer of a pair; empty takes that of `data`."""
    rejected_field: str = ""
    """Column with the other answer of a pair; empty takes that of `data`."""
    every_steps: int = Field(default=0, ge=0, le=10_000_000)
    """Steps between evaluations; 0: only before and after training."""
    success_at: float = Field(default=1.0, ge=-1e12, le=1e12)
    """An answer is right when its total reward is at least this."""
    max_prompts: int = Field(default=500, ge=1, le=100_000)
    """Maximum number of prompts taken from a file."""
    max_response_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Length limit of a response; empty takes the rollout's limit."""
    samples_per_prompt: int = Field(default=1, ge=1, le=10_000)
    """Answers drawn for each prompt; above 1 `eval/mean@n`, `eval/pass@k` and `eval/maj@k` are measured as well."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """0 is greedy, which would make several answers to a prompt all equal."""
    answer_after: str = Field(default="", max_length=256)
    """Text before the final answer of a response, such as `####`: `eval/maj@k` compares the rest of the line after its
    last occurrence, or the next line where that rest is blank. A response without it has no vote. Empty compares what
    the rewards read as the answer, or whole responses where they do not say that."""
    pinned: bool = False
    """Evaluate during the next steps: with two or more generators, one keeps the version until the evaluation ends."""

    @property
    def sets_of_data(self) -> tuple[HeldOutSet, ...]:
        """Return every held-out file as it is written; one alone has no settings of its own."""
        return (HeldOutSet(path=self.data),) if isinstance(self.data, Path) else self.data

    def rising_metrics(self, *, pairs: bool) -> tuple[str, ...]:
        """Return the metrics of which more is better; the first set has the plain names too."""
        found: list[str] = []
        for one in self.sets_of_data:
            drawn = one.samples_per_prompt or self.samples_per_prompt
            figures = ["accuracy"] if pairs else ["accuracy", "reward_mean"]
            if drawn > 1:
                figures += [f"mean@{drawn}", *(f"pass@{k}" for k in team_sizes(drawn))]
                figures += [f"maj@{k}" for k in majority_sizes(drawn)]
            if not found:
                found += [f"eval/{figure}" for figure in figures]
            if not isinstance(self.data, Path):
                found += [f"eval/{one.shown}/{figure}" for figure in figures]
        return tuple(found)

    @model_validator(mode="after")
    def _answers_differ(self) -> EvaluationConfig:
        for one in self.sets_of_data:
            drawn = one.samples_per_prompt or self.samples_per_prompt
            temperature = self.temperature if one.temperature is None else one.temperature
            if drawn > 1 and temperature == 0:
                where = "" if isinstance(self.data, Path) else f" of {one.shown}"
                raise ValueError(
                    f"samples_per_prompt{where} is {drawn}, but greedy answers to one prompt are all "
                    "equal: set temperature above 0 (1.0 is that of the rollouts), or samples_per_prompt to 1"
                )
        return self

    @model_validator(mode="after")
    def _has_sets_of_different_names(self) -> EvaluationConfig:
        names = [one.shown for one in self.sets_of_data]
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(
                f"several held-out sets are called {repeated[0]!r}, and each has metrics under its name: give each a "
                "`name` of its own"
            )
        return self


class StopConfig(ConfigModel):
    """End early on an evaluation."""

    accuracy_at_least: float = Field(ge=0, le=1)
    """Stop at the first evaluation that reaches this accuracy."""
    accuracy_at_most: float | None = Field(default=None, ge=0, le=1)
    """The run fails when the evaluation that stopped it is above this accuracy."""
