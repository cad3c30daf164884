"""What `flotilla doctor` checks of the services that run: health, versions, and what each checks of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flotilla_coordinator.cli.finding import Finding, failed, passed, warning

if TYPE_CHECKING:
    from flotilla.common.v1.operate_pb2 import CheckResult
    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
    from flotilla_core.config import StackConfig

_DESCRIBE_S = 5.0
_CHECK_S = 30.0


async def service_checks(config: StackConfig) -> list[Finding]:
    """One line a service, and one for every check of its own; a stack that is down is no fault."""
    from flotilla_core.errors import FlotillaError
    from flotilla_core.trust import read_token
    from flotilla_launch.client import LauncherClient, find
    from flotilla_launch.guardian import starts_launcher_again, why_it_ended
    from flotilla_launch.paths import StackPaths

    paths = StackPaths.of(config.state_dir, config.name)
    file = find(paths)
    if file is None and starts_launcher_again(paths):
        return [warning("launcher", "it was killed, and is being started again", "flotilla logs launcher")]
    if file is None and (why := why_it_ended(paths)):
        return [failed("launcher", why, f"read {paths.log_file('launcher')}, then flotilla up")]
    if file is None:
        return [passed("services", f"stack {config.name!r} is not running")]
    try:
        async with LauncherClient.open(file) as launcher:
            processes = (await launcher.state()).processes
        token = read_token(config.bind, paths.directory)
    except FlotillaError as error:
        return [failed("launcher", str(error), f"kill -9 {file.pid}: its guardian starts another one")]
    services = [process for process in processes if process.kind]
    answers = await asyncio.gather(*(_service(process, token) for process in services))
    return [finding for answer in answers for finding in answer]


async def _service(process: ProcessStatus, token: str | None) -> list[Finding]:
    from flotilla.common.v1.operate_pb2 import CheckRequest, DescribeRequest
    from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
    from flotilla_core import rpc
    from flotilla_core.errors import FlotillaError, Mismatch
    from flotilla_core.protocol import check_protocol
    from flotilla_launch.health import is_serving

    name = process.name
    logs = f"flotilla logs {name}"
    if not process.address or not await is_serving(process.address, token):
        why = process.error.splitlines()[0] if process.error else "its health does not say SERVING"
        return [failed(name, why, f"read its log: {logs}")]
    channel = rpc.connect(process.address, token=token)
    stub = OperateServiceStub(channel)
    try:
        described = await rpc.unary(stub.Describe, DescribeRequest(), timeout_s=_DESCRIBE_S)
        check_protocol(described.registration)
        results = (await rpc.unary(stub.Check, CheckRequest(), timeout_s=_CHECK_S)).results
    except Mismatch as error:
        return [failed(name, str(error), "flotilla down, then flotilla up")]
    except FlotillaError as error:
        return [failed(name, str(error), f"read its log: {logs}")]
    finally:
        await channel.close()
    registration = described.registration
    versions = ", ".join(f"{key} {value}" for key, value in sorted(registration.versions.items()))
    found = f"serving, protocol {registration.protocol_version}, {versions}, {described.source_path}"
    return [passed(name, found), *(_own(name, result) for result in results)]


def _own(name: str, result: CheckResult) -> Finding:
    from flotilla.common.v1.operate_pb2 import CHECK_STATUS_FAILED, CHECK_STATUS_WARNING

    check = f"{name}: {result.name}"
    if result.status == CHECK_STATUS_FAILED:
        return failed(check, result.finding, result.remedy)
    if result.status == CHECK_STATUS_WARNING:
        return warning(check, result.finding, result.remedy)
    return passed(check, result.finding)
