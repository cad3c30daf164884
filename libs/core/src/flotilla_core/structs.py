"""Structs of the wire as Python values."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import json_format, struct_pb2

LARGEST_INTEGER = 2**53
MOST_LEVELS = 20
"""The decoder of the wire follows a hundred nested messages, and a level of a Struct is three."""


def to_json(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return a Struct as a dict. Its numbers are all floats on the wire: whole ones become integers again."""
    if not struct.fields:
        return {}
    whole: dict[str, Any] = _integers(json_format.MessageToDict(struct))
    return whole


def _integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def unfit(value: Any, name: str, levels: int = MOST_LEVELS) -> str:
    """Return the reason why a Struct cannot carry a value as it is; empty if it can."""
    if not isinstance(value, dict | list | tuple):
        return _unfit_scalar(value, name)
    if levels == 0:
        return f"{name} is nested in more than {MOST_LEVELS} levels, the limit of the wire"
    if not isinstance(value, dict):
        inside = ((item, f"{name}[{index}]") for index, item in enumerate(value))
    elif all(isinstance(key, str) for key in value):
        inside = ((item, f"{name}.{key}") for key, item in value.items())
    else:
        return f"{name} has a key that is no text"
    return next((problem for item, place in inside if (problem := unfit(item, place, levels - 1))), "")


def _unfit_scalar(value: Any, name: str) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"{name} is beyond 2^53, where numbers of the wire have gaps: write it as text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value}, not a finite number"
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    return f"{name} is a {type(value).__name__}: write text, a number, a truth value, a list or a mapping"
