"""Stacks as `flotilla up --on kubernetes` hands them to Helm, in the environment of the services.

    .venv/bin/python tests/helm/plan.py

writes their values to `launched/`. `chart.py` renders these with Helm's own engine, and writes beside them the pods and
the stack file of each. So `make test` compares the plan of the launcher with what Helm made, without Helm.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from flotilla_core.config import StackConfig, load_text
from flotilla_launch.kubernetes.table import Release, rows_of
from flotilla_launch.kubernetes.values import Words, check, given_values, values_of

LAUNCHED = Path(__file__).resolve().parent / "launched"
WORDS = Words(f"-----BEGIN CERTIFICATE-----\n{'cr3dential' * 7}\n", "n4ts" * 8, "c0ord" * 7, "r0ute" * 7)
STACK = "name: chat\nmodel: lab/chat-1b\nkubernetes: {namespace: rl}\n"
GANGS = (
    "trainer: {replicas: 2, nproc: 4, environment: {NCCL_DEBUG: INFO}}\n"
    "teachers: {code_small: {replicas: 1, environment: {NCCL_DEBUG: INFO}}}\n"
    "generator: {replicas: 3, tensor_parallel_size: 2}\nready_timeout_s: 900\n"
)
TLS = "tls: {certManager: {enabled: true, issuer: {name: ca}}}\n"
GPUS = "gpu: {enabled: true}\nimage: {registry: registry.example/lab}\n"
CASES: dict[str, tuple[str, str]] = {
    "plain": (STACK, ""),
    "gpus": (STACK + GANGS, GPUS + "nats: {replicas: 1}\n"),
    "secure": (STACK + GANGS, TLS),
    "jobset": (STACK + GANGS, GPUS + TLS + "trainer: {kind: jobset}\n"),
    "scaled": (STACK + GANGS, "generator: {autoscaling: {kind: hpa, minReplicas: 2}}\n"),
    "shared": (
        STACK
        + "nats: {url: 'nats://nats.shared:4222', credentials_file: /etc/flotilla/secrets/nats-credentials}\n",
        "nats: {enabled: false}\nauth: {existingSecret: mine}\n",
    ),
}
"""The stack file and the user's file of values of each case."""


def stack_of(case: str, folder: Path) -> StackConfig:
    """Return the stack of a case, with its file of values in this folder."""
    text, mine = CASES[case]
    stack = load_text(StackConfig, text)
    (folder / "mine.yaml").write_text(mine or "{}\n", encoding="utf-8")
    section = stack.kubernetes.model_copy(update={"values": (folder / "mine.yaml",)})
    return stack.model_copy(update={"kubernetes": section})


def values_text(case: str, folder: Path) -> str:
    """Return the file of values that the launcher writes for Helm."""
    stack = stack_of(case, folder)
    check(stack)
    return yaml.safe_dump(values_of(stack, given_values(stack), WORDS), sort_keys=True)


def planned_pods(case: str, folder: Path) -> dict[str, dict[str, object]]:
    """Return the plan of the launcher in the form in which `chart.py` describes what Helm rendered."""
    stack = stack_of(case, folder)
    found: dict[str, dict[str, object]] = {}
    for row in rows_of(stack, Release.of(stack, values_of(stack, given_values(stack), WORDS))):
        entry = {
            "command": [word for word in row.command if word != "nats-server"],
            "gpus": len(row.resources.gpus),
            "port": row.resources.ports[0],
            "variables": dict(sorted(row.environment.items())),
        }
        known = found.setdefault(row.node, {**entry, "replicas": 0})
        assert {**known, "replicas": 0} == {**entry, "replicas": 0}, "pods of one workload are alike"
        known["replicas"] = int(str(known["replicas"])) + 1
    return found


def main() -> None:
    """Write the values of all cases."""
    LAUNCHED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            (LAUNCHED / f"{case}.values.yaml").write_text(values_text(case, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
