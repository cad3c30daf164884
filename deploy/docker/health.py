"""Exit with 0 when the service of this container says by grpc.health.v1 that it serves, else with 1.

Health is the one call that needs no proof. With `bind.tls` in the stack file it takes the certificate of the service.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def channel_to(address: str) -> grpc.Channel:
    """Return a channel as the service speaks on its port."""
    file = Path(os.environ["FLOTILLA_STACK"])
    bind = (yaml.safe_load(file.read_text("utf-8")) or {}).get("bind") or {}
    if not bind.get("tls"):
        return grpc.insecure_channel(address)
    authorities, key, chain = (
        (file.parent / bind["tls"][name]).read_bytes() for name in ("ca_file", "key_file", "certificate_file")
    )
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authorities, key, chain))


def main() -> int:
    address = f"127.0.0.1:{os.environ['FLOTILLA_PORT']}"
    with channel_to(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}")
            return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
