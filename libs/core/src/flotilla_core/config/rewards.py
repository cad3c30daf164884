"""The rewards of a run: its terms, by whom each is given, and how they make one number.

Invariants: a term has one name, in the configuration, on the wire and in what is recorded. It has the keys of who gives
it, and of nobody else: a function, a reward model, or a judge. A term of a judge is named `judge:NAME` wherever a
reward has a name. The text of its rubric is part of the configuration, so a run keeps the rubric that it began with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from flotilla_core.config.document import read_text_file
from flotilla_core.config.model import (
    ConfigModel,
    GangName,
    Parameters,
    expanded,
    function_path,
    possible_function,
)
from flotilla_core.errors import InvalidConfig
from flotilla_core.roles import GANG_NAME

LARGEST_REWARD = 1e38
"""Largest absolute value: sums and squares of such rewards stay finite. The trainer's contract has the same bound."""
PROMPT, RESPONSE = "{prompt}", "{response}"
"""The places in the template of a reward model."""

JUDGE = "judge:"
"""Begins the name of a reward that a judge gives."""
LONGEST_RUBRIC = 65_536
RUBRIC_FILES = (".md", ".txt")

VerdictName = Annotated[str, StringConstraints(pattern=r"^[\w][\w .+-]{0,63}$")]
Bound = Annotated[float, Field(ge=-1e6, le=1e6)]
RewardMode = Literal["weighted", "gated", "min", "max", "product", "first"]


class AgreementConfig(ConfigModel):
    """Examples with labels of humans, of which the judge is asked before a run starts."""

    examples: Path
    """JSONL, JSON or Parquet file. Each row has `prompt`, `response` and `label`: a verdict, or a number of the scale;
    `answer` where the judge sees one. With `pairs` it has `prompt`, `chosen` and `rejected`."""
    at_least: float = Field(default=0.8, ge=0, le=1)
    """Least agreement: the share of equal verdicts, or Spearman's rank correlation of a scale. Below it the run is
    refused."""


def _judge_or_name(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if [*value] != ["judge"] or not isinstance(value["judge"], str):
        raise ValueError("expected a name, path.py:function, or {judge: NAME}")
    return f"{JUDGE}{value['judge']}"


RewardName = Annotated[
    str,
    BeforeValidator(_judge_or_name),
    AfterValidator(possible_function),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"judge": {"type": "string"}},
                    "required": ["judge"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""The name of a reward; `{judge: NAME}` is `judge:NAME`."""


def judge_of(reward: str) -> str:
    """Return the name of the judge that gives a reward; empty for any other reward."""
    return reward.removeprefix(JUDGE) if reward.startswith(JUDGE) else ""


def rubric_file(rubric: str) -> Path | None:
    """Return the file that a rubric names: one line that ends as files of text do."""
    return Path(rubric) if rubric.endswith(RUBRIC_FILES) and "\n" not in rubric else None


def rubric_text(rubric: str, directory: Path) -> str:
    """Return the text of a rubric; that of its file, where it names one."""
    file = rubric_file(rubric)
    if file is None:
        return rubric
    text = read_text_file(directory / expanded(file)).strip()
    if not text or len(text) > LONGEST_RUBRIC or rubric_file(text):
        why = f"it has {len(text)} characters, and between 1 and {LONGEST_RUBRIC} are taken"
        raise InvalidConfig("the file holds no rubric", where=str(file), why=why)
    return text


def what_is_wrong(
    judge: str,
    rubric: str,
    scale: tuple[float, float] | None,
    verdicts: Mapping[str, float],
    pairs: bool,
) -> str:
    """Return what is wrong with what a term says to its judge; empty where nothing is."""
    if not re.fullmatch(GANG_NAME, judge):
        return "names no judge: names have lower-case letters, digits and _"
    if not rubric.strip():
        return "needs a rubric: what the judge looks at, as text or as a file"
    if sum(map(bool, (scale, verdicts, pairs))) != 1:
        return "needs one of scale, verdicts and pairs: what the judge may say"
    if scale and not scale[0] < scale[1]:
        return (
            f"has the scale {scale[0]:g} to {scale[1]:g}: the first number is the worst, the other the best"
        )
    if verdicts and len({name.casefold() for name in verdicts}) < max(2, len(verdicts)):
        return "needs two verdicts or more, which differ by more than case"
    return ""


class RewardModelChoice(ConfigModel):
    """A reward model of the stack, as a term of the reward."""

    model: GangName
    """Its name in `reward_models` of the stack."""
    label: int | None = Field(default=None, ge=0, le=1_000_000)
    """The label whose score counts, from 0; a model with one label needs none."""


def _kind_of_reward(reward: Any) -> str:
    is_judge = isinstance(reward, Mapping) and "judge" in reward
    return "function" if is_judge or isinstance(reward, str) else "choice"


Reward = Annotated[
    Annotated[RewardName, Tag("function")] | Annotated[RewardModelChoice, Tag("choice")],
    Discriminator(_kind_of_reward),
]

KEYS = {
    "function": ("parameters", "timeout_s", "on_unverifiable", "blames_response", "trusted"),
    "reward model": ("template", "too_long"),
    "judge": ("rubric", "scale", "verdicts", "pairs", "agreement"),
}
"""The keys of a term that those alone have who give it."""


class RewardTermConfig(ConfigModel):
    """Section `rewards` of `run.yaml`: the terms of a sample's reward.

    One term, whose value is recorded with each sample.
    """

    reward: Reward
    """Built-in name, entry point, or path.py:function; `{model: NAME}`, a reward model of the stack; or
    `{judge: NAME}`, one of its judges."""
    name: str = Field(default="", max_length=100, pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of its value in samples and messages; empty takes that of the function, the model or the judge."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this term; a term with 0 is only recorded."""
    gate_at: float | None = Field(default=None, ge=-1e12, le=1e12)
    """Least value of the term as a gate of `reward_mode: gated`: where it is below this, the reward is 0."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the reward function by keyword."""
    timeout_s: float = Field(default=10.0, gt=0, le=86_400)
    """Time limit of a function for one sample; beyond it the result is a timeout, never a score. A function of whole
    groups has this time for each of their samples."""
    on_unverifiable: Annotated[float, Field(ge=-1e6, le=1e6, strict=True)] | Literal["drop"] = 0.0
    """Value of a response that made its verifier fail; `drop` trains no such sample."""
    blames_response: bool = False
    """A response during which a function of yours passes its limit, or dies twice, has made it fail. Built-in rewards
    know that by themselves."""
    trusted: bool = False
    """Run this function outside of the jail of `reward.isolation`, as the reward service itself: with its files, its
    network and its variables. For code of yours that needs them; a built-in reward needs none."""
    template: str = ""
    """Text that a reward model reads, with the places {prompt} and {response}; empty renders its chat template."""
    too_long: Literal["error", "cut"] = "error"
    """Text that is longer than a reward model reads: the sample has no reward, or loses the beginning of the text."""
    rubric: str = Field(default="", max_length=LONGEST_RUBRIC)
    """What a judge looks at: text, or the name of a file that ends with .md or .txt."""
    scale: tuple[Bound, Bound] | None = None
    """Worst and best number of a judge, such as `[1, 10]`; the value is the place between them, from 0 to 1."""
    verdicts: dict[VerdictName, Bound] = Field(default={}, max_length=64)
    """Words of a judge with their values, such as `{yes: 1, no: 0}`, in place of a scale."""
    pairs: bool = False
    """A judge compares the response with the answer of the row, in both orders: 1 for the better one, 0 for the worse
    one, 0.5 for a tie. A judge that changes its mind with the order has said a tie."""
    agreement: AgreementConfig | None = None
    """Labelled examples that a judge has to agree with."""

    @property
    def shown(self) -> str:
        """The name of its value."""
        return self.name or (self.reward if isinstance(self.reward, str) else self.reward.model)

    @property
    def model(self) -> RewardModelChoice | None:
        """The reward model that gives the value; None where a function does."""
        return None if isinstance(self.reward, str) else self.reward

    @property
    def judge(self) -> str:
        """The name of the judge that gives the value; empty where none does."""
        return judge_of(self.reward) if isinstance(self.reward, str) else ""

    @property
    def kind(self) -> str:
        """The kind of who gives the value, as KEYS names it."""
        if self.model is not None:
            return "reward model"
        return "judge" if self.judge else "function"

    @model_validator(mode="after")
    def _has_the_keys_of_its_kind(self) -> Self:
        fields = type(self).model_fields
        for kind, keys in KEYS.items():
            for key in keys if kind != self.kind else ():
                if getattr(self, key) != fields[key].get_default(call_default_factory=True):
                    has = f", and judges.{self.judge} of the stack has its own" if self.judge else ""
                    raise ValueError(
                        f"{key} is for a {kind}, and reward names none{has * (key == 'timeout_s')}: leave it out"
                    )
        if self.judge and (
            why := what_is_wrong(self.judge, self.rubric, self.scale, self.verdicts, self.pairs)
        ):
            raise ValueError(f"reward {self.reward} {why}")
        if self.template and RESPONSE not in self.template:
            raise ValueError(
                f"template has no {RESPONSE}, so every sample would get the same score: write it in"
            )
        return self

    def with_paths_from(self, directory: Path) -> Self:
        known = super().with_paths_from(directory)
        if not isinstance(self.reward, str):
            return known
        places = {
            "reward": function_path(self.reward, directory),
            "rubric": rubric_text(self.rubric, directory),
        }
        return known.model_copy(update=places)


def can_combine(
    mode: RewardMode, terms: tuple[RewardTermConfig, ...], of: str = "", *, counts: bool = True
) -> None:
    """Raise ValueError where terms cannot make a reward by this mode; `of` says whose they are.

    Where their weighted sum does not count, no weight is needed for it.
    """
    gates = [term.shown for term in terms if term.gate_at is not None]
    problem = ""
    if mode != "gated" and gates:
        problem = f"reward {gates[0]} has a gate_at, which belongs to gated: leave one of them out"
    elif mode != "weighted" and not terms:
        problem = "there are no rewards beside it: leave it out, or name some"
    elif mode == "gated" and not gates:
        problem = "no reward is a gate: give one gate_at, the value that it has to have"
    elif terms and (counts or mode != "weighted") and not any(term.weight for term in terms):
        problem = "every weight is 0: rewards with a weight alone count"
    if problem:
        raise ValueError(f"reward_mode{of} is {mode}, and {problem}")
