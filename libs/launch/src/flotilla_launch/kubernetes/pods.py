"""Reads what `kubectl get --output json` says of a release, as the list of a launcher.

Invariants: pure functions of the objects; a service has the name that it is told in its arguments, by which the
coordinator knows it too; every pod that is not READY says why, in the words of Kubernetes; a pod of the table that is
not there is in the list as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.kinds import KINDS, SCALABLE
from flotilla_launch.kubernetes.table import Release
from flotilla_launch.placed_stack import Trouble
from flotilla_launch.table import NATS, Row

Object = Mapping[str, Any]

PATIENCE_S = 30.0
"""An image that cannot be pulled once may be there the next time."""

_READY = pb.ProcessState.PROCESS_STATE_READY
_STARTING = pb.ProcessState.PROCESS_STATE_STARTING
_RESTARTING = pb.ProcessState.PROCESS_STATE_RESTARTING
_STOPPING = pb.ProcessState.PROCESS_STATE_STOPPING
_STOPPED = pb.ProcessState.PROCESS_STATE_STOPPED
_FAILED = pb.ProcessState.PROCESS_STATE_FAILED
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ErrImageInspect")
_BROKEN = (*_NO_IMAGE, "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_BY_ITSELF = ("ContainerCreating", "PodInitializing")
"""Reasons for waiting that a start has anyway."""
_COMPONENT, _ROLE = "app.kubernetes.io/component", "flotilla.role"
_INDEX = "apps.kubernetes.io/pod-index"


def processes_of(
    objects: Sequence[Object], events: Sequence[Object], rows: Sequence[Row], release: Release
) -> list[pb.ProcessStatus]:
    """Return the state of every pod, then one for each row of the table that has no pod."""
    pods = sorted(_pods(objects), key=lambda pod: _order(_kind(pod), name_of(pod)))
    processes = [_process(pod, _newest_warnings(events)) for pod in pods]
    return [*processes, *_missing(pods, events, rows, release)]


def pods_by_name(objects: Sequence[Object]) -> dict[str, str]:
    """Return the pod of each service; of two of one name, as while one is replaced, the newer one."""
    found = sorted(_pods(objects), key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    return {name_of(pod): str(pod["metadata"]["name"]) for pod in found}


def name_of(pod: Object) -> str:
    """Return the name that the service in a pod is told, or that of its server of NATS."""
    metadata = pod["metadata"]
    pod_name = str(metadata["name"])
    if _kind_name(pod) == NATS:
        return f"{NATS}-{pod_name.rpartition('-')[2]}"
    told = next((word for word in _container(pod).get("args", ()) if word.startswith("--name=")), "")
    index = str(metadata.get("labels", {}).get(_INDEX, pod_name.rpartition("-")[2]))
    name = str(told.partition("=")[2]).replace("$(POD_NAME)", pod_name).replace("$(POD_INDEX)", index)
    return name or pod_name


def rolling(objects: Sequence[Object]) -> list[str]:
    """Return the workloads whose pods are not yet all those that are wanted now, by the rules of `kubectl rollout`."""
    return [str(one["metadata"]["name"]) for one in objects if one["kind"] != "Pod" and not _settled(one)]


def troubles(
    objects: Sequence[Object], processes: Sequence[pb.ProcessStatus], restart_budget: int
) -> list[Trouble]:
    """Return what waiting does not cure."""
    waiting = {process.name: process for process in processes if process.state != _READY}
    found = []
    for pod in _pods(objects):
        process = waiting.get(name_of(pod))
        if process is not None and (next_step := _cure(pod, restart_budget)):
            why = process.error or f"it was started again {process.restarts} times"
            found.append(Trouble(process.name, why, next_step, PATIENCE_S))
    return found


def stages_of(objects: Sequence[Object]) -> dict[str, int]:
    """Return how far each pod has come: it waits for a node, for its image and volumes, runs, is ready."""
    stages = {}
    for pod in _pods(objects):
        status = _status(pod)
        began = "running" in status.get("state", {}) or bool(status.get("restartCount"))
        stages[str(pod["metadata"]["name"])] = (
            3 if _is_ready(pod) else 2 if began else 1 if pod["spec"].get("nodeName") else 0
        )
    return stages


def _cure(pod: Object, restart_budget: int) -> str:
    """Return what a user does about a pod that waiting does not cure; empty for any other one."""
    status = _status(pod)
    reason = (status.get("state", {}).get("waiting") or {}).get("reason", "")
    if reason in _NO_IMAGE:
        return (
            "build the images of this version (make images), push them, and name their registry and tag in image and "
            "images of a file of kubernetes.values"
        )
    if reason in _BROKEN:
        return f"see what it misses: kubectl describe pod {pod['metadata']['name']}"
    return f"read its log: kubectl logs {pod['metadata']['name']}" if _restarts(pod) > restart_budget else ""


def _process(pod: Object, warnings: Mapping[str, str]) -> pb.ProcessStatus:
    metadata, told = pod["metadata"], pod.get("status", {})
    container = _status(pod)
    state = container.get("state", {})
    status = pb.ProcessStatus(name=name_of(pod), kind=_kind(pod), restarts=_restarts(pod))
    since = (state.get("running") or {}).get("startedAt") or metadata.get("creationTimestamp")
    if since:
        status.since.FromJsonString(since)
    status.state, status.error = _state(pod, told, container)
    if status.state == _STARTING and not status.error and "running" not in state:
        status.error = warnings.get(str(metadata["name"]), "")
    return status


def _state(pod: Object, told: Object, container: Object) -> tuple[pb.ProcessState.ValueType, str]:
    if pod["metadata"].get("deletionTimestamp"):
        return _STOPPING, ""
    phase = told.get("phase", "Pending")
    if phase in ("Failed", "Succeeded"):
        return (_FAILED if phase == "Failed" else _STOPPED), _reason(told) or _ended(
            container.get("state", {})
        )
    if _is_ready(pod):
        return _READY, ""
    waiting = container.get("state", {}).get("waiting") or {}
    reason = str(waiting.get("reason", ""))
    if reason == "CrashLoopBackOff" or "terminated" in container.get("state", {}):
        return _RESTARTING, _ended(container.get("lastState", {})) or _ended(container.get("state", {}))
    told_why = [waiting] if reason not in _BY_ITSELF else []
    told_why += [
        one
        for one in told.get("conditions", ())
        if one["type"] == "PodScheduled" and one["status"] == "False"
    ]
    return _STARTING, next(filter(None, map(_reason, told_why)), "")


def _reason(told: Object) -> str:
    """Return reason and message of a part of a status; empty where it has none."""
    return ": ".join(str(told[key]) for key in ("reason", "message") if told.get(key))


def _ended(state: Object) -> str:
    """Say how a container ended."""
    terminated = state.get("terminated")
    if not terminated:
        return ""
    why = str(terminated.get("message") or "").strip()
    reason = str(terminated.get("reason", "Error"))
    return f"it ended with status {terminated.get('exitCode')} ({reason}){f': {why}' if why else ''}"


def _missing(
    pods: Sequence[Object], events: Sequence[Object], rows: Sequence[Row], release: Release
) -> Iterator[pb.ProcessStatus]:
    """Give a state for each row that has no pod, with what keeps Kubernetes from making it."""
    stays = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    names = {name_of(pod) for pod in stays}
    warnings = _newest_warnings(events)
    for kind in dict.fromkeys(row.slot.kind for row in rows):
        of_kind = [row for row in rows if row.slot.kind == kind]
        there = sum(_kind(pod) == kind for pod in stays)
        lacking = of_kind[there:] if kind in SCALABLE else [row for row in of_kind if row.name not in names]
        for row in lacking:
            workload = row.node.partition("/")[2]
            why = next((text for name, text in warnings.items() if _makes(workload, name)), "")
            status = pb.ProcessStatus(name=row.name, kind=kind, state=_STOPPED)
            status.since.GetCurrentTime()
            status.error = why or f"there is no pod of it in namespace {release.namespace}"
            yield status


def _makes(workload: str, name: str) -> bool:
    """Return whether an object of this name makes pods of the workload: itself, or the ReplicaSet of a Deployment."""
    return name == workload or re.fullmatch(re.escape(workload) + r"-[a-z0-9]{5,10}", name) is not None


def _newest_warnings(events: Sequence[Object]) -> dict[str, str]:
    """Return the newest warning about each object."""
    found: dict[str, str] = {}
    for event in sorted(events, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or "")):
        if event.get("type") != "Normal":
            found[str(event["involvedObject"]["name"])] = f"{event.get('reason')}: {event.get('message')}"
    return found


def _settled(workload: Object) -> bool:
    spec, status = workload["spec"], workload.get("status", {})
    wanted = int(spec.get("replicas", 1))
    if int(status.get("observedGeneration", 0)) < int(workload["metadata"].get("generation", 0)):
        return False
    if workload["kind"] == "StatefulSet":
        same = status.get("updateRevision") == status.get("currentRevision")
        return same and int(status.get("readyReplicas", 0)) == int(status.get("replicas", 0)) == wanted
    updated = int(status.get("updatedReplicas", 0))
    return updated == int(status.get("replicas", 0)) == int(status.get("availableReplicas", 0)) == wanted


def _pods(objects: Sequence[Object]) -> list[Object]:
    return [one for one in objects if one["kind"] == "Pod"]


def _kind_name(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(_COMPONENT, ""))


def _kind(pod: Object) -> ServiceKind.ValueType:
    """Return the kind of the service in a pod; NATS has none."""
    name = f"SERVICE_KIND_{_kind_name(pod).upper()}"
    return dict(ServiceKind.items()).get(name, ServiceKind.SERVICE_KIND_UNSPECIFIED)


def _container(pod: Object) -> Object:
    containers: Sequence[Object] = pod["spec"]["containers"]
    return next((one for one in containers if one["name"] == _kind_name(pod)), containers[0])


def _status(pod: Object) -> Object:
    """Return the status of our container in a pod; others may have been put beside it."""
    statuses: Sequence[Object] = pod.get("status", {}).get("containerStatuses", ())
    return next((one for one in statuses if one["name"] == _kind_name(pod)), statuses[0] if statuses else {})


def _restarts(pod: Object) -> int:
    return int(_status(pod).get("restartCount", 0))


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _order(kind: ServiceKind.ValueType, name: str) -> tuple[int, str]:
    """Sort as the table does."""
    order = (ServiceKind.SERVICE_KIND_UNSPECIFIED, *(one.number for one in KINDS))
    return order.index(kind), name
