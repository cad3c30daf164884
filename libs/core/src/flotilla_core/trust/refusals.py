"""The log lines about who is refused, at the servers of a stack.

Invariants: one line a peer and minute, however often it tries; what is kept of peers is bounded.
"""

from __future__ import annotations

import time
from urllib.parse import unquote

from flotilla_core.errors import FlotillaError
from flotilla_core.logger import get_logger

_MOST_PEERS = 1000
_TELL_EVERY_S = 60.0

logger = get_logger()


class RefusalLog:
    """The log lines about refused calls: one a peer and minute, however many calls it makes."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}
        """The time at which each peer was named last, and the number of its calls that were refused since."""

    def tell(self, peer: str, error: FlotillaError) -> None:
        """Log the refusal, or count it for the next line about this peer."""
        host = unquote(peer.rpartition(":")[0]) if peer.startswith("ipv") else peer.partition(":")[0]
        now = time.monotonic()
        last, more = self._told.get(host, (-_TELL_EVERY_S, 0))
        if now - last < _TELL_EVERY_S:
            self._told[host] = (last, more + 1)
            return
        if host not in self._told and len(self._told) >= _MOST_PEERS:
            self._told = {one: told for one, told in self._told.items() if now - told[0] < _TELL_EVERY_S}
            if len(self._told) >= _MOST_PEERS:
                return
        self._told[host] = (now, 0)
        logger.warning("calls are refused", peer=host, why=error.what, method=error.where, more_before=more)
