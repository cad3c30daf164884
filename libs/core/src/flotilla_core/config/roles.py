"""The models in addition to the policy: the teachers that a run learns from, and the critic.

A run says for each teacher which samples it scores, and how many tokens of each position it reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from flotilla_core.config.model import ConfigModel
from flotilla_core.config.training import OptimizerConfig
from flotilla_core.roles import MOST_TEACHERS, TEACHER, TEACHER_NAME, teacher_role

TeacherName = Annotated[str, StringConstraints(pattern=TEACHER_NAME)]
"""Lower-case letters, digits and `_`, starting with a letter."""
TOP_BYTES = 4 + 4
"""Size of one token of a teacher at one position: its id and its log-probability."""
MOST_SAMPLE_BYTES = 48 << 20
"""Limit on all scores of a teacher for one sample, which travel in one message."""


class AskedTeachers(ConfigModel):
    """The keys of a section that needs teachers."""

    asked_by: ClassVar[str] = "advantage"
    """The section that names the teachers, for messages."""

    teachers: dict[TeacherName, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default={}, max_length=MOST_TEACHERS
    )
    """Weights by the names in the stack's `teachers`; every sample is compared with the weighted mean of their
    log-probabilities. Empty: the stack's `teacher` alone."""
    teacher_field: str | None = None
    """Column of the data that names which of `teachers` scores the samples of a prompt; empty: all score all."""

    @property
    def teacher_shares(self) -> dict[str, float]:
        """The weights by role, scaled to the sum 1."""
        total = sum(self.teachers.values())
        return {teacher_role(name): weight / total for name, weight in self.teachers.items()} or {
            TEACHER: 1.0
        }

    @property
    def averages_teachers(self) -> bool:
        """Return whether each sample is scored by several teachers."""
        return self.teacher_field is None and len(self.teachers) > 1

    @model_validator(mode="after")
    def _chooses_among_equals(self) -> Self:
        field, teachers = f"{self.asked_by}.teacher_field", f"{self.asked_by}.teachers"
        if self.teacher_field is None:
            return self
        if len(self.teachers) < 2:
            raise ValueError(
                f"{field} chooses among {teachers}, which names {len(self.teachers) or 'none'}: name two or more "
                "there, or leave it out"
            )
        if len(set(self.teachers.values())) > 1:
            raise ValueError(
                f"{field} gives each prompt one teacher, and the weights of {teachers} differ, which would change "
                "nothing: write the same weight for each, or leave it out"
            )
        return self


class TeacherConfig(AskedTeachers):
    """The divergence from a teacher over the tokens that it finds likeliest, as a term of the loss."""

    asked_by: ClassVar[str] = "teacher"

    top_k: int = Field(default=64, ge=1, le=1024)
    """Tokens of the teacher at each position; a smaller vocabulary is reported whole."""
    divergence: Literal["forward", "reverse"] = "forward"
    """With q the teacher and p the policy: the sum of q (log q - log p), or of p (log p - log q)."""
    coefficient: float = Field(default=1.0, gt=0, le=1000)
    """Factor of the divergence."""
    tail: bool = True
    """Count all other tokens together as one more, so that the sum is a divergence and never negative."""

    @property
    def bytes_per_token(self) -> int:
        """The size of a teacher's scores for one response token."""
        return self.top_k * TOP_BYTES


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, separate from the policy's."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate; a critic usually learns faster than its policy."""


class CriticConfig(ConfigModel):
    """A model that learns the expected reward, which advantages are measured against."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """A value that moves further than this from the one that the advantages used gains nothing by it; empty is off."""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """Number of first steps in which only the critic learns."""
    initial_weights: Path | None = None
    """Folder with a model of the critic's shape, with or without a value head; empty: critic.model of the stack or, if
    that is empty too, the weights that the policy starts from."""
