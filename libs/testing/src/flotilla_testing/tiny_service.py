"""A real service process without a model: port, health, announcement, drain, as the launcher sees it.

It imports gRPC and nothing of ours, so that a stack of several is up in a second.

`FLOTILLA_TEST_BEHAVIOUR` is a JSON object {name: behaviour}: "die", "die while PATH" (is there), "hang" (never
READY), "stubborn" (ignores SIGTERM), "parent" (has a grandchild in a session of its own and shared memory), "flood"
(prints FLOOD_BYTES without a newline at SIGUSR1, and is killed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import grpc.aio
from grpc_health.v1.health import OVERALL_HEALTH, aio
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

FLOOD_BYTES = 200 << 20


async def serve(name: str, kind: str, directory: Path, port: int, behaviour: str) -> None:
    server, health = grpc.aio.server(), aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    pem = (directory / "credential.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([(pem, pem)], pem, require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port(f'127.0.0.1:{port}', credentials)}"
    await server.start()
    if behaviour == "parent":
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        await asyncio.create_subprocess_exec(*sleeper, start_new_session=True)
        segment = shared_memory.SharedMemory(create=True, size=1024)
        sys.stdout.write(f"segment {segment.name}\n")
        sys.stdout.flush()
        # As after a crash: nobody in this process will unlink it.
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    announcement = {
        "name": name,
        "kind": kind,
        "pid": os.getpid(),
        "address": address,
        "instance_id": f"{name}-x",
    }
    aside = directory / "instances" / f".{name}"
    aside.write_text(json.dumps(announcement))
    aside.replace(directory / "instances" / f"{name}.json")
    stopping = asyncio.Event()
    on_sigterm = (lambda: None) if behaviour == "stubborn" else stopping.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    if behaviour == "flood":
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, flood)
    if behaviour == "hang":
        await health.set(OVERALL_HEALTH, HealthCheckResponse.NOT_SERVING)
    await stopping.wait()
    await server.stop(0)


def flood() -> None:
    for _ in range(FLOOD_BYTES >> 20):
        sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str) -> None:
    parser = argparse.ArgumentParser()
    for option in ("--name", "--stack", "--nats", "--otlp", "--port"):
        parser.add_argument(option, required=True)
    arguments = parser.parse_args()
    behaviour = json.loads(os.environ.get("FLOTILLA_TEST_BEHAVIOUR", "{}")).get(arguments.name, "")
    if behaviour == "die" or (behaviour.startswith("die while ") and Path(behaviour[10:]).exists()):
        sys.stderr.write("loading the model\nRuntimeError: the model folder is empty\nbye\n")
        sys.exit(7)
    directory = Path(arguments.stack).parent
    asyncio.run(serve(arguments.name, kind, directory, int(arguments.port), behaviour))
