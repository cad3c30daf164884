"""Runs and plans as the `run` commands print them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla.coordinator.v1.run_pb2 import Plan, Run


def run_json(run: Run) -> dict[str, Any]:
    """A run in the output of all `run` commands."""
    from flotilla_coordinator.cli.output import state_name, version_text

    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": state_name(run),
        "phase": run.phase,
        "step": run.step,
        "total_steps": run.total_steps,
        "policy_version": version_text(run.policy_version) if run.HasField("policy_version") else None,
        "created_at": run.created_at.ToJsonString() if run.HasField("created_at") else None,
        "ended_at": run.ended_at.ToJsonString() if run.HasField("ended_at") else None,
        "reason": run.reason,
        "advice": run.advice,
        "directory": run.directory,
        "metrics": dict(run.metrics),
    }


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Lines as a table, then what speaks against the run."""
    from flotilla_coordinator.cli.output import print_json, print_table, say

    if as_json:
        lines = [{"name": n.name, "value": n.value, "explanation": n.explanation} for n in plan.lines]
        print_json({"lines": lines, "warnings": list(plan.warnings), "errors": list(plan.errors)})
        return
    if plan.lines:
        print_table(("WHAT", "VALUE", "HOW"), [(n.name, n.value, n.explanation) for n in plan.lines])
    for warning in plan.warnings:
        say(f"warning: {warning}")
    for error in plan.errors:
        say(f"error: {error}")
