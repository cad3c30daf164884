"""Starts an agent, as the first program of its process; only the standard library is imported, so it starts fast.

Run as `python -I -S start.py CHANNEL_FD KEEPER`. It reads what it is to start from the channel, a line of JSON,
so that no key is among the arguments of a process. Where it is told a port it listens there, and hands the
socket over by the channel. Then it becomes the agent, which inherits neither.
"""

from __future__ import annotations

import json
import os
import socket
import sys

NOT_FOUND = 127
"""The status of a command that cannot be run, as shells have it."""


def main() -> None:
    with socket.socket(fileno=int(sys.argv[-2])) as channel:
        asked = json.loads(_line(channel))
        if asked["port"]:
            with socket.create_server(("127.0.0.1", asked["port"]), backlog=128) as listening:
                socket.send_fds(channel, [b"\0"], [listening.fileno()])
    for name in asked["without"]:
        os.environ.pop(name, None)
    os.environ.update(asked["variables"])
    command = asked["command"]
    try:
        os.chdir(asked["folder"])
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run in {asked['folder']}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND)


def _line(channel: socket.socket) -> bytes:
    read = b""
    while not read.endswith(b"\n"):
        part = channel.recv(1 << 16)
        if not part:
            os._exit(NOT_FOUND)  # Whoever wanted the agent is gone.
        read += part
    return read


if __name__ == "__main__":
    main()
