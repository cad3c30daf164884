"""Gives all that a user should know one shape: an error, or something that was noticed without one.

Invariant: a finding keeps its parts wherever it goes, and is one text, `text_of`, which a terminal may show as it is.
"""

from __future__ import annotations

from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, SEVERITY_INFO, SEVERITY_WARNING, Finding
from flotilla_core.terminal import visible


def info(what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(severity=SEVERITY_INFO, what=what)


def warning(what: str) -> Finding:
    """Return a finding that asks for a look."""
    return Finding(severity=SEVERITY_WARNING, what=what)


def passed(check: str, what: str) -> Finding:
    """Return the finding of a check that all is well."""
    return Finding(severity=SEVERITY_INFO, code=check, what=what)


def warned(check: str, what: str, next_step: str) -> Finding:
    """Return the finding of a check that something works, but not well enough for every use."""
    return Finding(severity=SEVERITY_WARNING, code=check, what=what, next_step=next_step)


def failed(check: str, what: str, next_step: str) -> Finding:
    """Return the finding of a check with which a service or a stack would not work."""
    return Finding(severity=SEVERITY_ERROR, code=check, what=what, next_step=next_step)


def text_of(finding: Finding) -> str:
    """Return all of it as one text."""
    message = found_of(finding)
    if finding.next_step:
        separator = "" if message.endswith((".", "\n")) else "."
        message += f"{separator} {finding.next_step}"
    return visible(message)


def found_of(finding: Finding) -> str:
    """Return as one text what, where and why, without what to do about it."""
    message = finding.what
    if finding.where:
        message += f" ({finding.where})"
    if finding.why:
        message += f": {finding.why}"
    return visible(message)


def parts_of(finding: Finding) -> dict[str, str | int]:
    """Return its parts for JSON; `Finding(**parts)` is the same finding."""
    return {field.name: value for field, value in finding.ListFields()}
