"""Gives all that a user should know one shape: an error, or something that was noticed without one.

Invariant: a finding keeps its parts wherever it goes, and is one text, `text_of`, which a terminal may show as it is.
"""

from __future__ import annotations

from flotilla.common.v1.finding_pb2 import SEVERITY_INFO, SEVERITY_WARNING, Finding
from flotilla_core.terminal import visible


def info(what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(severity=SEVERITY_INFO, what=what)


def warning(what: str) -> Finding:
    """Return a finding that asks for a look."""
    return Finding(severity=SEVERITY_WARNING, what=what)


def text_of(finding: Finding) -> str:
    """Return all of it as one text."""
    message = finding.what
    if finding.where:
        message += f" ({finding.where})"
    if finding.why:
        message += f": {finding.why}"
    if finding.next_step:
        separator = "" if message.endswith((".", "\n")) else "."
        message += f"{separator} {finding.next_step}"
    return visible(message)


def parts_of(finding: Finding) -> dict[str, str | int]:
    """Return its parts for JSON; `Finding(**parts)` is the same finding."""
    return {field.name: value for field, value in finding.ListFields()}
