"""The table of roles names every call that a server of ours serves, and nothing else."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import flotilla
from flotilla.common.v1.roles import ROLES
from flotilla_core.rpc.server import SERVICE_NAMES
from flotilla_core.trust.roles import LADDER, READ

ROOT = Path(flotilla.__path__[0])


def test_every_call_has_a_role_and_a_role_has_a_call() -> None:
    modules = (
        import_module(".".join(("flotilla", *path.relative_to(ROOT).with_suffix("").parts)))
        for path in sorted(ROOT.rglob("*_pb2.py"))
    )
    services = [
        *health_pb2.DESCRIPTOR.services_by_name.values(),
        *(service for module in modules for service in module.DESCRIPTOR.services_by_name.values()),
        *trace_service_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    calls = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    calls |= {f"/{name}/ServerReflectionInfo" for name in SERVICE_NAMES}
    assert reflection.SERVICE_NAME in SERVICE_NAMES
    assert set(ROLES) == calls
    assert set(ROLES.values()) == set(LADDER)
    # Any holder may ask whether a service is well, and nobody else.
    assert {ROLES[call] for call in calls if call.startswith("/grpc.health.")} == {READ}
