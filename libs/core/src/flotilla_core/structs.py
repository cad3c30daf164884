"""Structs of the wire as Python values."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, struct_pb2


def to_json(struct: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as a dict. Its numbers are all floats on the wire: whole ones become integers again."""
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
