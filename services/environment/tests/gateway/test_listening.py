"""The gateway listens on this host alone, unless it has a certificate."""

from __future__ import annotations

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
    with pytest.raises(InvalidConfig, match=r"environment\.gateway\.certificate"):
        await Gateway(GatewayConfig(host="0.0.0.0")).start()
    (tmp_path / "wrong.pem").write_text("no certificate")
    for name in ("wrong.pem", "nowhere.pem"):
        with pytest.raises(InvalidConfig, match="cannot be used"):
            await Gateway(GatewayConfig(host="0.0.0.0", certificate=tmp_path / name)).start()


async def test_with_a_certificate_it_serves_tls_alone(certificate: Path) -> None:
    gateway = Gateway(GatewayConfig(host="0.0.0.0", certificate=certificate))
    url = await gateway.start()
    port = url.rpartition(":")[2]
    try:
        trusts = ssl.create_default_context(cafile=certificate)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"https://localhost:{port}/tasks/next", ssl=trusts) as said:
                assert said.status == 401
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://localhost:{port}/tasks/next")
    finally:
        await gateway.stop()


async def test_a_port_that_another_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            await Gateway(GatewayConfig(host="127.0.0.1", port=port)).start()
