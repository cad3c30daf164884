"""Exit with 0 when the service of this container says by grpc.health.v1 that it serves, else with 1.

It shows the credential of the service: a file, or a folder with three.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0
FOLDER = ("ca.crt", "tls.key", "tls.crt")
NAME = (("grpc.ssl_target_name_override", "service.flotilla"),)


def credential() -> grpc.ChannelCredentials:
    """Return the authorities, the key and the certificate that the stack file names."""
    file = Path(os.environ["FLOTILLA_STACK"])
    stack = yaml.safe_load(file.read_text("utf-8"))
    own = Path(stack.get("state_dir", ".flotilla"), stack.get("name", "local"), "credential.pem")
    place = file.parent / ((stack.get("bind") or {}).get("credential_file") or own)
    files = [place / name for name in FOLDER] if place.is_dir() else [place] * len(FOLDER)
    return grpc.ssl_channel_credentials(*(one.read_bytes() for one in files))


def main() -> int:
    address = f"127.0.0.1:{os.environ['FLOTILLA_PORT']}"
    with grpc.secure_channel(address, credential(), NAME) as channel:
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
