r"""Several services of one kind in one process, for fleets larger than a machine has memory for processes.

Each has a slot, a port, a registration and a connection to NATS of its own; they share the event loop and the exporter
of spans. Invariant: when one of them ends, all of them do.

    python -m flotilla_testing.crowd generator flotilla_generator.service:GeneratorHostService \
        --first 8 --count 8 --stack stack.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.files import keep_private
from flotilla_core.logs import configure_logs
from flotilla_core.service import Host, Service
from flotilla_core.service.arguments import Arguments, parse_arguments
from flotilla_core.service.process import ServiceProcess

THREADS_EACH = 4


def main() -> int:
    """Run the slots `first` to `first + count - 1` until the process is asked to stop."""
    parser = argparse.ArgumentParser(prog="crowd")
    parser.add_argument("kind")
    parser.add_argument(
        "build",
        help="module:callable that builds one service; the module is loaded before any of them connects",
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0, help="how far it stands back for other processes")
    given, rest = parser.parse_known_args()
    os.nice(given.nice)
    keep_private()
    module, _, function = given.build.partition(":")
    build = getattr(import_module(module), function)
    names = [f"{given.kind}-{slot}" for slot in range(given.first, given.first + given.count)]
    configure_logs(names[0])
    shared = parse_arguments(given.kind, rest)
    arguments = [replace(shared, name=name, otlp=shared.otlp if name == names[0] else ()) for name in names]
    return asyncio.run(_run(given.kind, arguments, build))


class _Member(ServiceProcess):
    """One of them: a signal reaches the last one that began, which has all of them end at the same time."""

    def __init__(
        self,
        number: ServiceKind.ValueType,
        kind: str,
        arguments: Arguments,
        build: Callable[[Host], Service],
        members: Sequence[ServiceProcess],
    ) -> None:
        super().__init__(number, kind, arguments, build)
        self._members = members

    def end(self, grace_s: float | None = None) -> None:
        for one in self._members:
            ServiceProcess.end(one, grace_s)


async def _run(kind: str, arguments: list[Arguments], build: Callable[[Host], Service]) -> int:
    # Each member of a weight group waits for all others on a thread: fewer threads than that would wait without end.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_EACH * len(arguments)))
    number = ServiceKind.Value(f"SERVICE_KIND_{kind.upper()}")
    services: list[ServiceProcess] = []
    services += [_Member(number, kind, one, build, services) for one in arguments]
    running = [
        asyncio.create_task(one.run(), name=given.name)
        for one, given in zip(services, arguments, strict=True)
    ]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for service in services:
        service.end()
    return max(await asyncio.gather(*running))


if __name__ == "__main__":
    sys.exit(main())
