"""The gateway listens on this host alone, unless it has a certificate."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from flotilla_core.config import GatewayConfig
from flotilla_core.errors import InvalidConfig, PortInUse
from flotilla_environment.gateway.gateway import Gateway


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    file = tmp_path / "gateway.pem"
    file.write_bytes(
        made.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    return file


async def test_beyond_this_host_it_refuses_to_listen_without_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"without TLS: set certificate"):
        GatewayConfig(host="0.0.0.0")
    (tmp_path / "wrong.pem").write_text("no certificate")
    for name in ("wrong.pem", "nowhere.pem"):
        with pytest.raises(InvalidConfig, match="cannot be used"):
            await Gateway(GatewayConfig(host="0.0.0.0", certificate=tmp_path / name)).start()


async def test_with_a_certificate_it_serves_tls_to_others_and_agents_of_this_host_need_none(
    certificate: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gateway = Gateway(GatewayConfig(host="0.0.0.0", port=port, certificate=certificate))
    url = await gateway.start()
    try:
        assert url.startswith("http://127.0.0.1:") and not url.endswith(f":{port}")
        trusts = ssl.create_default_context(cafile=certificate)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"https://localhost:{port}/tasks/next", ssl=trusts) as said:
                assert said.status == 401
            async with http.get(f"{url}/tasks/next") as said:
                assert said.status == 401
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://localhost:{port}/tasks/next")
    finally:
        await gateway.stop()


async def test_the_connections_of_one_agent_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_environment.gateway.gateway.MOST_OF_AN_AGENT", 2)
    gateway = Gateway(GatewayConfig(host="127.0.0.1"))
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    answers = await gateway.answer(listening)

    async def asks() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: agent\r\n\r\n")
        try:
            return await reader.readline(), writer
        except ConnectionError:
            return b"", writer

    try:
        async with asyncio.timeout(10):
            said = [await asks() for _ in range(3)]
            assert [b"404" in line for line, _ in said] == [True, True, False]
            said[0][1].close()
            while not (await asks())[0]:  # The end of a connection has a way to go.
                pass
    finally:
        answers.close()
        await gateway.stop()


async def test_a_port_that_another_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        gateway = Gateway(GatewayConfig(host="127.0.0.1", port=port))
        with pytest.raises(PortInUse, match=str(port)):
            await gateway.start()
    assert await gateway.start() == f"http://127.0.0.1:{port}", "once it is free"
    await gateway.stop()
