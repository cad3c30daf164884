"""A real Slurm cluster on this host: munge, one slurmctld, and one slurmd a node.

Invariants: everything is in a folder of its own and ends by its process ids; a munge daemon that runs already is used
and left alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from flotilla_testing.stack import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
MUNGE_KEY = Path("/etc/munge/munge.key")
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
STARTS_S = 60.0
CPUS = 4
"""Of each node, whatever the host has: the services of the tests are small."""


def reason_to_skip() -> str:
    """Return what keeps a cluster from starting here; empty where nothing does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd starts as root only"


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs."""

    config: Path

    def run(self, *command: str) -> str:
        """Run a command of Slurm that must succeed; its output."""
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def jobs(self) -> dict[str, str]:
        """Return the jobs that are left, as scancel takes them, by the node of the stack that they are for."""
        lines = self.run("squeue", "--noheader", "--format=%j|%i").splitlines()
        return {name.partition(".")[2]: job for name, job in (line.split("|") for line in lines)}

    def node(self, component: str) -> str:
        """Return the node of the cluster that a component is on; empty where it is on none."""
        lines = self.run("squeue", "--noheader", "--format=%j|%N").splitlines()
        found = {name.partition(".")[2]: node for name, node in (line.split("|") for line in lines)}
        return found.get(component, "")

    def lose(self, node: str) -> None:
        """Lose a node of the cluster with its daemon and all that runs on it, and tell Slurm so, which would wait."""
        daemon = psutil.Process(int((self.config.parent / f"d.{node}.pid").read_text()))
        tasks = [process for process in psutil.process_iter() if _node_of(process) == node]
        steps = [parent for task in tasks if (parent := task.parent()) and parent.name() == "slurmstepd"]
        for process in (daemon, *steps, *tasks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def _node_of(process: psutil.Process) -> str:
    """Return the node of the cluster that a task is on; empty where the process is no task."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME", "")
    return ""


@contextlib.contextmanager
def running_cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Start a cluster of so many nodes, and end it; its commands find it by SLURM_CONF of this process."""
    config = folder / "slurm.conf"
    (folder / "state").mkdir()
    config.write_text(_config(folder, nodes))
    with _munge(), _environment("SLURM_CONF", str(config)):
        started = ["ctld", *(f"d.n{number}" for number in range(1, nodes + 1))]
        try:
            subprocess.run(["slurmctld"], check=True, timeout=30)
            for number in range(1, nodes + 1):
                subprocess.run(["slurmd", "-N", f"n{number}"], check=True, timeout=30)
            cluster = Cluster(config)
            wait_until(
                f"{nodes} idle nodes",
                lambda: cluster.run("sinfo", "--noheader", "--format=%D %t").split() == [str(nodes), "idle"],
                STARTS_S,
            )
            yield cluster
        finally:
            _end([int(file.read_text()) for name in started if (file := folder / f"{name}.pid").exists()])


def _config(folder: Path, nodes: int) -> str:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(nodes + 1)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/ctld.pid",
        f"SlurmdPidFile={folder}/d.%n.pid",
        f"SlurmctldLogFile={folder}/ctld.log",
        f"SlurmdLogFile={folder}/d.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "MpiDefault=none",
        "ReturnToService=2",
        "SchedulerParameters=bf_interval=1,sched_interval=1",
        "SlurmdParameters=config_overrides",
    ]
    for number in range(1, nodes + 1):
        lines.append(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs={CPUS} "
            "RealMemory=8000 State=UNKNOWN"
        )
    lines.append(f"PartitionName=p Nodes=n[1-{nodes}] Default=YES State=UP OverSubscribe=YES")
    return "\n".join([*lines, ""])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _munge() -> Iterator[None]:
    """Provide the daemon that signs what Slurm's daemons say to each other."""
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=30, check=False).returncode == 0:
        yield
        return
    if not MUNGE_KEY.exists():
        MUNGE_KEY.parent.mkdir(exist_ok=True)
        MUNGE_KEY.write_bytes(secrets.token_bytes(1024))
        MUNGE_KEY.chmod(0o400)
        shutil.chown(MUNGE_KEY, "munge")
    MUNGE_SOCKET.parent.mkdir(exist_ok=True)
    shutil.chown(MUNGE_SOCKET.parent, "munge")
    subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True, timeout=30)
    pid = int((MUNGE_SOCKET.parent / "munged.pid").read_text())
    try:
        yield
    finally:
        _end([pid])


def _end(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
