"""A rank's end of the connection to the front.

Invariants: only threads of this module read from the socket; the main thread gets commands one by one, in order;
commands that must act while the main thread is busy (`urgent`) run on the reading thread. The beat says that this
process lives and how far its main thread has come, so that the front can tell a stopped process from one that waits
for another. When the front is gone, the rank ends.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from flotilla_core.errors import FlotillaError
from flotilla_core.findings import parts_of
from flotilla_trainer.wire.frames import PREFIX_BYTES, Array, Frame, decode, encode, lengths

BEAT_S = 0.25


class FrontLink:
    """Receives commands and sends answers and beats."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.register_at_fork(after_in_child=self._in_fork)
        self._write_lock = threading.Lock()
        self._commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._urgent: dict[str, Callable[[Frame], None]] = {}
        self._progress = 0
        self._phase = "starting"
        for name, target in (("front-reader", self._read), ("front-beat", self._beat)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def urgent(self, kind: str, act: Callable[[Frame], None]) -> None:
        """Run commands of this kind at once, while the main thread works."""
        self._urgent[kind] = act

    def next_command(self) -> Frame:
        """Wait for the next command for the main thread."""
        self._phase = "waiting for a command"
        return self._commands.get()

    def progress(self, phase: str) -> None:
        """Record that the main thread made progress, and what it does now."""
        self._phase = phase
        self._progress += 1

    def moved(self) -> None:
        """Record progress within the present phase."""
        self._progress += 1

    def answer(self, command: Frame, fields: dict[str, Any], arrays: dict[str, Array] | None = None) -> None:
        """Answer that the command is done."""
        self._send(Frame("done", command.number, fields, arrays or {}))

    def refuse(self, command: Frame, error: FlotillaError) -> None:
        """Answer that the command failed, with this and every other rank ready for the next one."""
        self._send(Frame("refused", command.number, parts_of(error.finding())))

    def _in_fork(self) -> None:
        """Leave the front to this rank: a process that a loss of the user's forked ends when it answers."""
        self._socket.close()
        self._write_lock = threading.Lock()  # a thread that is not there may hold it

    def _send(self, frame: Frame) -> None:
        try:
            with self._write_lock:
                for part in encode(frame):
                    self._socket.sendall(part)
        except OSError:
            os._exit(0)

    def _beat(self) -> None:
        while True:
            self._send(Frame("beat", 0, {"progress": self._progress, "phase": self._phase}))
            time.sleep(BEAT_S)

    def _read(self) -> None:
        while True:
            header_bytes, body_bytes = lengths(self._receive(PREFIX_BYTES))
            frame = decode(self._receive(header_bytes), self._receive(body_bytes))
            act = self._urgent.get(frame.kind)
            if act is None:
                self._commands.put(frame)
                continue
            act(frame)
            self.answer(frame, {})

    def _receive(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            read = self._socket.recv_into(view)
            if read == 0:
                os._exit(0)
            view = view[read:]
        return received
