"""The bus against a real NATS server: registry views, event streams, outages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla.common.v1.registration_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    Registration,
)
from flotilla_core.bus import Bus, EventStream, Login, NatsServer, Registry
from flotilla_core.bus.events import MAX_EVENT_BYTES
from flotilla_core.bus.server import find_binary
from flotilla_core.errors import InvalidRequest, PortInUse, Unavailable
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_testing.credentials import ours

TTL_S = 1.5
HEARTBEAT_S = 0.3
View = dict[str, Registration]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(tmp_path_factory.mktemp("nats"), credential=ours())
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def bus(nats: NatsServer) -> AsyncIterator[Bus]:
    connection = await Bus.connect(nats.url, nats.login)
    yield connection
    await connection.close()


def registry(bus: Bus) -> Registry:
    return Registry(bus, ttl_s=TTL_S, heartbeat_s=HEARTBEAT_S)


def instance(instance_id: str) -> Registration:
    return Registration(instance_id=instance_id, state=INSTANCE_STATE_READY)


class Watcher:
    """Collects the views of a registry and waits for one that fits."""

    def __init__(self, bus: Bus) -> None:
        self.views: list[View] = []
        self._grew = asyncio.Condition()
        self._task = asyncio.create_task(self._collect(registry(bus)))

    async def _collect(self, watched: Registry) -> None:
        async with contextlib.aclosing(watched.watch()) as views:
            async for view in views:
                async with self._grew:
                    self.views.append(view)
                    self._grew.notify_all()

    async def until(self, fits: Callable[[View], bool], timeout_s: float = 10.0) -> View:
        async with self._grew, asyncio.timeout(timeout_s):
            await self._grew.wait_for(lambda: bool(self.views) and fits(self.views[-1]))
            return self.views[-1]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest_asyncio.fixture
async def watcher(bus: Bus) -> AsyncIterator[Watcher]:
    collecting = Watcher(bus)
    yield collecting
    await collecting.stop()


async def test_a_state_change_is_seen_and_a_withdrawn_instance_is_gone_at_once(
    bus: Bus, watcher: Watcher
) -> None:
    own = registry(bus)
    await own.announce(instance("gen-a"))
    await watcher.until(lambda view: "gen-a" in view)
    await own.update(state=INSTANCE_STATE_DRAINING)
    await watcher.until(lambda view: view["gen-a"].state == INSTANCE_STATE_DRAINING)
    before = time.monotonic()
    await own.withdraw()
    await watcher.until(lambda view: "gen-a" not in view)
    assert time.monotonic() - before < TTL_S / 2


async def test_an_instance_is_withdrawn_also_where_a_heartbeat_takes_the_cancellation(
    bus: Bus, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, beats = registry(bus), asyncio.Event()
    await own.announce(instance("gen-d"))
    await watcher.until(lambda view: "gen-d" in view)

    async def answered_in_the_same_turn() -> None:
        beats.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    monkeypatch.setattr(own, "_beat", answered_in_the_same_turn)
    async with asyncio.timeout(10):
        await beats.wait()
        await own.withdraw()
    assert "gen-d" not in await watcher.until(lambda view: "gen-d" not in view)


async def test_the_first_view_of_a_new_watcher_is_complete(bus: Bus) -> None:
    owners = [registry(bus) for _ in range(8)]
    for index, owner in enumerate(owners):
        await owner.announce(instance(f"full-{index}"))
    late = Watcher(bus)
    await late.until(lambda view: True)
    assert {f"full-{index}" for index in range(8)} <= late.views[0].keys()
    await late.stop()
    for owner in owners:
        await owner.withdraw()


async def test_an_instance_without_heartbeat_expires_and_a_living_one_stays(
    nats: NatsServer, bus: Bus, watcher: Watcher
) -> None:
    living = registry(bus)
    await living.announce(instance("living"))
    doomed_bus = await Bus.connect(nats.url, nats.login)
    doomed = registry(doomed_bus)
    await doomed.announce(instance("doomed"))
    await watcher.until(lambda view: {"living", "doomed"} <= view.keys())
    await doomed_bus.close()
    await watcher.until(lambda view: "doomed" not in view, timeout_s=3 * TTL_S)
    assert "living" in watcher.views[-1]
    await living.withdraw()
    await doomed.withdraw()


async def test_no_living_instance_leaves_any_view_while_nats_is_away(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, credential=ours())
    port = int(server.url.rsplit(":", 1)[1])
    owner_bus, watching_bus = (
        await Bus.connect(server.url, server.login),
        await Bus.connect(server.url, server.login),
    )
    owner, dead = registry(owner_bus), registry(watching_bus)
    await owner.announce(instance("gen-b"))
    await dead.announce(instance("dies-meanwhile"))
    watching = Watcher(watching_bus)
    await watching.until(lambda view: len(view) == 2)
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    assert dead._heartbeat is not None
    dead._heartbeat.cancel()
    away = asyncio.get_running_loop().time() + 2 * TTL_S
    with pytest.raises(TimeoutError):  # longer than any lifetime: nobody may expire meanwhile
        async with asyncio.timeout_at(away):
            await watching.until(lambda view: len(view) < 2)
    server = await NatsServer.start(tmp_path, port, credential=ours())
    await watching.until(lambda view: view.keys() == {"gen-b"})
    assert all("gen-b" in view for view in watching.views if len(view) > 0)
    assert watching.views[-2].keys() == {"gen-b", "dies-meanwhile"}
    await watching.stop()
    await owner.withdraw()
    await owner_bus.close()
    await watching_bus.close()
    await server.stop()


async def _stored(bus: Bus, run_id: str) -> list[tuple[str, bytes]]:
    """All events of a run, as a subscriber of NATS gets them."""
    stream, subject = bus.jetstream(), f"run.{run_id}.events"
    known = (await stream.stream_info("runs", subjects_filter=subject)).state.subjects
    reader = await stream.subscribe(subject, stream="runs", ordered_consumer=True)
    messages = [await reader.next_msg(10) for _ in range((known or {})[subject])]
    await reader.unsubscribe()
    return [((message.headers or {})["Nats-Msg-Id"], message.data) for message in messages]


async def test_events_are_stored_in_order_once(bus: Bus) -> None:
    stream = EventStream(bus)
    for index in [*range(50), 7, 8]:  # 7 and 8 are sent twice
        stream.publish("order", f"event-{index}", str(index).encode())
    stream.publish("another-run", "x", b"not mine")
    stream.publish("order", "last", b"last")
    assert await stream.flush(10)
    found = await _stored(bus, "order")
    assert [payload for _, payload in found] == [*(str(index).encode() for index in range(50)), b"last"]
    await stream.close()


async def test_events_published_while_nats_is_killed_are_stored_once(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, credential=ours())
    port = int(server.url.rsplit(":", 1)[1])
    bus = await Bus.connect(server.url, server.login)
    stream = EventStream(bus)
    stream.publish("killed", "before", b"before")
    assert await stream.flush(10)
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    for index in range(20):
        stream.publish("killed", f"during-{index}", b"during")
    server = await NatsServer.start(tmp_path, port, credential=ours())
    stream.publish("killed", "after", b"after")
    assert await stream.flush(20)
    found = await _stored(bus, "killed")
    assert [event_id for event_id, _ in found] == ["before", *(f"during-{i}" for i in range(20)), "after"]
    assert stream.dropped == 0
    await stream.close()
    await bus.close()
    await server.stop()


async def test_publishing_does_not_wait_and_a_huge_event_is_refused_with_its_limit(bus: Bus) -> None:
    stream = EventStream(bus)
    before = time.monotonic()
    for index in range(1000):
        stream.publish("quick", f"quick-{index}", b"x")
    assert time.monotonic() - before < 0.5
    with pytest.raises(InvalidRequest, match=str(MAX_EVENT_BYTES)):
        stream.publish("quick", "huge", b"x" * (MAX_EVENT_BYTES + 1))
    assert await stream.flush(20)
    await stream.close()


async def test_a_missing_server_is_named_in_time() -> None:
    with pytest.raises(Unavailable, match=r"nats://127\.0\.0\.1:9"):
        await Bus.connect("nats://127.0.0.1:9", Login(None), timeout_s=0.5)


async def test_a_taken_port_is_named(nats: NatsServer, tmp_path: Path) -> None:
    port = int(nats.url.rsplit(":", 1)[1])
    with pytest.raises(PortInUse, match=str(port)):
        await NatsServer.start(tmp_path, port, credential=ours())


async def test_a_stopped_server_leaves_no_process_and_no_open_port(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, credential=ours())
    assert server.running
    await server.stop()
    assert not server.running
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))


async def test_in_a_cluster_registry_and_events_survive_the_loss_of_a_server(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        ports = [each.getsockname()[1] for each in sockets]
    routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports[3:])
    servers = []
    for index, (port, route) in enumerate(zip(ports[:3], ports[3:], strict=True)):
        config = tmp_path / f"{index}.conf"
        config.write_text(
            f'server_name: n{index}\nhost: "127.0.0.1"\nport: {port}\n'
            "authorization {\n  user: me\n  password: hidden\n}\n"
            f'jetstream {{\n  store_dir: "{tmp_path}/store{index}"\n  max_file_store: 1GB\n}}\n'
            f'cluster {{\n  name: three\n  host: "127.0.0.1"\n  port: {route}\n  routes: [{routes}]\n}}\n'
        )
        servers.append(await ProcessGroup.start([find_binary(), "--config", str(config)]))
    credentials = tmp_path / "credentials"
    credentials.write_text("me:hidden\n")
    credentials.chmod(0o600)
    buses = [
        await Bus.connect(f"nats://127.0.0.1:{port}", Login(credentials), replicas=3) for port in ports[:2]
    ]
    try:
        own = registry(buses[0])
        watcher = Watcher(buses[1])
        await own.announce(instance("here"))
        await watcher.until(lambda view: "here" in view, 30)
        bucket = await buses[1].jetstream().stream_info("KV_registry")
        assert bucket.config.num_replicas == 3
        # The one that leads the bucket: the others choose a new leader among them.
        leader = int(bucket.cluster.leader.removeprefix("n"))
        await servers[leader].stop(5.0)
        await own.announce(instance("again"))
        await watcher.until(lambda view: "again" in view, 30)
        await watcher.stop()
        await own.withdraw()
    finally:
        for bus in buses:
            await bus.close()
        for server in servers:
            await server.stop(5.0)
