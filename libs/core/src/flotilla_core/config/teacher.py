"""`algorithm.teacher`: learn from the tokens that a teacher finds likeliest, and not from the sampled one alone."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flotilla_core.config.teachers import AskedTeachers

TOP_BYTES = 4 + 4
"""Of one token of a teacher at one position: its id and its log-probability."""
MOST_SAMPLE_BYTES = 48 << 20
"""Of all that a teacher says of one sample, which travels in one message."""


class TeacherConfig(AskedTeachers):
    """The divergence from a teacher over the tokens that it finds likeliest, as a term of the loss."""

    asked_by: ClassVar[str] = "teacher"

    top_k: int = Field(default=64, ge=1, le=1024)
    """Tokens of the teacher at each position; what has a smaller vocabulary gives all of it."""
    divergence: Literal["forward", "reverse"] = "forward"
    """With q the teacher and p the policy: the sum of q (log q - log p), or of p (log p - log q)."""
    coefficient: float = Field(default=1.0, gt=0, le=1000)
    """Factor of the divergence."""
    tail: bool = True
    """All other tokens together count as one more, so that the sum is a divergence and never negative."""

    @property
    def bytes_per_token(self) -> int:
        """What a token of a response comes with."""
        return self.top_k * TOP_BYTES
