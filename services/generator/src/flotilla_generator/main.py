"""`flotilla-generator`: one replica of the generator service."""

from __future__ import annotations

import sys

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_core.service import Arguments, Host, Service, run_service


def import_engine(arguments: Arguments) -> None:
    """Import what the engine of the stack needs, before the process has a second thread."""
    config = arguments.stack.generator
    if config.engine == "vllm":
        from flotilla_generator.engine.vllm.boot import CACHE
        from flotilla_generator.engine.vllm.engine_process import import_once

        import_once(config, arguments.state_dir / CACHE)


def build(host: Host) -> Service:
    """Return the service inside its host."""
    from flotilla_generator.service import GeneratorHostService

    return GeneratorHostService(host)


def main() -> None:
    """Run one replica until SIGTERM."""
    sys.exit(run_service(SERVICE_KIND_GENERATOR, build, first=import_engine))


if __name__ == "__main__":
    main()
