"""The outermost edge of a service process.

Invariant: whatever goes wrong ends in one message on stderr (`error: what (where): why. next`) and exit code 1;
what nobody expected also leaves its traceback in the log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Callable, Sequence

import structlog

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import FlotillaError, Internal
from flotilla_core.files import keep_private
from flotilla_core.logs import configure_logs, tolerate_lost_lines
from flotilla_core.service.arguments import parse_arguments
from flotilla_core.service.host import Host, Service
from flotilla_core.service.process import ServiceProcess


def run_service(
    kind: ServiceKind.ValueType, build: Callable[[Host], Service], arguments: Sequence[str] | None = None
) -> int:
    """Run the service that `build` makes until it is told to stop; returns the exit code.

    `arguments` are those of the command line where they are not given.
    """
    keep_private()
    faulthandler.enable()
    # A loop that hangs cannot answer DumpStacks: SIGUSR1 writes the stacks of all threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    kind_name = ServiceKind.Name(kind).removeprefix("SERVICE_KIND_").lower()
    try:
        given = parse_arguments(kind_name, arguments)
        tolerate_lost_lines()
        configure_logs(given.name)
        with names_full_disk("the service cannot write its files", given.state_dir):
            return asyncio.run(ServiceProcess(kind, kind_name, given, build).run())
    except FlotillaError as error:
        return _say(error)
    except KeyboardInterrupt:
        return 130
    # Nothing is above that could handle it.
    except Exception as error:  # noqa: BLE001
        structlog.get_logger().exception("the service failed unexpectedly")
        return _say(Internal("the service failed", where=kind_name, why=f"{type(error).__name__}: {error}"))


def _say(error: FlotillaError) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    return 1
