"""One line of `flotilla doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was checked, what was found, what to do about it (empty when it passed)."""

    check: str
    status: Literal["passed", "warning", "failed"]
    finding: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def passed(check: str, finding: str) -> Finding:
    """All is well."""
    return Finding(check, "passed", finding)


def warning(check: str, finding: str, remedy: str) -> Finding:
    """It works, but not as well as it could, or not for every use."""
    return Finding(check, "warning", finding, remedy)


def failed(check: str, finding: str, remedy: str) -> Finding:
    """A stack would not work."""
    return Finding(check, "failed", finding, remedy)
