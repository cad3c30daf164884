"""Workers tell how a transfer ended by datagrams, because every call of theirs waits for a step of decoding.

Invariants: a notice counts only with the secret of its transfer, because any process of the host may write to the
address; a notice that is lost, or too long for a datagram, costs time and nothing else, since the service asks later.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

Answer = dict[str, Any]

SECRET_BYTES = 16
LONGEST = 1 << 20
"""The most bytes of a notice; hosts limit a datagram to less, unless they were told otherwise."""


class EndNotices:
    """The service's end: answers of the workers of one transfer."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("")  # Linux chooses a name that is in no folder
        self.ticket: bytes = self._secret + self._socket.getsockname()
        """The secret and the address with which a worker can tell its end."""
        self._answers: dict[int, Answer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def of_all(self, workers: int, limit_s: float) -> list[Answer] | None:
        """Wait for the answers of so many workers, by rank; return None where some are missing after the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self._answers) < workers:
                    answer = await self._next()
                    if answer is None:
                        return None
                    self._answers[answer["rank"]] = answer
        if len(self._answers) < workers:
            return None
        return [self._answers[rank] for rank in sorted(self._answers)]

    async def _next(self) -> Answer | None:
        """Return the next answer; None if a worker has ended and could not say how."""
        while True:
            notice = await asyncio.get_running_loop().sock_recv(self._socket, LONGEST)
            if secrets.compare_digest(notice[:SECRET_BYTES], self._secret):
                told = notice[SECRET_BYTES:]
                return json.loads(told) if told else None
            await asyncio.sleep(0)  # forged ones without end must not keep the loop


def tell(ticket: bytes, answer: Answer) -> None:
    """Say from a worker how its transfer ended; say only that it ended where the answer is too long."""
    secret, address = ticket[:SECRET_BYTES], ticket[SECRET_BYTES:]
    whole = secret + json.dumps(answer).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
        telling.setblocking(False)
        for notice in (whole, secret) if len(whole) <= LONGEST else (secret,):
            with suppress(OSError):  # too long, or nobody listens any more
                telling.sendto(notice, address)
                return
