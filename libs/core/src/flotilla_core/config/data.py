"""`data`: where the prompts of a run come from, and in which order they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from flotilla_core.config.model import ConfigModel


class TrainingSet(ConfigModel):
    """One of several files of prompts."""

    path: Path
    """JSONL file with one object a line."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Its share of the draws is this over the sum of all weights, however long the file is."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Names its metrics; empty takes the name of the file without its ending."""


def _form(train: Any) -> str | None:
    return "one" if isinstance(train, str | Path) else "several" if isinstance(train, list | tuple) else None


TrainingData = Annotated[
    Annotated[Path, Tag("one")] | Annotated[tuple[TrainingSet, ...], Field(max_length=1000), Tag("several")],
    Discriminator(
        _form,
        custom_error_type="training_data",
        custom_error_message="a path, or a list of mappings with path, weight and name",
    ),
]


class DataConfig(ConfigModel):
    """Prompts to train on."""

    train: TrainingData
    """JSONL file with one object a line, or a list of several, each with `path`, `weight` and `name`."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Column with the right answer; may be absent where no reward needs it."""
    chosen_field: str = "chosen"
    """Column with the preferred answer of a pair (`dpo`, `reward_model`): text, or chat messages that end with it."""
    rejected_field: str = "rejected"
    """Column with the other answer of a pair, in the same form."""
    apply_chat_template: bool = False
    """Render the prompt by the tokenizer's chat template (always done for lists of messages)."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """Longer prompts are handled by `overlong_prompts`."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer prompts; drops and truncations are counted."""
    order: Literal["shuffled", "as_written", "by_field"] = "shuffled"
    """A new order every epoch, derived from the run's seed; that of the file; or ascending by `difficulty_field`."""
    difficulty_field: str = ""
    """Column with the number that `order: by_field` goes by, the same in every epoch; equal ones as in the file."""
    rest_epochs: int = Field(default=0, ge=0, le=1023)
    """Most epochs that a prompt rests after it was solved: 1, after the second time in a row 3, then 7, 15, and so on.
    0 draws every prompt in every epoch."""

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
