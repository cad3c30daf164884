"""Who may use a NATS server, and whose registrations count, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from flotilla.common.v1.registration_pb2 import INSTANCE_STATE_READY, Registration
from flotilla_core import errors
from flotilla_core.bus import Bus, EventStream, Login, NatsServer, Registry
from flotilla_core.bus.connection import COORDINATOR, OWN_FILES, SERVICE
from flotilla_core.bus.server import find_binary
from flotilla_core.config.stack import NatsConfig, StackConfig
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust import Credential, write_secret
from flotilla_core.trust.authority import rotate
from flotilla_testing.credentials import credential, stranger

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
    return Login.of_stack(nats, folder, credential(folder))


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(tmp_path / "nats", credential=credential(tmp_path))
    yield server
    await server.stop()


async def test_our_own_server_takes_nobody_without_its_password_which_no_other_user_can_see(
    nats: NatsServer, tmp_path: Path
) -> None:
    shows = nats.login.encryption(with_certificate=True)
    for options in ({}, {"user": "flotilla", "password": "guess"}, {"token": "guess"}):
        with pytest.raises(Exception, match=r"(?i)authorization"):
            await Client().connect(nats.url, allow_reconnect=False, error_cb=_ignored, **shows, **options)
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
    server = await NatsServer.start(tmp_path, credential=credential(tmp_path))
    port, first = int(server.url.rpartition(":")[2]), (tmp_path / "credentials").read_text()
    bus = await Bus.connect(server.url, server.login)
    await server.stop()
    server = await NatsServer.start(tmp_path, port, credential=credential(tmp_path))
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
        await Registry(bus).announce(Registration(instance_id="a"))
        assert bus.connected
        await bus.close()


@pytest.mark.parametrize("first", ["true", "auto"])
async def test_a_server_at_tls_with_a_credential_of_the_stack_is_one_of_ours(
    tmp_path: Path, first: str
) -> None:
    """As another host reaches the server of the stack, by whatever address."""
    place = credential(tmp_path).path
    served = "".join(f'  {key}: "{place}"\n' for key in ("cert_file", "key_file", "ca_file"))
    settings = f"{USERS}\ntls {{\n{served}  verify: true\n  handshake_first: {first}\n}}"
    async with foreign_server(tmp_path, settings) as address:
        url = address.replace("nats://127.0.0.1", "tls://localhost")
        login(tmp_path, "ours:pass word")
        nats = NatsConfig(url=url, credentials_file=tmp_path / "credentials")
        bus = await Bus.connect(url, Login.of_stack(nats, tmp_path, credential(tmp_path)))
        await Registry(bus).announce(Registration(instance_id="a"))
        await bus.close()
        with pytest.raises(errors.Unavailable, match="is foreign: we trust"):
            await Bus.connect(url, Login.of_stack(nats, tmp_path, stranger(tmp_path)), timeout_s=2.0)


async def test_a_server_at_tls_of_others_is_known_by_its_authority_and_its_host(tmp_path: Path) -> None:
    key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=theirs", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made, *named, *files], check=True, capture_output=True)
    settings = f'{USERS}\ntls {{\n  cert_file: "{certificate}"\n  key_file: "{key}"\n}}'
    async with foreign_server(tmp_path, settings) as address:
        login(tmp_path, "ours:pass word")

        async def connect(host: str, ca_file: Path | None) -> None:
            url = address.replace("nats://127.0.0.1", f"tls://{host}")
            nats = NatsConfig(url=url, credentials_file=tmp_path / "credentials", ca_file=ca_file)
            known = Login.of_stack(nats, tmp_path, credential(tmp_path))
            await (await Bus.connect(url, known, timeout_s=2.0)).close()

        await connect("localhost", certificate)
        for host, ca_file in (("127.0.0.1", certificate), ("localhost", None)):
            with pytest.raises(errors.Unavailable):
                await connect(host, ca_file)


async def test_no_password_is_sent_to_what_listens_in_place_of_the_server(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def claims(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"proto":1}\r\n')
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while part := await reader.read(1 << 16):
                    heard.append(part)
        writer.close()

    (tmp_path / "nats").mkdir()
    file = tmp_path / OWN_FILES[SERVICE]
    file.write_text("service:hidden\n")
    file.chmod(0o600)
    false = await asyncio.start_server(claims, "127.0.0.1", 0)
    url = f"tls://127.0.0.1:{false.sockets[0].getsockname()[1]}"
    async with false:
        with pytest.raises(errors.Unavailable, match="speaks no TLS"):
            await Bus.connect(
                url, Login.of_stack(NatsConfig(), tmp_path, credential(tmp_path)), timeout_s=3.0
            )
    assert heard and b"hidden" not in b"".join(heard) and b"CONNECT" not in b"".join(heard)


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
        {"ca_file": "file"},
        {"url": "nats://host:4222", "ca_file": "file"},
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


async def test_what_is_no_registration_of_its_key_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with foreign_server(tmp_path, "") as url:
        bus = await Bus.connect(url, login(tmp_path, None, insecure=True))
        own, seen = Registry(bus), []
        await own.announce(registration("own"))

        async def put(key: str, content: bytes) -> None:
            await bus.jetstream().publish(f"$KV.registry.{key}", content)

        async def until(key: str) -> None:
            async with asyncio.timeout(10), contextlib.aclosing(Registry(bus).watch()) as views:
                async for view in views:
                    seen.append(view)
                    if key in view:
                        return

        # As an older release writes it: the registration, a time and a signature.
        inner = registration("older").SerializeToString()
        signature = bytes(range(128, 160))
        await put("older", b"\x0a" + bytes([len(inner)]) + inner + b"\x10\x01\x1a\x20" + signature)
        await put("rubbish", b"\xff\xff")
        await put("nothing", b"")
        for _ in range(2):
            await put("renamed", registration("own-2").SerializeToString())
        with caplog.at_level(logging.WARNING):
            await Registry(bus).announce(registration("last"))
            await until("last")
        assert all(view.keys() <= {"own", "last"} for view in seen) and {"own", "last"} == seen[-1].keys()
        for key in ("older", "rubbish", "nothing", "renamed"):
            (line,) = [one for one in caplog.messages if f"registration {key} is ignored" in one]
            assert "an older Flotilla" in line
        await own.withdraw()
        await bus.close()


def certificate_shown(url: str) -> bytes | None:
    """The certificate that a server of NATS shows now."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), 10) as plain, context.wrap_socket(plain) as shown:
        return shown.getpeercert(binary_form=True)


async def test_our_own_server_asks_for_certificates_and_takes_replaced_ones(tmp_path: Path) -> None:
    given = credential(tmp_path)
    server = await NatsServer.start(tmp_path / "nats", credential=given)
    port = int(server.url.rpartition(":")[2])
    assert server.url.startswith("tls://")
    bus = await Bus.connect(server.url, server.login)
    await Registry(bus).announce(Registration(instance_id="a"))
    other, (authorities, *_) = stranger(tmp_path), given.read()
    for trusted, words in (
        ("", "is foreign: we trust"),
        (authorities.decode(), "does not take our certificate"),
    ):
        write_secret(tmp_path / "foreign.pem", other.path.read_text() + trusted)
        foreign = Login(tmp_path / "nats" / "coordinator-credentials", Credential(tmp_path / "foreign.pem"))
        with pytest.raises(errors.Unavailable, match=words):
            await Bus.connect(server.url, foreign, timeout_s=2.0)
    without = server.login.encryption(with_certificate=False)
    for options in ({}, without, without | {"user": "coordinator", "password": "guess"}):
        with pytest.raises((NatsError, OSError)):
            await Client().connect(server.url, allow_reconnect=False, error_cb=_ignored, **options)
    before = await asyncio.to_thread(certificate_shown, server.url)
    rotate(tmp_path, 60)
    server.read_again()
    async with asyncio.timeout(10):
        while await asyncio.to_thread(certificate_shown, server.url) == before:
            await asyncio.sleep(0.02)
    # What was trusted before ends with the overlap, although its file is not written again then.
    write_secret(tmp_path / "old.pem", given.path.read_text())
    rotate(tmp_path, 1)
    server.read_again()
    old = Login(tmp_path / "nats" / "coordinator-credentials", Credential(tmp_path / "old.pem"))
    await (await Bus.connect(server.url, old, timeout_s=5.0)).close()
    within = given.current()
    while given.current() is within:
        await asyncio.sleep(0.05)
    server.read_again()
    with pytest.raises(errors.Unavailable):
        await Bus.connect(server.url, old, timeout_s=2.0)
    # Who was connected shows what its own file holds now.
    await server.stop()
    server = await NatsServer.start(tmp_path / "nats", port, credential=given)
    async with asyncio.timeout(20):
        await bus.reconnected(0)
    await bus.close()
    await server.stop()


ABOVE_A_SERVICE = (
    "run.of-eve.events",
    *(f"$JS.API.STREAM.{what}.runs" for what in ("DELETE", "PURGE", "INFO", "MSG.GET")),
    "$JS.API.STREAM.CREATE.eve",
    "$JS.API.STREAM.DELETE.KV_registry",
    "$SYS.REQ.SERVER.PING",
    "anything",
)


async def test_a_service_may_keep_the_registry_and_the_coordinator_alone_writes_events(
    nats: NatsServer, tmp_path: Path
) -> None:
    def login_of(user: str) -> Login:
        return Login.of_stack(NatsConfig(), tmp_path, credential(tmp_path), user)

    service, coordinator = [await Bus.connect(nats.url, login_of(user)) for user in (SERVICE, COORDINATOR)]
    own = Registry(service)
    await own.announce(registration("own"))
    for reader in (Registry(service), Registry(coordinator)):
        async with asyncio.timeout(10), contextlib.aclosing(reader.watch()) as views:
            async for view in views:
                if "own" in view:
                    break
    events, forged = EventStream(coordinator), EventStream(service)
    events.publish("run-1", "event-1", b"true")
    assert await events.flush(10)
    forged.publish("run-1", "event-2", b"false")
    assert not await forged.flush(1)
    said: list[str] = []

    async def note(error: Exception) -> None:
        said.append(str(error).lower())

    other = Client()
    await other.connect(nats.url, allow_reconnect=False, error_cb=note, **login_of(SERVICE).options())
    for subject in ABOVE_A_SERVICE:
        with pytest.raises((NatsError, TimeoutError)):
            await other.request(subject, b"{}", timeout=0.2)
    for subject in (">", "run.*.events", "$KV.registry.*"):
        await other.subscribe(subject)
    await other.flush()
    async with asyncio.timeout(5):  # for what the client tells of the last ones
        while sum("permissions violation" in line for line in said) < len(ABOVE_A_SERVICE) + 3:
            await asyncio.sleep(0.05)
    await other.close()
    info = await coordinator.jetstream().stream_info("runs")
    assert info.state.messages == 1
    await own.withdraw()
    await forged.close(0)
    await events.close()
    for bus in (service, coordinator):
        await bus.close()
