"""The table of a stack on Kubernetes: which workload of the chart makes the pods of which services.

Invariants: pure functions of the stack and of the merged values, so a plan needs no Helm and no cluster. A row is a
pod, and its command is what the chart renders (`tests/helm` compares the two). A Deployment names its pods itself:
their rows are numbered, and the services have the names of their pods.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import StackConfig
from flotilla_core.config.model import Environment
from flotilla_core.gangs import gang_of, roles_of
from flotilla_core.kinds import KINDS, Kind, kind_name
from flotilla_core.roles import process_name
from flotilla_launch.kubernetes.values import Values, chart_values, full_name, in_pods, merged
from flotilla_launch.placement import Slot, replica
from flotilla_launch.table import NATS, Resources, Row

NATS_PORT = 4222
_STACK_FILE = "/etc/flotilla/config/stack.yaml"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGT", start=1)
}
_MIB = 1 << 20


@dataclass(frozen=True)
class Release:
    """A release of the chart, as the table and the launcher name its objects."""

    name: str
    namespace: str
    values: Mapping[str, Any]
    """The values of the chart, with those of the stack on top."""

    @classmethod
    def of(cls, stack: StackConfig, values: Values) -> Release:
        """Return the release of a stack with these values."""
        return cls(stack.name, stack.kubernetes.namespace, merged(chart_values(), values))

    @property
    def full_name(self) -> str:
        return full_name(self.name)

    @property
    def coordinator_pod(self) -> str:
        return f"{self.full_name}-coordinator-0"

    @property
    def nats_url(self) -> str:
        own = f"nats://{self.full_name}-nats.{self.namespace}.svc:{NATS_PORT}"
        return own if self.values["nats"]["enabled"] else self.values["stack"]["nats"]["url"]

    def workload(self, kind: ServiceKind.ValueType) -> str:
        """Return the workload of a kind with replicas, as kubectl takes it."""
        return f"deployment/{self.full_name}-{kind_name(kind)}"

    @property
    def scaled_by(self) -> str:
        """Return what scales the generators, beside this launcher: hpa, keda, or nothing."""
        kind = str(self.values["generator"]["autoscaling"]["kind"])
        return "" if kind == "none" else kind


def rows_of(stack: StackConfig, release: Release) -> list[Row]:
    """Return a row for each pod, NATS first; where something else scales generators, for the least number of them."""
    stack = in_pods(stack)
    values = release.values
    rows = [
        _nats(index, release)
        for index in range(values["nats"]["replicas"] if values["nats"]["enabled"] else 0)
    ]
    for kind in KINDS:
        if kind.is_gang:
            rows += _gangs(stack, release) if kind.section else ()
        elif kind.scales:
            rows += _replicas(stack, release, kind)
        else:
            workload = f"statefulset/{release.full_name}-{kind.name}"
            environment = getattr(stack, kind.section).environment
            rows.append(
                _row(stack, release, Slot(kind.name, kind.number), workload, kind.name, 0, environment)
            )
    return rows


def _replicas(stack: StackConfig, release: Release, kind: Kind) -> Iterator[Row]:
    """Give the replicas of a kind; of generators that something else scales, the least number of them."""
    section = getattr(stack, kind.section)
    is_generator = kind.number == ServiceKind.SERVICE_KIND_GENERATOR
    gpus = stack.generator.tensor_parallel_size if is_generator else 0
    scaled = is_generator and release.scaled_by
    count = release.values["generator"]["autoscaling"]["minReplicas"] if scaled else section.replicas
    for index in range(count):
        slot, workload = replica(kind.number, index), release.workload(kind.number)
        yield _row(stack, release, slot, workload, "$(POD_NAME)", gpus, section.environment)


def _gangs(stack: StackConfig, release: Release) -> Iterator[Row]:
    """Give the gangs of all roles; with JobSet each is a workload of its own, and has its number in the name."""
    jobset = release.values["trainer"]["kind"] == "jobset"
    for role in roles_of(stack):
        gang, process = gang_of(stack, role), process_name(role)
        safe = process.replace("_", "-")
        for index in range(gang.replicas):
            workload = (
                f"jobset/{release.full_name}-{safe}-{index}"
                if jobset
                else f"statefulset/{release.full_name}-{safe}"
            )
            told = f"{process}-{index if jobset else '$(POD_INDEX)'}"
            slot = Slot(f"{process}-{index}", ServiceKind.SERVICE_KIND_TRAINER, index=index)
            yield _row(stack, release, slot, workload, told, gang.nproc, gang.environment)


def _row(
    stack: StackConfig,
    release: Release,
    slot: Slot,
    workload: str,
    told: str,
    gpus: int,
    environment: Environment,
) -> Row:
    component = kind_name(slot.kind)
    section = {**release.values["otherServices"], **release.values.get(component, {})}
    has_gpus = gpus if release.values["gpu"]["enabled"] else 0
    port = stack.bind.port
    spans = "127.0.0.1" if component == "coordinator" else _service(release, "coordinator")
    command = (
        f"flotilla-{component}",
        f"--name={told}",
        f"--stack={_STACK_FILE}",
        f"--advertise-host={_service(release, component) if component == 'coordinator' else '$(POD_IP)'}",
        f"--otlp=https://{spans}:{port}",
        f"--drain-grace={section['drainSeconds']}",
    )
    return Row(workload, slot, command, environment, _resources(section, slot.name, has_gpus, port))


def _service(release: Release, component: str) -> str:
    return f"{release.full_name}-{component}.{release.namespace}.svc"


def _nats(index: int, release: Release) -> Row:
    slot = Slot(f"{NATS}-{index}", ServiceKind.SERVICE_KIND_UNSPECIFIED, index=index)
    resources = _resources(release.values["nats"], slot.name, 0, NATS_PORT)
    command = ("nats-server", "--config", "/etc/nats/nats.conf")
    return Row(f"statefulset/{release.full_name}-nats", slot, command, {}, resources)


def _resources(section: Mapping[str, Any], name: str, gpus: int, port: int) -> Resources:
    """Return what a pod asks for, CPUs rounded up."""
    requests = (section.get("resources") or {}).get("requests") or {}
    cpus, memory = _amount(requests.get("cpu")), _amount(requests.get("memory"))
    return Resources(
        cpus=math.ceil(cpus) if cpus else None,
        gpus=tuple(f"{name}:{index}" for index in range(gpus)),
        memory_mib=int(memory) // _MIB if memory else None,
        ports=(port,),
    )


def _amount(quantity: object) -> float | None:
    """Return a quantity of Kubernetes as a number; None for none, and for one that only Kubernetes understands."""
    found = re.fullmatch(r"([0-9.]+)(m|[kMGT]|[KMGT]i)?", str(quantity))
    if found is None:
        return None
    return float(found[1]) * (0.001 if found[2] == "m" else _UNITS[found[2] or ""])
