"""`flotilla-generator`: one replica of the generator service."""

from __future__ import annotations

import sys

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_core.service import Host, Service, run_service


def build(host: Host) -> Service:
    """Return the service inside its host."""
    from flotilla_generator.service import GeneratorHostService

    return GeneratorHostService(host)


def main() -> None:
    """Run one replica until SIGTERM."""
    sys.exit(run_service(SERVICE_KIND_GENERATOR, build))


if __name__ == "__main__":
    main()
