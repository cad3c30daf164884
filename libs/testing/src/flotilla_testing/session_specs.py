"""Sections of a session's specification as a client would send them, without a check."""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2

from flotilla.trainer.v1 import session_pb2


def as_struct(section: dict[str, Any]) -> struct_pb2.Struct:
    """The section on the wire."""
    struct = struct_pb2.Struct()
    struct.update(section)
    return struct


def wire_objective(
    kind: str, section: dict[str, Any], *, temperature: float = 1.0, max_response_tokens: int = 24
) -> session_pb2.Objective:
    """An objective of this kind, of rollouts that were sampled so."""
    return session_pb2.Objective(
        kind=kind,
        section=as_struct(section),
        temperature=temperature,
        max_response_tokens=max_response_tokens,
    )


def called(name: str, **parameters: Any) -> session_pb2.Function:
    """The loss of a call."""
    return session_pb2.Function(name=name, parameters=as_struct(parameters))


def gang_facts(*, max_sequence_tokens: int = 12) -> dict[str, Any]:
    """Return what a gang of a tiny model on CPUs says of it when it is ready."""
    return {
        "packing_refusal": "",
        "device": "cpu",
        "attention_crossover_tokens": 1,
        "vocabulary": 16,
        "max_sequence_tokens": max_sequence_tokens,
        "parameters": 1,
    }
