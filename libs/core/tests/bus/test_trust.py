"""Who may use a NATS server, and whose registrations count, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from nats.aio.client import Client
from nats.errors import Error as NatsError

from flotilla.common.v1.registration_pb2 import INSTANCE_STATE_READY, Registration
from flotilla_core import errors
from flotilla_core.bus import Bus, EventStream, Login, NatsServer, Registry
from flotilla_core.bus.connection import COORDINATOR, SERVICE
from flotilla_core.bus.server import find_binary
from flotilla_core.config.stack import NatsConfig, StackConfig, TlsConfig
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust import RegistrationSigner, RegistrationVerifier
from flotilla_core.trust import registrations as trust_registrations
from flotilla_core.trust.certificates import make_certificates

USERS = 'authorization { users = [ { user: "ours", password: "pass word" } ] }'
SETTINGS = {
    "users": USERS,
    "token": 'authorization { token: "a-token" }',
    "nobody asked": "",
    "a user for who names none": f'{USERS[:-4]}, {{ user: "all", password: "" }} ] }}\nno_auth_user: all',
}


@contextlib.asynccontextmanager
async def foreign_server(folder: Path, settings: str) -> AsyncIterator[str]:
    """A server of a user's own, with these settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "theirs.conf"
    store = folder / "jetstream"
    config.write_text(
        f'host: "127.0.0.1"\nport: {port}\njetstream {{\n  store_dir: "{store}"\n}}\n{settings}\n'
    )
    with (folder / "theirs.log").open("wb") as log:
        group = await ProcessGroup.start([find_binary(), "--config", str(config)], stdout=log, stderr=log)
    try:
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                assert group.returncode is None, (folder / "theirs.log").read_text()
                await asyncio.sleep(0.02)
        yield f"nats://127.0.0.1:{port}"
    finally:
        await group.stop(5)


def login(folder: Path, text: str | None, *, mode: int = 0o600, insecure: bool = False) -> Login:
    file = None
    if text is not None:
        file = folder / "credentials"
        file.write_text(text)
        file.chmod(mode)
    nats = NatsConfig(url="nats://127.0.0.1:1", credentials_file=file, insecure=insecure)
    return Login.of_stack(nats, folder)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(tmp_path / "nats")
    yield server
    await server.stop()


async def test_our_own_server_takes_nobody_without_its_password_which_no_other_user_can_see(
    nats: NatsServer, tmp_path: Path
) -> None:
    for options in ({}, {"user": "flotilla", "password": "guess"}, {"token": "guess"}):
        with pytest.raises(Exception, match=r"(?i)authorization"):
            await Client().connect(nats.url, allow_reconnect=False, error_cb=_ignored, **options)
    files = ("credentials", "coordinator-credentials")
    passwords = [(tmp_path / "nats" / file).read_text().strip().partition(":")[2] for file in files]
    assert [len(password) for password in passwords] == [64, 64] and len(set(passwords)) == 2
    for file in ("nats.conf", *files):
        assert stat.S_IMODE((tmp_path / "nats" / file).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "nats").stat().st_mode) == 0o700
    for file in ("cmdline", "environ"):
        shown = Path(f"/proc/{nats.pid}/{file}").read_bytes()
        assert not [password for password in passwords if password.encode() in shown]
    assert not [password for password in passwords if password in nats.url + nats.log.read_text()]


async def _ignored(_: Exception) -> None:
    """The refusal is asserted where it is raised."""


async def test_the_password_changes_with_each_start_and_who_was_connected_is_so_again(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path)
    port, first = int(server.url.rpartition(":")[2]), (tmp_path / "credentials").read_text()
    bus = await Bus.connect(server.url, server.login)
    await server.stop()
    server = await NatsServer.start(tmp_path, port)
    async with asyncio.timeout(15):
        await bus.reconnected(0)
    assert (tmp_path / "credentials").read_text() != first
    await bus.close()
    await server.stop()


@pytest.mark.parametrize(("settings", "text"), [("users", "ours:pass word\n"), ("token", "a-token")])
async def test_a_server_of_the_users_own_is_used_with_its_credentials(
    tmp_path: Path, settings: str, text: str
) -> None:
    async with foreign_server(tmp_path, SETTINGS[settings]) as url:
        bus = await Bus.connect(url, login(tmp_path, text))
        await Registry(bus, "secret").announce(Registration(instance_id="a"))
        assert bus.connected
        await bus.close()


async def test_a_server_at_tls_is_shown_our_certificate_and_shows_its_own(tmp_path: Path) -> None:
    ours, theirs = (make_certificates(tmp_path / name, ["a"])[0] for name in ("ours", "theirs"))
    places = {"cert_file": "certificate.pem", "key_file": "key.pem", "ca_file": "ca.pem"}
    served = "\n".join(f'  {key}: "{ours / file}"' for key, file in places.items())
    async with foreign_server(tmp_path, f"{USERS}\ntls {{\n{served}\n  verify: true\n}}") as address:
        url = address.replace("nats://", "tls://")

        def with_certificate_of(folder: Path) -> Login:
            login(tmp_path, "ours:pass word")
            nats = NatsConfig(url=url, credentials_file=tmp_path / "credentials")
            tls = TlsConfig(
                certificate_file=folder / "certificate.pem",
                key_file=folder / "key.pem",
                ca_file=folder / "ca.pem",
            )
            return Login.of_stack(nats, tmp_path, tls)

        bus = await Bus.connect(url, with_certificate_of(ours))
        await Registry(bus, "secret").announce(Registration(instance_id="a"))
        await bus.close()
        with pytest.raises(errors.Unavailable):
            await Bus.connect(url, with_certificate_of(theirs), timeout_s=2.0)


@pytest.mark.parametrize("text", [None, "ours:wrong", "wrong"])
async def test_a_server_that_refuses_us_is_named_with_the_key_to_set(
    tmp_path: Path, text: str | None
) -> None:
    async with foreign_server(tmp_path, USERS) as url:
        with pytest.raises(errors.Unauthenticated, match=r"nats\.credentials_file") as caught:
            await Bus.connect(url, login(tmp_path, text), timeout_s=2.0)
        assert url in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"), [("nobody asked", None), ("a user for who names none", "ours:pass word")]
)
async def test_a_server_that_takes_anybody_is_refused_unless_the_stack_file_says_so(
    tmp_path: Path, settings: str, text: str | None
) -> None:
    async with foreign_server(tmp_path, SETTINGS[settings]) as url:
        with pytest.raises(errors.FailedPrecondition, match=r"takes anybody.*nats\.insecure: true") as caught:
            await Bus.connect(url, login(tmp_path, text))
        assert url in str(caught.value)
        bus = await Bus.connect(url, login(tmp_path, text, insecure=True))
        assert bus.connected
        await bus.close()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("ours:pass word", 0o644, "0644"),
        ("", 0o600, "empty"),
        ("-----BEGIN NATS USER JWT-----\nx\n", 0o600, "not supported"),
    ],
)
async def test_a_credentials_file_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    with pytest.raises(errors.InvalidConfig, match=words) as caught:
        await Bus.connect("nats://127.0.0.1:9", login(tmp_path, text, mode=mode))
    assert f"nats.credentials_file {tmp_path}/credentials" in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {"url": "nats://me:secret@host:4222"},
        {"credentials_file": "file"},
        {"insecure": True},
    ],
)
def test_nats_settings_that_make_no_sense_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="nats"):
        StackConfig.model_validate({"nats": section})


async def test_a_url_with_a_password_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidConfig, match="credentials_file") as caught:
        await Bus.connect("nats://me:hidden@127.0.0.1:9", Login(None))
    assert "hidden" not in str(caught.value)


def registration(instance_id: str, address: str = "127.0.0.1:1") -> Registration:
    return Registration(instance_id=instance_id, address=address, state=INSTANCE_STATE_READY)


async def test_a_registration_that_the_stack_did_not_sign_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with foreign_server(tmp_path, "") as url:
        bus = await Bus.connect(url, login(tmp_path, None, insecure=True))
        own, seen = Registry(bus, "secret"), []
        await own.announce(registration("own"))

        async def put(key: str, content: bytes) -> None:
            await bus.jetstream().publish(f"$KV.registry.{key}", content)

        async def until(key: str) -> None:
            async with asyncio.timeout(10), contextlib.aclosing(Registry(bus, "secret").watch()) as views:
                async for view in views:
                    seen.append(view)
                    if key in view:
                        return

        false = registration("false", "127.0.0.1:6666")
        signed_by_another = RegistrationSigner("another").sign(false)
        await put("plain", registration("plain").SerializeToString())
        await put("rubbish", b"\xff\xff")
        await put("false", signed_by_another)
        await put("false", signed_by_another)
        # Signed by us, and put in the place of another instance.
        await put("renamed", RegistrationSigner("secret").sign(registration("own-2")))
        with caplog.at_level(logging.WARNING):
            await Registry(bus, "secret").announce(registration("last"))
            await until("last")
        assert all(view.keys() <= {"own", "last"} for view in seen) and {"own", "last"} == seen[-1].keys()
        for key in ("plain", "rubbish", "false", "renamed"):
            assert len([one for one in caplog.messages if f"registration {key} is ignored" in one]) == 1
        await own.withdraw()
        await bus.close()


def test_an_old_registration_cannot_be_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    signer, reader = RegistrationSigner("secret"), RegistrationVerifier("secret")
    first, second = (signer.sign(registration("own")) for _ in range(2))
    assert reader.read("own", first) == registration("own")
    assert reader.read("own", second) == registration("own")
    for old in (first, second):
        assert reader.read("own", old) is None
    monkeypatch.setattr(trust_registrations, "_TOLERANCE_NS", 0)
    assert "ago" in str(RegistrationVerifier("secret").read("own", second))


def tls_of(folder: Path) -> TlsConfig:
    return TlsConfig(
        certificate_file=folder / "certificate.pem", key_file=folder / "key.pem", ca_file=folder / "ca.pem"
    )


def serial_shown(url: str) -> int:
    """The number of the certificate that a server of NATS shows now."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), 10) as plain:
        assert plain.recv(1 << 16).startswith(b"INFO ")
        with context.wrap_socket(plain) as shown:
            certificate = shown.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_our_own_server_asks_for_certificates_and_takes_replaced_ones(tmp_path: Path) -> None:
    tls, foreign = (tls_of(make_certificates(tmp_path / name, ["a"])[0]) for name in ("ours", "theirs"))
    server = await NatsServer.start(tmp_path / "nats", tls=tls)
    port = int(server.url.rpartition(":")[2])
    assert server.url.startswith("tls://")
    bus = await Bus.connect(server.url, server.login)
    await Registry(bus, "secret").announce(Registration(instance_id="a"))
    stranger = Login(tmp_path / "nats" / "coordinator-credentials", tls=foreign)
    with pytest.raises(errors.Unavailable):
        await Bus.connect(server.url, stranger, timeout_s=2.0)
    with pytest.raises((NatsError, OSError)):
        await Client().connect(server.url, allow_reconnect=False, error_cb=_ignored)
    before = await asyncio.to_thread(serial_shown, server.url)
    make_certificates(tmp_path / "ours", ["a"])
    server.read_again()
    async with asyncio.timeout(10):
        while await asyncio.to_thread(serial_shown, server.url) == before:
            await asyncio.sleep(0.02)
    # Of another authority from now on: who was connected shows what its own files hold then.
    for file in (tmp_path / "ours" / "ca.pem", tmp_path / "ours" / "ca.key"):
        file.unlink()
    make_certificates(tmp_path / "ours", ["a"])
    await server.stop()
    server = await NatsServer.start(tmp_path / "nats", port, tls=tls)
    async with asyncio.timeout(20):
        await bus.reconnected(0)
    await bus.close()
    await server.stop()


async def test_a_service_may_keep_the_registry_and_the_coordinator_alone_writes_events(
    nats: NatsServer, tmp_path: Path
) -> None:
    def login_of(user: str) -> Login:
        return Login.of_stack(NatsConfig(), tmp_path, None, user)

    service, coordinator = [await Bus.connect(nats.url, login_of(user)) for user in (SERVICE, COORDINATOR)]
    own = Registry(service, "secret")
    await own.announce(registration("own"))
    for reader in (Registry(service, "secret"), Registry(coordinator, "secret")):
        async with asyncio.timeout(10), contextlib.aclosing(reader.watch()) as views:
            async for view in views:
                if "own" in view:
                    break
    events, forged = EventStream(coordinator), EventStream(service)
    events.publish("run-1", "event-1", b"true")
    assert await events.flush(10)
    forged.publish("run-1", "event-2", b"false")
    assert not await forged.flush(1)
    with pytest.raises(TimeoutError):
        await service.client.request("$JS.API.STREAM.DELETE.runs", b"", timeout=0.3)
    info = await coordinator.jetstream().stream_info("runs")
    assert info.state.messages == 1
    await own.withdraw()
    await forged.close(0)
    await events.close()
    for bus in (service, coordinator):
        await bus.close()
