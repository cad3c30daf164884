"""The store that the members of an epoch meet at: opened by the sender, reached by the receivers.

Invariant: a process that reaches for a store that does not answer can stop waiting at any time. TCPStore itself cannot:
it continues for as long as its peer is silent, so it is made on a thread that is not awaited.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from flotilla_core.errors import FailedPrecondition

LOOK_EVERY_S = 0.02


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Return a store on a free port of `host`, and the port."""
    try:
        listener = socket.create_server((host, 0), backlog=512)
    except OSError as error:
        raise FailedPrecondition(
            f"a weight group cannot be opened on {host}",
            why=str(error),
            next_step="set bind.host of the trainer to an address of its host; "
            "what peers dial instead is bind.advertise_host",
        ) from error
    with listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def reach_store(host: str, port: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """Return the store of a peer; `check` is called all the while, and what it raises ends the wait.

    Raises OSError, RuntimeError or UnicodeError when no peer answers.
    """
    answer: futures.Future[TCPStore] = futures.Future()

    def dial() -> None:
        try:
            # TCPStore would try a closed port again until the timeout.
            socket.create_connection((host, port), timeout_s).close()
            timeout = timedelta(seconds=timeout_s)
            answer.set_result(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
        # A host that cannot be a name of one is refused by its encoding.
        except (OSError, RuntimeError, UnicodeError) as error:
            answer.set_exception(error)

    threading.Thread(target=dial, name="weights-dial", daemon=True).start()
    ends = time.monotonic() + timeout_s
    while not answer.done():
        check()
        if time.monotonic() >= ends:
            raise TimeoutError(f"silent for {timeout_s:g} s")
        futures.wait([answer], LOOK_EVERY_S)
    return answer.result()
