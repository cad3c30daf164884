"""`judges` in `stack.yaml`: language models that score samples, and what the terms of a run say to them.

Invariants: no configuration holds the key of a server, only its place, and no message shows what is written there. A
term of a judge is named `judge:NAME` wherever a reward has a name. The text of its rubric is part of the configuration,
so a run keeps the rubric that it began with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

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
from flotilla_core.config.generators import EngineConfig
from flotilla_core.config.model import ConfigModel, ModelName, Parameters, expanded, possible_function
from flotilla_core.errors import InvalidConfig
from flotilla_core.roles import GANG_NAME

JUDGE = "judge:"
"""Begins the name of a reward that a judge gives."""
LONGEST_RUBRIC = 65_536
MOST_JUDGES = 64
RUBRIC_FILES = (".md", ".txt")
RESERVED = ("model", "messages", "response_format", "stream", "n")
"""Fields of a request that Flotilla sets."""

_KEY_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,127}")
_URL = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+(/[A-Za-z0-9._~/\-]*)?")

JudgeName = Annotated[str, StringConstraints(pattern=GANG_NAME)]
"""Lower-case letters, digits and `_`, starting with a letter."""
VerdictName = Annotated[str, StringConstraints(pattern=r"^[\w][\w .+-]{0,63}$")]
Bound = Annotated[float, Field(ge=-1e6, le=1e6)]


def _key_variable(name: str) -> str:
    if not _KEY_VARIABLE.fullmatch(name):
        # Not shown: it may be the key itself, in the wrong place.
        raise ValueError("expected the name of a variable, in capitals")
    return name


def _without_secrets(url: str) -> str:
    if not _URL.fullmatch(url):
        # Not shown: a login or a key may be in it.
        raise ValueError("expected an address such as https://host/v1, without login and query")
    return url.rstrip("/")


def _free_fields(fields: dict[str, Any]) -> dict[str, Any]:
    if taken := [name for name in RESERVED if name in fields]:
        raise ValueError(f"{taken[0]} is set by Flotilla: leave it out")
    return fields


class JudgeConfig(ConfigModel):
    """One judge: a model behind an endpoint that takes OpenAI's chat completions."""

    url: Annotated[str, AfterValidator(_without_secrets)]
    """Address before `/chat/completions`, such as https://api.example.com/v1."""
    model: str = Field(min_length=1, max_length=256)
    """Name of the model there."""
    api_key_env: Annotated[str, AfterValidator(_key_variable)] | None = None
    """Variable of the reward service that holds the key of the endpoint."""
    api_key_file: Path | None = None
    """File with the key, for its owner alone (mode 0600), on the hosts of the reward replicas."""
    concurrency: int = Field(default=16, ge=1, le=4096)
    """Requests that one reward replica has under way at the same time; those of one `url` share the smallest."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Limit of one request."""
    retries: int = Field(default=4, ge=0, le=20)
    """Repetitions of a request that was refused for load (429), failed in the server (5xx) or found no connection."""
    request: Annotated[Parameters, AfterValidator(_free_fields)] = Field(
        default={"temperature": 0, "max_tokens": 1024}, max_length=64
    )
    """Further fields of each request. Models that take others need their own, such as `max_completion_tokens`."""

    @model_validator(mode="after")
    def _has_one_key(self) -> JudgeConfig:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("name one of api_key_env and api_key_file")
        return self


class FleetJudgeConfig(EngineConfig):
    """A judge that the fleet holds: a model on generators of its own, which no run trains or leases."""

    model: ModelName
    """Hugging Face folder (or hub name) of a chat model, with its own tokenizer and chat template."""
    concurrency: int = Field(default=64, ge=1, le=4096)
    """Requests that one reward replica has under way at the same time."""
    timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """Limit of one request, with its wait for a place in the engine."""
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """Longest answer of the judge."""


def _kind_of_judge(judge: Any) -> str:
    by_url = "url" in judge if isinstance(judge, Mapping) else isinstance(judge, JudgeConfig)
    return "endpoint" if by_url else "fleet"


Judge = Annotated[
    Annotated[JudgeConfig, Tag("endpoint")] | Annotated[FleetJudgeConfig, Tag("fleet")],
    Discriminator(_kind_of_judge),
]
"""A judge behind an endpoint where it has a `url`, else one that the fleet holds."""


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
