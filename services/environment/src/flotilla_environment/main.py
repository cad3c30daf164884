"""`flotilla-environment`: one replica of the environment service."""

from __future__ import annotations

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_ENVIRONMENT
from flotilla_core.service import Host, Service, run_service


def build(host: Host) -> Service:
    """Return the service inside its host."""
    from flotilla_environment.service import EnvironmentHostService

    return EnvironmentHostService(host.stack.environment, host.files)


def main() -> None:
    run_service(SERVICE_KIND_ENVIRONMENT, build)


if __name__ == "__main__":
    main()
