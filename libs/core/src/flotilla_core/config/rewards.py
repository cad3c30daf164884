"""The rewards of a run: its terms, by whom each is given, and how they make one number; and its environment.

Invariants: a term has one name, in the configuration, on the wire and in what is recorded. It has the keys of who gives
it, and of nobody else: a function, a reward model, or a judge. What an episode may take is bounded by the run,
whatever its environment asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from flotilla_core.config.judges import (
    LONGEST_RUBRIC,
    AgreementConfig,
    Bound,
    RewardName,
    VerdictName,
    judge_of,
    rubric_text,
    what_is_wrong,
)
from flotilla_core.config.model import ConfigModel, GangName, Parameters, function_path, possible_function

LARGEST_REWARD = 1e38
"""Largest absolute value: sums and squares of such rewards stay finite. The trainer's contract has the same bound."""
PROMPT, RESPONSE = "{prompt}", "{response}"
"""The places in the template of a reward model."""

RewardMode = Literal["weighted", "gated", "min", "max", "product", "first"]


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


class EnvironmentConfig(ConfigModel):
    """The environment that answers the policy; each sample is an episode of several turns."""

    name: Annotated[str, AfterValidator(possible_function)] = Field(min_length=1)
    """Built-in name, entry point, or path.py:Class."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the environment by keyword."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Limit of the turns of an episode; then the environment gives its rewards for what there is. A turn has at most
    `rollout.sampling.max_response_tokens`."""
    episode_tokens: int = Field(default=4096, ge=2, le=10_000_000)
    """Limit of the tokens of one history: prompt, turns, and what the environment says between them. Where no room is
    left, the environment gives its rewards for what there is."""
    episode_timeout_s: float = Field(default=600.0, gt=0, le=604_800)
    """Time limit of an episode; one that takes longer has no reward and is not trained."""
    call_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time limit of one answer of the environment; one that takes longer has failed."""
    trusted: bool = False
    """Run an environment of yours outside of the jail, as the environment service itself: with its files, its network
    and its variables."""

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"name": function_path(self.name, directory)})
