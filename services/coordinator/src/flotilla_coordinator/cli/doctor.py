"""Implements `flotilla doctor`, which checks this machine, the stack file and the running services."""

from __future__ import annotations

import typer

from flotilla_coordinator.cli.options import Json, Stack

_SIGNS = {"passed": "ok  ", "warning": "warn", "failed": "FAIL"}


def doctor(stack: Stack = None, as_json: Json = False) -> None:
    """Check everything a stack needs; each line says what was found and what to do about it."""
    from flotilla_coordinator.cli.machine_checks import machine_checks
    from flotilla_coordinator.cli.options import PREFLIGHT, wait
    from flotilla_coordinator.cli.output import print_json, print_line
    from flotilla_coordinator.cli.stack_checks import service_checks, stack_checks

    findings = machine_checks()
    config, of_stack = stack_checks(stack)
    findings += of_stack
    if config is not None:
        findings += wait(service_checks(config))
    failed = sum(finding.status == "failed" for finding in findings)
    if as_json:
        print_json({"ok": failed == 0, "checks": [finding.as_dict() for finding in findings]})
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            print_line(f"{_SIGNS[finding.status]}  {finding.check:{width}}  {finding.finding}")
            if finding.remedy:
                print_line(f"      {'':{width}}  -> {finding.remedy}")
        print_line(f"{len(findings)} checks, {failed} failed")
    if failed:
        raise typer.Exit(PREFLIGHT)
