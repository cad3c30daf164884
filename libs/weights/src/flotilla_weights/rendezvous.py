"""The store at which members meet: opened by rank 0, which serves it to the others by gRPC.

Every call shows the credential of the stack, as between services, and carries the secret of the meeting. The secret
travels in the calls that form the group: so a member of another epoch, or of another run of the stack, is refused.

Invariants: nothing is answered or changed for who has not both; the server ends with the store that was opened; a
process that reaches for a store that does not answer can stop waiting at any time.
"""

from __future__ import annotations

import hmac
import secrets
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from flotilla.weights.v1 import store_pb2 as pb
from flotilla.weights.v1 import store_pb2_grpc
from flotilla_core import rpc
from flotilla_core.addresses import joined
from flotilla_core.config import BindConfig
from flotilla_core.errors import FailedPrecondition, PortInUse, Unauthenticated
from flotilla_core.rpc.interface import handed_credential, handed_ports
from flotilla_core.trust.refusals import RefusalLog
from flotilla_weights.store import EpochStore, Table, on_thread_of_stores

LOOK_EVERY_S = 0.02
_SECRET_BYTES = 32
_SERVICE_NAME = "flotilla.weights.v1.StoreService"


def new_secret() -> bytes:
    """Return the secret of a new meeting."""
    return secrets.token_bytes(_SECRET_BYTES)


def open_store(host: str, timeout_s: float, secret: bytes, what: str) -> tuple[EpochStore, int]:
    """Return a store on a free port of `host`, and the port; log lines call it `what`."""
    table = Table()
    server = rpc.RpcServer(BindConfig(host=host, ports=handed_ports()), credential=handed_credential())
    servicer = StoreServicer(table, secret, what)
    server.add(store_pb2_grpc.add_StoreServiceServicer_to_server, servicer, _SERVICE_NAME)
    try:
        address = on_thread_of_stores(server.start()).result()
    except PortInUse as error:
        raise FailedPrecondition(
            f"a weight group cannot be opened on {host}",
            why=error.why,
            next_step="set bind.host of the trainer to an address of its host; "
            "what peers dial instead is bind.advertise_host",
        ) from error
    store = EpochStore(table.answer, timeout_s)
    weakref.finalize(store, lambda: on_thread_of_stores(server.stop(0)))
    return store, int(address.rpartition(":")[2])


def reach_store(
    host: str, port: int, timeout_s: float, secret: bytes, check: Callable[[], None]
) -> EpochStore:
    """Return the store of a peer; `check` is called all the while, and what it raises ends the wait.

    Raises OSError or StoreError when no peer answers.
    """
    peer = _Peer(joined(host, port), timeout_s, secret)
    store = EpochStore(peer.answer, timeout_s)
    weakref.finalize(store, lambda: on_thread_of_stores(peer.close()))
    first, ends = store.start(pb.AskRequest()), time.monotonic() + timeout_s
    try:
        while not first.done():
            check()
            if time.monotonic() >= ends:
                raise TimeoutError(f"silent for {timeout_s:g} s")
            futures.wait([first], LOOK_EVERY_S)
    finally:
        first.cancel()
    store.ask(pb.AskRequest(), first)
    return store


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """Answers who knows the secret."""

    def __init__(self, table: Table, secret: bytes, what: str) -> None:
        self._table = table
        self._secret = secret
        self._what = what
        self._refusals = RefusalLog()

    async def Ask(self, request: pb.AskRequest, context: Any) -> pb.AskResponse:
        """Answer one question of a member."""
        if hmac.compare_digest(request.secret, self._secret):
            return await self._table.answer(request)
        error = Unauthenticated("the caller does not prove that it is in this weight group", where=self._what)
        self._refusals.tell(context.peer(), error)
        raise error


class _Peer:
    """The store of another process."""

    def __init__(self, address: str, timeout_s: float, secret: bytes) -> None:
        self._address = address
        # The caller's own limit comes first, and says more.
        self._timeout_s = timeout_s + 1.0
        self._secret = secret
        self._channel: grpc.aio.Channel | None = None
        self._ask: Any = None

    async def answer(self, question: pb.AskRequest) -> pb.AskResponse:
        """Ask once: a repeated question could count twice."""
        if self._channel is None:
            # Many members dial at once.
            self._channel = rpc.connect(self._address, credential=handed_credential(), dial_s=self._timeout_s)
            self._ask = store_pb2_grpc.StoreServiceStub(self._channel).Ask
        question.secret = self._secret
        limit_s = question.limit_s + self._timeout_s
        answer: pb.AskResponse = await rpc.unary(self._ask, question, timeout_s=limit_s, attempts=1)
        return answer

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close()
