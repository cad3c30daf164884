"""Three hosts on one machine: network namespaces on a bridge, each with mounts, a name and units of its own.

The generator is the real engine.
Invariants: the folders of one host are empty on the others; what a host is given by hand is its stack file, its
credential and that of NATS; a unit starts its command again for as long as its host is up, as
systemd would; what runs in the namespaces is gone when the context ends, and only that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.config import BindConfig
from flotilla_core.trust import write_secret
from flotilla_core.trust.authority import make_credential
from flotilla_testing.stack import BOOTED_WITHIN_S, Outcome, Stack, wait_until

NAME = "netns"
BIN = Path(sys.executable).parent
HOSTS = {"one": "10.77.0.1", "two": "10.77.0.2", "three": "10.77.0.3"}
NATS_PORT = 4222
PORTS = "9000-9099"
AGENT = "trainer-at-three"
SERVICES = ("coordinator", "trainer", AGENT, "generator-0", "reward-0")
RESTART_S = 2.0
ENTER = 'hostname "$HOST"; for one in $HIDDEN; do mount -t tmpfs none "$one" || exit 99; done; exec "$@"'


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def why_not() -> str:
    """Return why this system makes no network namespaces; empty where it does."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if missing := [tool for tool in ("ip", "iptables", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    probe = f"flt-{secrets.token_hex(3)}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"this system makes no network namespaces: {done.stderr.strip()}"
    ip("netns", "delete", probe)
    return ""


class Unit:
    """Keeps one command of a host running, until it is stopped or its host is."""

    def __init__(self, host: Host, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._host = host
        self._name = name
        self._command = command
        self._environment = environment
        self.stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name=f"unit {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the command in order, and start it no more."""
        self.stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
        self._thread.join(60)

    def _keep(self) -> None:
        while not self.stopping.is_set():
            with self._host.log(self._name).open("ab") as log:
                self._process = self._host.popen(self._command, self._environment, log)
                if self.stopping.is_set():
                    self._process.terminate()
                self._process.wait()
            self.stopping.wait(RESTART_S)


class Host:
    """One namespace, with a folder that no other host sees."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self._network = network
        self.name = name
        self.address = address
        self.namespace = f"{network.mark}-{name}"
        self.home = network.root / name
        self.units: dict[str, Unit] = {}

    @property
    def stack(self) -> Path:
        return self.home / "stack.yaml"

    def log(self, name: str) -> Path:
        return self._network.root / f"{self.name}.{name}.log"

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Start a unit."""
        self.units[name] = Unit(self, name, list(command), environment)

    def service(self, name: str, *more: str, **environment: str) -> None:
        """Start the unit of a service by the stack file of this host."""
        kind = "ranks" if name == AGENT else name.partition("-")[0]
        command = [str(BIN / f"flotilla-{kind}"), "--name", name, "--stack", str(self.stack), *more]
        self.start(name, *command, **environment)

    def stop(self, name: str) -> None:
        self.units.pop(name).stop()

    def flotilla(self, *arguments: str, timeout_s: float = 300) -> Outcome:
        """Run a command on this host."""
        command = [str(BIN / "flotilla"), *arguments, "--stack", str(self.stack)]
        process = self.popen(command, {}, subprocess.PIPE)
        out, err = process.communicate(timeout=timeout_s)
        return Outcome(process.returncode, out.decode(), err.decode())

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def kill(self) -> int:
        """Kill all processes of the host, also those that start meanwhile; return how many there were."""
        killed: set[int] = set()
        units_before = list(self.units.values())
        assert units_before, "a host that is killed has units"
        while pids := [pid for pid in self.pids() if pid not in killed]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(pids)
        return len(killed)

    def block(self, ports: str, *, action: str = "-A") -> None:
        """Drop what others send to the ports of this host; `-D` lets it in again."""
        rule = [action, "INPUT", "-i", "eth0", "-p", "tcp", "--dport", ports.replace("-", ":"), "-j", "DROP"]
        ip("netns", "exec", self.namespace, "iptables", *rule)

    def popen(self, command: list[str], environment: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
        hidden = [str(other.home) for other in self._network.hosts.values() if other is not self]
        error = subprocess.PIPE if output == subprocess.PIPE else output
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", ENTER, "sh", *command],
            cwd=self.home,
            stdout=output,
            stderr=error,
            env={
                **os.environ,
                "HOST": self.name,
                "HIDDEN": " ".join(hidden),
                "HF_HUB_OFFLINE": "1",
                "NO_COLOR": "1",
                "XDG_RUNTIME_DIR": str(self.home),
                **environment,
            },
        )


class Network:
    """The bridge and its hosts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mark = f"flt-{secrets.token_hex(2)}"
        self._switch = f"{self.mark}-switch"
        self.hosts = {name: Host(self, name, address) for name, address in HOSTS.items()}

    @property
    def stack(self) -> Stack:
        """The files of the coordinator's host; commands run on the host itself."""
        one = self.hosts["one"]
        return Stack(one.stack, one.home / "state" / NAME)

    def lay(self) -> None:
        """Make the namespaces and connect them."""
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts.values():
            host.home.mkdir(parents=True)
            ip("netns", "add", host.namespace)
            port = f"to-{host.name}"
            ip(
                "-n",
                host.namespace,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
            ip("-n", host.namespace, "route", "add", "default", "via", "10.77.0.254")

    def furnish(self, model: Path) -> None:
        """Bring to each host what an operator copies; the model is on the coordinator's host alone."""
        one = self.hosts["one"]
        shutil.copytree(model, one.home / "arithmetic")
        own, password = make_credential(BindConfig(), self.root).path.read_text(), secrets.token_hex(32)
        for host in self.hosts.values():
            write_secret(host.home / "credential.pem", own)
            write_secret(host.home / "nats", f"flotilla:{password}")
            self.write_stack(host)
        config = one.home / "nats.conf"
        config.write_text(
            f'host: "{one.address}"\nport: {NATS_PORT}\n'
            f"authorization {{\n  user: flotilla\n  password: {password}\n}}\n"
            f'jetstream {{\n  store_dir: "{one.home}/jetstream"\n  sync_interval: always\n'
            "  max_file_store: 1GB\n}\n"
        )

    def write_stack(self, host: Host, **bind: Any) -> None:
        """Write the stack file of a host, with these keys of `bind` changed."""
        description = {
            "name": NAME,
            "model": str(self.hosts["one"].home / "arithmetic" / "model"),
            "state_dir": str(host.home / "state"),
            "ready_timeout_s": BOOTED_WITHIN_S,
            "restart_budget": 1000,
            "bind": {
                "host": host.address,
                "interface": "eth0",
                "ports": PORTS,
                "credential_file": str(host.home / "credential.pem"),
                **bind,
            },
            "nats": {
                "url": f"nats://{self.hosts['one'].address}:{NATS_PORT}",
                "credentials_file": str(host.home / "nats"),
            },
            "generator": {"replicas": 0, "max_model_tokens": 64},
            "trainer": {
                "replicas": 0,
                "nproc": 2,
                "hosts": [{"name": "two", "ranks": 1}, {"name": "three", "ranks": 1}],
            },
            "reward": {"replicas": 0, "workers": 1},
        }
        host.stack.write_text(yaml.safe_dump(description))

    def start(self) -> None:
        """Start the units of all hosts: NATS and the launcher with the coordinator, the trainer, and the rest.

        The trainer's second rank is on the third host.
        """
        one, two, three = self.hosts.values()
        one.start("nats", str(BIN / "nats-server"), "--config", str(one.home / "nats.conf"))
        one.start("launcher", str(BIN / "flotilla-launcher"), "--stack", str(one.stack))
        two.service("trainer")
        three.service(AGENT)
        three.service("generator-0")
        three.service("reward-0")

    def ps(self) -> dict[str, dict[str, Any]]:
        """Return the processes as `flotilla ps` on the coordinator's host shows them; empty while it cannot."""
        outcome = self.hosts["one"].flotilla("ps", "--json")
        return {one["name"]: one for one in outcome.json["processes"]} if outcome.code == 0 else {}

    def wait_ready(self, *names: str) -> None:
        """Wait until all of these are ready."""
        last: dict[str, dict[str, Any]] = {}

        def ready() -> bool:
            last.clear()
            last.update(self.ps())
            return all(last.get(name, {}).get("state") == "ready" for name in names)

        try:
            wait_until(f"{', '.join(names)} to be ready", ready, BOOTED_WITHIN_S, every_s=1)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None

    def remove(self) -> None:
        """End what runs on the hosts, and remove them."""
        for host in self.hosts.values():
            for unit in host.units.values():
                unit.stopping.set()
        for host in self.hosts.values():
            if host.units:
                host.kill()
            for name in [*host.units]:
                host.stop(name)
        listed = ip("netns", "list")
        for namespace in [self._switch, *(host.namespace for host in self.hosts.values())]:
            if namespace in listed:
                ip("netns", "delete", namespace)


@contextlib.contextmanager
def network(root: Path, model: Path) -> Iterator[Network]:
    """Lay the network and start the stack on it; remove everything at the end."""
    made = Network(root)
    try:
        made.lay()
        made.furnish(model)
        made.start()
        made.wait_ready(*SERVICES)
        yield made
    finally:
        made.remove()
