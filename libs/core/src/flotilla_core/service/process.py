"""The life of a service process, the same for every service, from its command line to its exit code.

Order: what the service has to do `first`, telemetry, NATS, build, open port (health NOT_SERVING, announce file),
`start`, READY. SIGTERM: DRAINING, `drain`, `stop`, flush, exit 0; a second signal ends the process at once.

Invariants: health and registry never say READY before `start` has returned, nor after draining has begun; the service
is stopped exactly once, whatever came before; the registration is withdrawn before the process ends. The announce file
(`instances/<name>.json`) names the process that wrote it last, so a reader compares the pid before it believes it.

An event loop that is blocked is reported while it is blocked, from a thread of its own, with the stack that blocks it:
nothing that the loop itself would do (answer a call, write a span) could tell then. Whatever goes wrong ends in one
message on stderr (`error: what (where): why. next`) and exit code 1; an unexpected error also leaves its traceback in
the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from flotilla.common.v1 import files_pb2_grpc, operate_pb2_grpc
from flotilla.common.v1 import registration_pb2 as reg
from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core import ids, rpc, telemetry
from flotilla_core.activities import Activities
from flotilla_core.bus import Bus, Login, Registry
from flotilla_core.bus.connection import COORDINATOR, SERVICE
from flotilla_core.disk import check_state_directory, names_full_disk
from flotilla_core.errors import FlotillaError, Internal
from flotilla_core.files import keep_private, speak_utf8, write_atomically
from flotilla_core.kinds import kind_name
from flotilla_core.logger import get_logger
from flotilla_core.logs import configure_logs, name_instance, tolerate_lost_lines
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.roles import holds_judge, role_of_process
from flotilla_core.rpc.interface import hand_down
from flotilla_core.service.arguments import Arguments, parse_arguments
from flotilla_core.service.host import Host, Service
from flotilla_core.service.model import bring_model, coordinator_address
from flotilla_core.service.operate import SERVICE_NAME, OperateServicer
from flotilla_core.transfer import FILE_SERVICE_NAME, FileCache, Files, FileServicer
from flotilla_core.trust import Credential

NATS_TIMEOUT_S = 20.0
# Peers learn from the registry that we drain; until then their calls are still served.
_SPREAD_THE_WORD_S = 0.2
_SERVER_GRACE_S = 1.0

logger = get_logger()

_LOOK_EVERY_S = 0.5
BLOCKED_AFTER_S = 3.0
_LOOK_AT_MEMORY_EVERY_S = 2.0
_GROWTH = 1.25
_GROWTH_BYTES = 64 << 20
_STATM = Path("/proc/self/statm")


class ServiceProcess:
    """Runs one service from its build to its end."""

    def __init__(
        self,
        kind: reg.ServiceKind.ValueType,
        kind_name: str,
        arguments: Arguments,
        build: Callable[[Host], Service],
    ) -> None:
        self._kind = kind
        self._kind_name = kind_name
        self._arguments = arguments
        self._build = build
        self._ending = asyncio.Event()
        self._error: BaseException | None = None
        self._grace_s = arguments.drain_grace_s

    async def run(self) -> int:
        """Run the service and return 0 after an ordered end; raise the error that made it fail."""
        async with self._host() as host:
            await bring_model(host)
            service = self._build(host)
            registration = self._registration(host)
            server = rpc.RpcServer(
                host.stack.bind.model_copy(update={"port": self._arguments.port}), credential=host.credential
            )
            server.add(
                operate_pb2_grpc.add_OperateServiceServicer_to_server,
                OperateServicer(host, service, registration, self.end),
                SERVICE_NAME,
            )
            server.add(
                files_pb2_grpc.add_FileServiceServicer_to_server,
                FileServicer(host.files.offers),
                FILE_SERVICE_NAME,
            )
            service.add_to(server)
            # From here on a signal means an ordered end; before, the process dies of it at once.
            for signum in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
            await self._serve(host, service, server, registration)
        if self._error is not None:
            raise self._error
        logger.info("stopped")
        return 0

    def end(self, grace_s: float | None = None) -> None:
        """Ask for an ordered end, in which running work has `grace_s` left."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._ending.set()

    @contextlib.asynccontextmanager
    async def _host(self) -> AsyncIterator[Host]:
        """Provide telemetry and NATS around everything else."""
        given = self._arguments
        instance_id = ids.new_instance_id(given.name)
        name_instance(instance_id)
        check_state_directory(given.state_dir)
        credential = Credential.of_stack(given.stack.bind, given.state_dir)
        hand_down(given.stack.bind, credential)
        credential.require_service(given.name)
        telemetry.start(self._kind_name, instance_id, list(given.otlp), credential=credential)
        user = COORDINATOR if self._kind == reg.SERVICE_KIND_COORDINATOR else SERVICE
        try:
            bus = await Bus.connect(
                given.nats_url,
                Login.of_stack(given.stack.nats, given.state_dir, credential, user),
                name=instance_id,
                timeout_s=NATS_TIMEOUT_S,
                replicas=given.stack.nats.replicas,
            )
            try:
                registry, activities = Registry(bus), Activities()
                yield Host(
                    kind=self._kind,
                    name=given.name,
                    instance_id=instance_id,
                    stack=given.stack,
                    state_dir=given.state_dir,
                    bus=bus,
                    registry=registry,
                    credential=credential,
                    fail=self._fail,
                    activities=activities,
                    files=Files(
                        FileCache(given.state_dir / "files", given.stack.file_cache_gib),
                        lambda address: rpc.connect(address, credential=credential),
                        partial(coordinator_address, registry, given.stack),
                        activities,
                    ),
                )
            finally:
                await bus.close()
        finally:
            await asyncio.to_thread(telemetry.stop)

    async def _serve(
        self, host: Host, service: Service, server: rpc.RpcServer, registration: reg.Registration
    ) -> None:
        """Serve from the opening of the port until it is closed."""
        announced = None
        try:
            registration.address = host.files.address = await server.start()
            announced = announce(
                host.state_dir,
                name=host.name,
                kind=self._kind_name,
                address=registration.address,
                instance_id=host.instance_id,
                credential_file=host.stack.bind.credential_file,
            )
            await host.registry.announce(registration)
            logger.info("starting", address=registration.address, pid=os.getpid())
            if await self._started(host, service):
                await self._be_ready(host, service, server, registration)
                watch, garbage = LoopWatch(), GarbageCollection()
                await self._ending.wait()
                garbage.stop()
                await self._drain(host, service, server, registration)
                watch.stop()
        except BaseException as error:
            # The registry must not say READY of a service that ends, whatever ended it.
            registration.state = reg.INSTANCE_STATE_FAILED
            await host.registry.update(state=registration.state)
            self._error = self._error or error
            raise
        finally:
            await self._close(host, service, server)
            if announced is not None:
                withdraw(announced)

    async def _started(self, host: Host, service: Service) -> bool:
        """Return whether `start` completed; False if the end was requested meanwhile."""
        with host.activities.doing("starting"):
            starting = asyncio.create_task(service.start(), name="start")
            ending = asyncio.create_task(self._ending.wait(), name="ending")
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if starting.done():
                starting.result()
                return not self._ending.is_set()
            starting.cancel()
            await asyncio.wait({starting})
            return False

    async def _be_ready(
        self, host: Host, service: Service, server: rpc.RpcServer, registration: reg.Registration
    ) -> None:
        service.describe(registration)
        registration.state = reg.INSTANCE_STATE_READY
        server.set_serving(True)
        await host.registry.announce(registration)
        logger.info("ready", address=registration.address)

    async def _drain(
        self, host: Host, service: Service, server: rpc.RpcServer, registration: reg.Registration
    ) -> None:
        server.set_serving(False)
        if self._error is not None:
            registration.state = reg.INSTANCE_STATE_FAILED
            await host.registry.update(state=registration.state)
            return
        registration.state = reg.INSTANCE_STATE_DRAINING
        await host.registry.update(state=registration.state)
        logger.info("draining", grace_s=self._grace_s)
        with host.activities.doing("draining"):
            await asyncio.sleep(_SPREAD_THE_WORD_S)
            try:
                async with asyncio.timeout(self._grace_s):
                    await service.drain(self._grace_s)
            except TimeoutError:
                logger.warning("running work was cut", grace_s=self._grace_s)

    async def _close(self, host: Host, service: Service, server: rpc.RpcServer) -> None:
        """Run every clean-up step, even after a failed one."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(host.registry.withdraw)
            stack.push_async_callback(service.stop)
            stack.push_async_callback(server.stop, _SERVER_GRACE_S)

    def _registration(self, host: Host) -> reg.Registration:
        registration = reg.Registration(
            kind=self._kind,
            instance_id=host.instance_id,
            name=host.name,
            state=reg.INSTANCE_STATE_STARTING,
            host=socket.gethostname(),
            pid=os.getpid(),
            protocol_version=PROTOCOL_VERSION,
            versions={"flotilla": metadata.version("flotilla-core"), "python": platform.python_version()},
            role=role_of_process(host.name) if self._has_role(host.name) else "",
        )
        registration.started_at.FromNanoseconds(time.time_ns())
        return registration

    def _has_role(self, name: str) -> bool:
        is_generator = self._kind == reg.SERVICE_KIND_GENERATOR
        return self._kind == reg.SERVICE_KIND_TRAINER or (is_generator and holds_judge(name))

    def _on_signal(self, signum: int) -> None:
        if self._ending.is_set():
            logger.warning("second signal: ending at once", signal=signal.Signals(signum).name)
            os._exit(128 + signum)
        logger.info("asked to stop", signal=signal.Signals(signum).name)
        self.end()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            logger.error("the service cannot continue", error=str(error))
        self._ending.set()


def announce(
    state_dir: Path, *, name: str, kind: str, address: str, instance_id: str, credential_file: Path | None
) -> Path:
    """Write the file and return its path."""
    path = state_dir / "instances" / f"{name}.json"
    entry: dict[str, str | int] = {
        "name": name,
        "kind": kind,
        "pid": os.getpid(),
        "address": address,
        "instance_id": instance_id,
    }
    if credential_file is not None:
        entry["credential_file"] = str(credential_file)
    write_atomically(path, json.dumps(entry))
    return path


def withdraw(path: Path) -> None:
    """Remove the file, unless a successor has written its own."""
    try:
        if json.loads(path.read_text()).get("pid") == os.getpid():
            path.unlink()
    except (OSError, ValueError):
        pass  # It is gone or not ours: nothing to take back.


_SELDOM = (100_000, 50, 1000)
"""Objects, and collections of younger ones, after which Python looks for garbage."""


class GarbageCollection:
    """Collects cyclic garbage when the process has grown, until `stop`, and otherwise young objects alone.

    Measured: with thousands of live stream objects full collections cost half of the loop's time, so that Python's own
    schedule is too dear. Without any, garbage that outlives one look at the young objects would stay,
    with all that it holds. What exists now lives as long as the process, and no collection looks at it again.
    """

    def __init__(self, *, look_every_s: float = _LOOK_AT_MEMORY_EVERY_S) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_SELDOM)
        self._resident = resident_bytes()
        self._looking = asyncio.create_task(self._collect_when_grown(look_every_s), name="garbage collection")

    def stop(self) -> None:
        self._looking.cancel()

    async def _collect_when_grown(self, look_every_s: float) -> None:
        while True:
            await asyncio.sleep(look_every_s)
            if resident_bytes() > self._resident * _GROWTH + _GROWTH_BYTES:
                gc.collect()
                self._resident = resident_bytes()


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class LoopWatch:
    """Notices an event loop that does not run.

    Watches the running loop until `stop`.
    """

    def __init__(self, *, blocked_after_s: float = BLOCKED_AFTER_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._blocked_after_s = blocked_after_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            answered = threading.Event()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if answered.wait(self._blocked_after_s):
                continue
            frame = sys._current_frames().get(self._loop_thread)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            logger.warning("the event loop is blocked", for_s=self._blocked_after_s, stack=stack)
            while not answered.wait(_LOOK_EVERY_S):
                if self._stopping.is_set():
                    return
            logger.warning("the event loop runs again", blocked_s=round(time.monotonic() - asked, 1))


def run_service(
    kind: ServiceKind.ValueType,
    build: Callable[[Host], Service],
    arguments: Sequence[str] | None = None,
    *,
    first: Callable[[Arguments], None] = lambda _: None,
) -> int:
    """Run the service that `build` makes until it is told to stop; returns the exit code.

    `arguments` are those of the command line where they are not given. `first` is called before all else, in a process
    that has one thread and has opened nothing.
    """
    if arguments is None:
        speak_utf8()
    keep_private()
    gc.set_threshold(*_SELDOM)  # Nothing of an import is garbage.
    faulthandler.enable()
    # A loop that hangs cannot answer DumpStacks: SIGUSR1 writes the stacks of all threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    name = kind_name(kind)
    try:
        given = parse_arguments(name, arguments)
        tolerate_lost_lines()
        configure_logs(given.name)
        with names_full_disk("the service cannot write its files", given.state_dir):
            first(given)
            return asyncio.run(ServiceProcess(kind, name, given, build).run())
    except FlotillaError as error:
        return _say(error)
    except KeyboardInterrupt:
        return 130
    # No caller above could handle it.
    except Exception as error:  # noqa: BLE001
        get_logger().exception("the service failed unexpectedly")
        return _say(Internal("the service failed", where=name, why=f"{type(error).__name__}: {error}"))


def _say(error: FlotillaError) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    return 1
