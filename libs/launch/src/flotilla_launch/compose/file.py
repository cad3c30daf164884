"""The Compose file of a stack: pure functions of its table.

Each row of the table is a container, alone on its node. Invariants: a container writes to one folder of this host; it
is the directory of the stack inside, and no other container sees it. What it reads besides (model, data) is there at
the same path, read-only; no value of a secret is in the file; every container has few rights and a read-only image.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import StackConfig
from flotilla_core.config.model import SecretReference
from flotilla_core.gangs import gang_of, roles_of
from flotilla_core.judge_generators import judge_of_role, judge_roles
from flotilla_core.kinds import WITH_MODEL
from flotilla_core.log_files import KEPT_BYTES, MOST_BYTES
from flotilla_core.roles import role_of_process
from flotilla_launch.gpus import VISIBLE, Gpus
from flotilla_launch.placement import Slot, refuse, refused_by_engines, slots_of
from flotilla_launch.table import NATS, Endpoints, Resources, Row, table_of

PORT = 7070
"""The port of every service: each has an address of its own."""
NATS_PORT = 4222
COORDINATOR = "coordinator"
CONTAINERS = "containers"
"""The folder, in the directory of the stack, of what the other containers write."""
_EXECUTABLES = Path("/opt/flotilla/bin")
"""The folder of commands in the images."""
_SCRATCH = ("/tmp:exec", "/var/lib/flotilla:exec,mode=1777")
# No launcher runs beside the containers, so each keeps the bound of its logs (flotilla_core.log_files) itself. Forked
# twice, because a service may wait for any child of its own.
_KEEP_BOUNDED = f"""while sleep 1; do
  for log in "${{0%/*}}"/*.log; do
    if [ "$(stat -c %s "$log")" -gt {MOST_BYTES} ]; then
      tail -c {KEPT_BYTES} "$log" >"$log.1" && : >"$log"
    fi
  done
done"""
# The launcher reads this file as it reads those of processes; Docker keeps the lines of the entry point alone.
_TO_LOG = ("sh", "-c", f'( ( {_KEEP_BOUNDED} ) >/dev/null 2>&1 & ); exec "$@" >>"$0" 2>&1')
_GRACE = "30s"


@dataclass(frozen=True)
class Containers:
    """The nodes of a stack in containers: one for each slot, with its name."""

    gpus: Gpus

    def slots(self, stack: StackConfig) -> list[Slot]:
        return slots_of(stack)

    def node(self, slot: Slot) -> str:
        return slot.name

    def resources(self, slot: Slot, stack: StackConfig) -> Resources:
        """Return the GPUs by their numbers on this host, and the port, which is the same in every container."""
        own = self.gpus.environment(slot, stack).get(VISIBLE, "")
        return Resources(
            gpus=tuple(f"{slot.name}:{gpu}" for gpu in own.split(",") if gpu),
            ports=(NATS_PORT if not slot.kind else _port(slot, stack),),
        )

    def variables(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class Project:
    """The identity of the containers of one placement."""

    directory: Path
    """The directory of the stack on this host, without links: it is the same path in the containers."""
    mark: str
    """The mark of this placement, which no other one has."""
    user: str

    @property
    def name(self) -> str:
        """Return the project of Compose, by which its containers are found."""
        return f"flotilla-{self.directory.name}-{self.mark}"

    def home(self, name: str) -> Path:
        """Return the folder of this host that a container has as the directory of the stack."""
        return self.directory if name == COORDINATOR else self.directory / CONTAINERS / name


def check(stack: StackConfig) -> None:
    """Raise InvalidConfig for a stack that cannot run in containers of one host."""
    refused = (
        (
            stack.nats.url is not None,
            f"nats.url {stack.nats.url}: a container has other addresses than this host",
            "leave nats.url out: the stack then has a server of its own",
        ),
        (
            any(len(gang_of(stack, role).hosts) > 1 for role in roles_of(stack)),
            "hosts of a gang: all its ranks are in one container",
            "leave hosts out",
        ),
        *refused_by_engines(stack),
    )
    refuse("this stack cannot run in containers", refused)


def contained(stack: StackConfig, directory: Path) -> StackConfig:
    """Return the stack as its containers read it: each listens on every address that it has."""
    bind = stack.bind.model_copy(update={"host": "0.0.0.0", "advertise_host": None})
    return stack.model_copy(update={"bind": bind, "state_dir": directory.parent})


def container_table(stack: StackConfig, gpus: Gpus, directory: Path) -> list[Row]:
    """Return the rows of a stack with the commands of the images."""
    rows = table_of(stack, Containers(gpus), directory=directory, executables=_EXECUTABLES)
    server = str(_EXECUTABLES / "nats-server")
    return [replace(row, command=(server, *row.command[1:])) if row.name == NATS else row for row in rows]


def images_of(stack: StackConfig, table: Sequence[Row]) -> set[str]:
    """Return the images that the containers are made of."""
    return {_image(row, stack) for row in table}


def secrets_of(table: Sequence[Row]) -> dict[str, tuple[Row, str]]:
    """Return the row and the variable of each secret, by the variable of Compose that stands for it in the file."""
    return {
        _stands_for(row, name): (row, name)
        for row in table
        for name, value in row.environment.items()
        if isinstance(value, SecretReference)
    }


def render(stack: StackConfig, table: Sequence[Row], project: Project) -> str:
    """Return the Compose file."""
    coordinator = next(row for row in table if row.name == COORDINATOR)
    endpoints = Endpoints(
        f"tls://{NATS}:{NATS_PORT}", f"https://{COORDINATOR}:{coordinator.resources.ports[0]}"
    )
    described = {row.name: _container(row, stack, project, endpoints) for row in table}
    head = (
        f"# The stack {stack.name!r}, written by flotilla up --on compose: change the stack file instead.\n"
    )
    return head + yaml.safe_dump({"services": described}, sort_keys=False)


def this_user() -> str:
    """Return the user of the containers: a secret is used only by the user who owns its file."""
    return f"{os.getuid()}:{os.getgid()}"


def _container(row: Row, stack: StackConfig, project: Project, endpoints: Endpoints) -> dict[str, Any]:
    log = str(project.directory / "logs" / f"{row.name}.log")
    budget = stack.restart_budget
    described: dict[str, Any] = {
        "image": _image(row, stack),
        "hostname": row.name,
        "user": project.user,
        "command": _literal([*_TO_LOG, log, *row.command_at(endpoints)]),
        "environment": {
            # For the health check of the image.
            "FLOTILLA_PORT": str(row.resources.ports[0]),
            "FLOTILLA_STACK": _literal(str(project.directory / "stack.yaml")),
            **_environment(row),
        },
        "volumes": _literal(_volumes(row, stack, project)),
        "tmpfs": [*_SCRATCH],
        "restart": f"on-failure:{budget}" if budget else "no",
        "stop_grace_period": _GRACE,
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    if row.name == NATS:
        described["healthcheck"] = {"disable": True}  # That of the image asks a service.
    else:
        # They end in the other direction: the coordinator takes the last spans of all, and NATS is the last.
        described["depends_on"] = [NATS] if row.name == COORDINATOR else [NATS, COORDINATOR]
    if row.name == COORDINATOR:
        described["tmpfs"].append(_literal(f"{project.directory / CONTAINERS}:mode=700"))
    if row.slot.kind in WITH_MODEL:
        described["shm_size"] = "1gb"
    if row.resources.gpus:
        numbers = [gpu.partition(":")[2] for gpu in row.resources.gpus]
        device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
        described["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return described


def _volumes(row: Row, stack: StackConfig, project: Project) -> list[dict[str, Any]]:
    read = [stack.bind.credential_file] if stack.bind.credential_file is not None else []
    if row.name != NATS:
        models: list[Path | str | None] = [stack.model]
        if row.slot.kind == ServiceKind.SERVICE_KIND_TRAINER:
            models.append(getattr(gang_of(stack, role_of_process(row.name)), "model", None))
        models += [judge_of_role(stack, role).model for role in judge_roles(stack) if _reads(row, role)]
        read += [model for model in models if isinstance(model, Path)]
        read += stack.compose.data if row.name == COORDINATOR else []
    own = {"type": "bind", "source": str(project.home(row.name)), "target": str(project.directory)}
    return [
        own,
        *(
            {"type": "bind", "source": str(path), "target": str(path), "read_only": True}
            for path in dict.fromkeys(read)
        ),
    ]


def _reads(row: Row, role: str) -> bool:
    """Return whether a container reads the model of a judge: those that hold it do, and rewards, for its prompts."""
    return row.slot.kind == ServiceKind.SERVICE_KIND_REWARD or role_of_process(row.name) == role


def _image(row: Row, stack: StackConfig) -> str:
    tag = stack.compose.tag or metadata.version("flotilla-launch").partition("+")[0]
    # The server of NATS is in the image of the coordinator.
    kind = COORDINATOR if row.name == NATS else row.kind
    return f"flotilla-{kind}:{tag}{'-gpu' if row.resources.gpus else ''}"


def _port(slot: Slot, stack: StackConfig) -> int:
    is_coordinator = slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR
    return (stack.bind.port if is_coordinator else 0) or PORT


def _environment(row: Row) -> Mapping[str, str]:
    return {
        name: "${" + _stands_for(row, name) + "}" if isinstance(value, SecretReference) else _literal(value)
        for name, value in row.environment.items()
    }


def _stands_for(row: Row, name: str) -> str:
    return re.sub(r"\W", "_", f"FLOTILLA_SECRET_{row.name}_{name}")


def _literal(value: Any) -> Any:
    """Return the value as Compose is told it: a `$` of ours begins no variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    return [_literal(one) for one in value] if isinstance(value, list) else value
