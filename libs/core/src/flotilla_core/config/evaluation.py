"""Sections `evaluation` and `stop` of `run.yaml`: what is held out, and what it may end."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class EvaluationConfig(ConfigModel):
    """Evaluation on held-out prompts or pairs; before, during and after."""

    data: Path
    """JSONL file with the same columns as the training data."""
    every_steps: int = Field(default=0, ge=0, le=10_000_000)
    """0: only before and after."""
    max_prompts: int = Field(default=500, ge=1, le=100_000)
    """Prompts taken from the file."""
    max_response_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Empty takes the rollout's limit."""
    samples_per_prompt: int = Field(default=1, ge=1, le=10_000)
    """Answers drawn for each prompt; above 1 `eval/mean@n` and `eval/pass@k` are measured as well."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """0 is greedy, of which more than one answer would all be equal."""
    pinned: bool = False
    """Evaluate beside the training that follows: of two generators or more one keeps the version until it is done."""

    @model_validator(mode="after")
    def _answers_differ(self) -> EvaluationConfig:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but greedy answers to one prompt are all equal: "
                "set temperature above 0 (1.0 is that of the rollouts), or samples_per_prompt to 1"
            )
        return self


class StopConfig(ConfigModel):
    """End early on an evaluation."""

    accuracy_at_least: float = Field(ge=0, le=1)
    """Stop at the first evaluation that reaches it."""
    accuracy_at_most: float | None = Field(default=None, ge=0, le=1)
    """The run fails when the evaluation that stopped it is above."""
