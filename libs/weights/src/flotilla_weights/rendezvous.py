"""The store that the members of an epoch meet at: opened by the sender, reached by the receivers.

Who connects says 16 random bytes and is told 16 others. From then on each end speaks frames under a key of its own,
which is derived from both and from the secret of the epoch (AES-256-GCM, numbered). The secret travels in the calls
that form the group.

Invariants: nothing is answered or changed for who does not prove the secret, and it costs a connection for five
seconds at most, and no thread; a frame that was changed, repeated or left out ends its connection; one thread serves
all members, and ends with the store that was opened; a process that reaches for a store that does not answer can stop
waiting at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flotilla_core.addresses import joined
from flotilla_core.errors import FailedPrecondition, Unauthenticated
from flotilla_core.rpc.interface import listener
from flotilla_core.trust.refusals import RefusalLog
from flotilla_weights.store import Answer, EpochStore, Question, StoreError, Table, Verb, packed, unpacked

LOOK_EVERY_S = 0.02
PROOF_S = 5.0
"""The longest time that a connection may stay without a proof."""
MOST_UNPROVEN = 1024
_SECRET_BYTES = 32
GREETING = b"flotilla weights 1\n"
_NONCE = 16
_LENGTH = struct.Struct(">I")
_PROOF_BYTES = 256
_MOST_BYTES = 64 << 20
_MEMBER, _SENDER = b"member", b"sender"
_YES, _NO, _ERROR = b"y", b"n", b"e"


def new_secret() -> bytes:
    """Return the secret of a new epoch."""
    return secrets.token_bytes(_SECRET_BYTES)


def open_store(host: str, timeout_s: float, secret: bytes, what: str) -> tuple[EpochStore, int]:
    """Return a store on a free port of `host`, and the port; log lines call it `what`."""
    try:
        listening = listener(host)
    except OSError as error:
        raise FailedPrecondition(
            f"a weight group cannot be opened on {host}",
            why=str(error),
            next_step="set bind.host of the trainer to an address of its host; "
            "what peers dial instead is bind.advertise_host",
        ) from error
    port: int = listening.getsockname()[1]
    server = _Server(listening, Table(), secret, what)
    threading.Thread(target=server.serve, name="weights-store", daemon=True).start()
    store = EpochStore(server.table, timeout_s)
    weakref.finalize(store, server.stop)
    return store, port


def reach_store(
    host: str, port: int, timeout_s: float, secret: bytes, check: Callable[[], None]
) -> EpochStore:
    """Return the store of a peer; `check` is called all the while, and what it raises ends the wait.

    Raises OSError, RuntimeError or UnicodeError when no peer answers.
    """
    answer: futures.Future[_Member] = futures.Future()

    def dial() -> None:
        try:
            answer.set_result(_Member.dialled(host, port, timeout_s, secret))
        # A host that cannot be a name of one is refused by its encoding.
        except (OSError, RuntimeError, UnicodeError) as error:
            answer.set_exception(error)

    # Nothing interrupts the search for the address of a name.
    threading.Thread(target=dial, name="weights-dial", daemon=True).start()
    ends = time.monotonic() + timeout_s
    with ExitStack() as unless_reached:
        unless_reached.callback(answer.add_done_callback, _hang_up)
        while not answer.done():
            check()
            if time.monotonic() >= ends:
                raise TimeoutError(f"silent for {timeout_s:g} s")
            futures.wait([answer], LOOK_EVERY_S)
        unless_reached.pop_all()
    return EpochStore(answer.result(), timeout_s)


def _hang_up(late: futures.Future[_Member]) -> None:
    if late.exception() is None:
        late.result().close()


class _Seal:
    """One direction of a connection: its frames, numbered and under its key."""

    def __init__(self, secret: bytes, end: bytes, nonces: bytes) -> None:
        key = hashlib.blake2b(end + nonces, key=hashlib.sha256(secret).digest(), digest_size=32).digest()
        self._cipher = AESGCM(key)
        self._count = 0

    def sealed(self, message: bytes) -> bytes:
        """Return the next frame, after its length."""
        frame = self._cipher.encrypt(self._number(), message, None)
        return _LENGTH.pack(len(frame)) + frame

    def opened(self, frame: bytes) -> bytes:
        """Return what the next frame holds; raise InvalidTag for any other one."""
        return self._cipher.decrypt(self._number(), frame, None)

    def _number(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")


class _Member:
    """The desk of a member: its connection, and its copy of what was set."""

    def __init__(self, connection: socket.socket, timeout_s: float, secret: bytes, nonces: bytes) -> None:
        self.values: dict[str, bytes] = {}
        self._connection = connection
        self._timeout_s = timeout_s
        self._out, self._back = _Seal(secret, _MEMBER, nonces), _Seal(secret, _SENDER, nonces)
        self._lock = threading.Lock()

    @classmethod
    def dialled(cls, host: str, port: int, timeout_s: float, secret: bytes) -> _Member:
        """Connect and prove the secret; the first answer proves the peer's."""
        # The caller's own limit comes first, and says more.
        connection = socket.create_connection((host, port), timeout_s + 1.0)
        with ExitStack() as unless_proven:
            unless_proven.callback(connection.close)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own = os.urandom(_NONCE)
            try:
                connection.sendall(GREETING + own)
                desk = cls(connection, timeout_s, secret, own + _received(connection, _NONCE))
                desk.ask(Question(Verb.COUNT))
            except (ConnectionError, StoreError) as error:
                raise StoreError(
                    f"it is not the store of this epoch, or does not take us: {error}"
                ) from error
            unless_proven.pop_all()
        return desk

    def ask(self, question: Question) -> Answer:
        with self._lock:
            try:
                self._connection.settimeout(question.limit_s + self._timeout_s)
                self._connection.sendall(self._out.sealed(question.encoded()))
                (length,) = _LENGTH.unpack(_received(self._connection, _LENGTH.size))
                if length > _MOST_BYTES:
                    raise ValueError("an answer of that length is none of a store")
                kind, value, *told = unpacked(self._back.opened(_received(self._connection, length)))
            except (OSError, InvalidTag, ValueError) as error:
                self.close()
                raise StoreError(
                    f"the store does not answer ({str(error) or type(error).__name__})"
                ) from error
            for entry in told:
                key, *values = unpacked(entry)
                if values:
                    self.values[key.decode()] = values[0]
                else:
                    self.values.pop(key.decode(), None)
        if kind == _ERROR:
            raise StoreError(value.decode())
        return Answer(kind == _YES, value)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class _Caller:
    """One connection at the server."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self.since = time.monotonic()
        self.proven = False
        self.arriving = bytearray(len(GREETING) + _NONCE)
        """Room for what comes next: the greeting, then the length of a frame, the frame, and so on."""
        self.arrived = 0
        self.in_frame = False
        self.leaving = bytearray()
        self.seals: tuple[_Seal, _Seal] | None = None
        self.heard = 0
        """The number of entries of the table that it has been told."""
        self.question: Question | None = None
        """The question whose answer it waits for."""
        self.lacks: list[str] = []
        """The keys of the question that did not exist at the last look."""
        self.ends = 0.0

    def take(self) -> bytes | None:
        """Return what was to come next, once it has; raise BlockingIOError where nothing has come."""
        got = self.connection.recv_into(memoryview(self.arriving)[self.arrived :])
        if not got:
            raise ConnectionError("it hangs up")
        self.arrived += got
        return bytes(self.arriving) if self.arrived == len(self.arriving) else None

    def expect(self, size: int, *, in_frame: bool) -> None:
        """Say how much comes next; raise ValueError for a frame that is too long."""
        if size > (_MOST_BYTES if self.proven else _PROOF_BYTES):
            raise ValueError("a frame of that length is none of a member")
        self.arriving, self.arrived, self.in_frame = bytearray(size), 0, in_frame


class _Server:
    """The thread that serves a table to the members."""

    def __init__(self, listener: socket.socket, table: Table, secret: bytes, what: str) -> None:
        self.table = table
        self._secret = secret
        self._what = what
        self._refusals = RefusalLog()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._callers: dict[_Caller, None] = {}
        self._unproven: dict[_Caller, None] = {}
        """The callers without a proof, in the order in which they came."""
        self._waiting: dict[_Caller, None] = {}
        self._thread = 0
        self._stopped = False
        for one in (listener, self._wake, self._woken):
            one.setblocking(False)
        table.on_change = self._changed

    def stop(self) -> None:
        """End the thread and all connections; any thread may call this."""
        self._stopped = True
        self.table.end()
        self._poke()

    def serve(self) -> None:
        """Serve until it is stopped."""
        self._thread = threading.get_ident()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        while not self._stopped:
            for key, _ in self._selector.select(self._next_end()):
                key.data()
            self._answer_waiting()
            self._end_unproven()
        for caller in list(self._callers):
            self._drop(caller)
        for one in (self._selector, self._listener, self._wake, self._woken):
            one.close()

    def _changed(self) -> None:
        # Whoever waits is noted before the table is looked at for it, so no change is missed.
        if self._waiting and threading.get_ident() != self._thread:
            self._poke()

    def _poke(self) -> None:
        # A full pipe wakes the thread as well, and one that is closed has no thread.
        with suppress(OSError):
            self._wake.send(b"!")

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue

    def _next_end(self) -> float | None:
        ends = [caller.ends for caller in self._waiting]
        ends += [caller.since + PROOF_S for caller in list(self._unproven)[:1]]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:
            time.sleep(LOOK_EVERY_S)  # no more files, say: it stays in the queue, and the members go on
            return
        connection.setblocking(False)
        kind = "ipv6" if ":" in address[0] else "ipv4"
        caller = _Caller(connection, f"{kind}:{joined(address[0], address[1])}")
        self._callers[caller] = self._unproven[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(caller))
        if len(self._unproven) > MOST_UNPROVEN:
            self._refuse(next(iter(self._unproven)))

    def _serve(self, caller: _Caller) -> None:
        """Go on with a connection that can be read or written; whatever is wrong with it ends it."""
        if caller not in self._callers:
            return  # it was ended for another one in this turn
        try:
            self._write(caller)
            self._read(caller)
        except BlockingIOError:
            return
        except (OSError, ValueError, InvalidTag):
            if caller.proven:
                self._drop(caller)
            else:
                self._refuse(caller)

    def _read(self, caller: _Caller) -> None:
        while caller.question is None:
            come = caller.take()
            if caller.seals is None:
                self._greet(caller, come)
            elif come is None:
                return
            elif not caller.in_frame:
                caller.expect(_LENGTH.unpack(come)[0], in_frame=True)
            else:
                question = Question.decoded(caller.seals[0].opened(come))
                if not caller.proven:
                    caller.proven = True
                    del self._unproven[caller]
                caller.expect(_LENGTH.size, in_frame=False)
                self._take(caller, question)
                return
        # A member that waits says nothing, unless it goes.
        caller.take()
        raise ValueError("a member asks one question at a time")

    def _greet(self, caller: _Caller, greeting: bytes | None) -> None:
        """Answer the greeting, once it is whole."""
        if not GREETING.startswith(caller.arriving[: min(caller.arrived, len(GREETING))]):
            raise ValueError("it is no member")
        if greeting is None:
            return
        connection, own = caller.connection, os.urandom(_NONCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonces = greeting[len(GREETING) :] + own
        caller.seals = _Seal(self._secret, _MEMBER, nonces), _Seal(self._secret, _SENDER, nonces)
        caller.expect(_LENGTH.size, in_frame=False)
        self._send(caller, own)

    def _take(self, caller: _Caller, question: Question) -> None:
        if question.verb is not Verb.WAIT:
            self._answer(caller, question)
            return
        caller.question, caller.lacks = question, list(question.keys)
        caller.ends = time.monotonic() + question.limit_s
        self._waiting[caller] = None

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        for caller in list(self._waiting):
            while caller.lacks and self.table.has(caller.lacks[-1:]):
                caller.lacks.pop()
            question = caller.question
            if question is None or (caller.lacks and now < caller.ends):
                continue
            caller.question = None
            del self._waiting[caller]
            try:
                self._answer(caller, question)
            except OSError:
                self._drop(caller)

    def _answer(self, caller: _Caller, question: Question) -> None:
        assert caller.seals is not None
        try:
            answer = self.table.answer(question)
            kind = _YES if answer.yes else _NO
        except StoreError as error:
            kind, answer = _ERROR, Answer(False, str(error).encode())
        told = self.table.told_since(caller.heard)
        caller.heard += len(told)
        self._send(caller, caller.seals[1].sealed(packed([kind, answer.value, *told])))

    def _send(self, caller: _Caller, data: bytes) -> None:
        caller.leaving += data
        with suppress(BlockingIOError):
            self._write(caller)

    def _write(self, caller: _Caller) -> None:
        if not caller.leaving:
            return
        try:
            while caller.leaving:
                del caller.leaving[: caller.connection.send(caller.leaving)]
        finally:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.leaving else 0)
            key = self._selector.get_key(caller.connection)
            if key.events != events:
                self._selector.modify(caller.connection, events, key.data)

    def _end_unproven(self) -> None:
        limit = time.monotonic() - PROOF_S
        while self._unproven and (caller := next(iter(self._unproven))).since <= limit:
            self._refuse(caller)

    def _refuse(self, caller: _Caller) -> None:
        error = Unauthenticated("the caller does not prove that it is in this weight group", where=self._what)
        self._refusals.tell(caller.peer, error)
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        for group in (self._callers, self._unproven, self._waiting):
            group.pop(caller, None)
        self._selector.unregister(caller.connection)
        caller.connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; raise ConnectionError where the peer ends before."""
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("it hangs up")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
