"""An endpoint of chat completions that says what a test wrote for it, over real sockets, in threads of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = {"prompt_tokens": 40, "completion_tokens": 2}


@dataclass(frozen=True)
class Said:
    """One answer of the endpoint."""

    content: str | None = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """What is sent in place of a completion."""

    def sent(self) -> bytes:
        completion = {
            "choices": [{"message": {"role": "assistant", "content": self.content}}],
            "usage": TOKENS,
        }
        return (json.dumps(completion) if self.body is None else self.body).encode()


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    body: dict[str, Any]
    headers: Mapping[str, str]
    path: str

    @property
    def user(self) -> str:
        return str(self.body["messages"][1]["content"])


Script = Callable[[Request], Said]


class ScriptedJudge:
    """The endpoint; `requests` are those that arrived, in their order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it: from then on connections are refused."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request = Request(body, dict(self.headers.items()), self.path)
                judge.requests.append(request)
                said = judge.script(request)
                sent = said.sent()
                with suppress(ConnectionError):  # the judge was given up
                    self.send_response(said.status)
                    for name, value in {**said.headers, "Content-Length": str(len(sent))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(sent)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        return Handler


@contextmanager
def scripted_judge(script: Script) -> Iterator[ScriptedJudge]:
    """Run an endpoint for as long as the block."""
    judge = ScriptedJudge(script)
    judge.start()
    try:
        yield judge
    finally:
        judge.stop()


def always(content: str) -> Script:
    """Say the same thing to every request."""
    return lambda request: Said(content)
