"""Servers for tests: each servicer says by its base class what it serves."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flotilla.common.v1.operate_pb2 import CheckRequest, CheckResponse
from flotilla.common.v1.operate_pb2_grpc import OperateServiceServicer, OperateServiceStub
from flotilla_core import rpc
from flotilla_core.config import BindConfig
from flotilla_core.rpc.errors_interceptor import GENERATED
from flotilla_core.trust import Credential
from flotilla_testing.credentials import ours


@asynccontextmanager
async def serving(
    *servicers: object, credential: Credential | None = None, **bind: Any
) -> AsyncIterator[str]:
    """Serve for the time of the block, by the credential that all tests share where none is named."""
    server = rpc.RpcServer(BindConfig(**bind), credential=credential or ours())
    for servicer in servicers:
        base = next(one for one in type(servicer).__mro__ if one.__module__.endswith(GENERATED))
        package = base.__module__.rpartition(".")[0]
        adder = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server")
        server.add(adder, servicer, f"{package}.{base.__name__.removesuffix('Servicer')}")
    try:
        yield await server.start()
    finally:
        await server.stop(0)


class Checked(OperateServiceServicer):
    """Answers the call of `check`."""

    async def Check(self, request: CheckRequest, context: Any) -> CheckResponse:
        return CheckResponse()


async def check(address: str, credential: Credential | None, attempts: int = 1) -> None:
    """Make one call that needs the role read."""
    async with rpc.connect(address, credential=credential) as channel:
        await rpc.unary(OperateServiceStub(channel).Check, CheckRequest(), timeout_s=10, attempts=attempts)
