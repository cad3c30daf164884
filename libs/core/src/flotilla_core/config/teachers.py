"""Which teachers of the stack a run learns from, and who of them is asked about which sample."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator

from flotilla_core.config.model import ConfigModel
from flotilla_core.roles import MOST_TEACHERS, TEACHER, TEACHER_NAME, teacher_role

TeacherName = Annotated[str, StringConstraints(pattern=TEACHER_NAME)]
"""Lower-case letters, digits and `_`, a letter first."""


class AskedTeachers(ConfigModel):
    """The keys of a section that needs teachers."""

    asked_by: ClassVar[str] = "advantage"
    """The section, for messages."""

    teachers: dict[TeacherName, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default={}, max_length=MOST_TEACHERS
    )
    """Weights by names of the stack's `teachers`; every sample is compared with the weighted mean of their
    log-probabilities. Empty: the stack's `teacher` alone."""
    teacher_field: str | None = None
    """Column of the data that names the one of `teachers` that scores the samples of a prompt; empty: all score all."""

    @property
    def teacher_shares(self) -> dict[str, float]:
        """The weights with the sum 1, by role."""
        total = sum(self.teachers.values())
        return {teacher_role(name): weight / total for name, weight in self.teachers.items()} or {
            TEACHER: 1.0
        }

    @property
    def averages_teachers(self) -> bool:
        """Whether each sample is scored by several teachers."""
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
