"""What `flotilla doctor` says of the compiler of a gang.

Invariant: a gang that was not to compile is not mentioned; one that should and could not trains, so it is no failure.
"""

from __future__ import annotations

from typing import Any

from flotilla.common.v1 import operate_pb2

INSTALL_COMPILER = "Install a C++ compiler (g++) and Python's headers, or set compile to off for this gang."


def compiler_check(facts: dict[str, Any]) -> list[operate_pb2.CheckResult]:
    """One finding or none, from what the ranks said about the model."""
    if refusal := facts["compile_refusal"]:
        return [
            operate_pb2.CheckResult(
                name="compiler",
                status=operate_pb2.CHECK_STATUS_WARNING,
                finding=f"layers are not compiled: {refusal}",
                remedy=INSTALL_COMPILER,
            )
        ]
    if not facts["compile_s"]:
        return []
    return [
        operate_pb2.CheckResult(
            name="compiler",
            status=operate_pb2.CHECK_STATUS_PASSED,
            finding=f"layers compiled in {facts['compile_s']:.0f} s",
        )
    ]
