"""Calls of an endpoint that takes OpenAI's chat completions.

Invariants: requests at one address are limited together. A request is repeated only where the server refused it for
load, failed, or was not reached, and a bounded number of times; then the endpoint is away, which is no verdict. A key
is read for each request, is in its header alone, and is in no message: of a text with a part of it nothing is shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

from flotilla_core.config import JudgeConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig
from flotilla_core.trust import read_secret
from flotilla_reward.judges.form import Asked
from flotilla_reward.judges.transport import Completion, Queue, Refused, away, shortened

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_BYTES = 4 * 1024 * 1024
"""Limit of an answer."""
PART_OF_KEY = 6
"""Characters of a key that no message shows in a row."""
COUNTS = ("prompt_tokens", "completion_tokens")
FAILED = frozenset({*range(500, 600)} - {HTTPStatus.NOT_IMPLEMENTED})
UNSTRUCTURED = (400, 404, 415, 422, 501)
"""Statuses by which servers refuse a field that they do not know."""


class Trouble(Exception):
    """The server is overloaded or failed, which may pass."""

    def __init__(self, text: str, *, busy: bool, wait_s: float) -> None:
        super().__init__(text)
        self.busy = busy
        self.wait_s = wait_s


class Server(Queue):
    """The requests to one address, and the connections to it."""

    def __init__(self, concurrency: int) -> None:
        super().__init__(concurrency)
        self._limits = httpx2.Limits(max_connections=None, max_keepalive_connections=concurrency)
        self._client: httpx2.AsyncClient | None = None

    @property
    def client(self) -> httpx2.AsyncClient:
        """The client, made when it is first needed: that takes a while."""
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=None, limits=self._limits)
        return self._client

    async def close(self) -> None:
        """Close the connections; the next request makes new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def servers(judges: Mapping[str, JudgeConfig]) -> dict[str, Server]:
    """Return the servers of the judges by their addresses; those of one address share its smallest limit."""
    configs: list[JudgeConfig] = [*judges.values()]
    return {
        url: Server(min(one.concurrency for one in configs if one.url == url))
        for url in dict.fromkeys(one.url for one in configs)
    }


class Endpoint:
    """One judge's model at a server."""

    def __init__(self, name: str, config: JudgeConfig, server: Server) -> None:
        self.name = name
        self.config = config
        self._server = server
        self._structured = True
        """The server has not refused `response_format` yet."""

    @property
    def model(self) -> str:
        return self.config.model

    @property
    def place(self) -> str:
        return urlsplit(self.config.url).netloc

    @property
    def about(self) -> list[Any]:
        return [self.config.url, self.config.request]

    async def check(self) -> None:
        self.key()

    def key(self) -> str:
        """Return the key, which may be empty; raise where its place holds none."""
        config, key = self.config, ""
        if config.api_key_file is not None:
            key = read_secret(config.api_key_file, f"judges.{self.name}.api_key_file").strip()
        elif config.api_key_env is not None:
            key = os.environ.get(config.api_key_env, "").strip()
            if not key:
                raise FailedPrecondition(
                    f"the key of judge {self.name} is not there",
                    why=f"the reward service has no variable {config.api_key_env}",
                    next_step=f"name its place in the stack: reward.environment.{config.api_key_env}",
                )
        if not (key.isascii() and key.isprintable()):
            raise InvalidConfig(f"the key of judge {self.name} is not one line of ASCII letters")
        return key

    def shown(self, text: str) -> str:
        """Return a text of the server's as it may be told: short, and never with a part of the key."""
        try:
            key = self.key()
        except FlotillaError:
            return "(not shown: the key is not there)"
        parts = {key[at : at + PART_OF_KEY] for at in range(len(key) - PART_OF_KEY + 1)} or {key}
        if key and any(part in text for part in parts):
            return "(not shown: it holds a part of the key)"
        return shortened(text)

    async def complete(self, asked: Asked, response_format: Mapping[str, Any], since: float) -> Completion:
        """Return what the model writes, by the form where the server can hold it to one."""
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [
                {"role": "system", "content": asked.system},
                {"role": "user", "content": asked.user},
            ],
            **self.config.request,
        }
        if not self._structured:
            return await self._completed(body, since)
        try:
            return await self._completed(body | {"response_format": response_format}, since)
        except Refused as refused:
            if refused.status not in UNSTRUCTURED:
                raise
        completion = await self._completed(body, since)
        self._structured = False
        return completion

    async def _completed(self, body: Mapping[str, Any], since: float) -> Completion:
        retries, server, trouble, busy = self.config.retries, self._server, "", False
        async with server.places:
            server.require_answers(since, self.name, self.place)
            for attempt in range(retries + 1):
                busy, asked_s = False, 0.0
                try:
                    async with asyncio.timeout(self.config.timeout_s):
                        return self._read(*await self._post(body))
                except Trouble as error:
                    trouble, busy, asked_s = str(error), error.busy, error.wait_s
                except TimeoutError:
                    trouble = f"no answer within {self.config.timeout_s:g} s"
                except httpx2.TransportError as error:
                    trouble = self.shown(f"{type(error).__name__} {error}".strip())
                if attempt < retries:
                    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)
                    await asyncio.sleep(max(wait_s, min(LONGEST_WAIT_S, asked_s)))
            trouble = f"{trouble} (asked {retries + 1} times)"
            if not busy:
                server.had_no_answer(trouble)
        raise away(self.name, self.place, trouble)

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, str, bytes]:
        headers = {"Authorization": f"Bearer {key}"} if (key := self.key()) else {}
        url = f"{self.config.url}/chat/completions"
        content = bytearray()
        async with self._server.client.stream("POST", url, json=body, headers=headers) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise Refused(f"the answer is longer than {MOST_BYTES} bytes", response.status_code)
            return response.status_code, response.headers.get("Retry-After", ""), bytes(content)

    def _told(self, status: int, content: bytes) -> str:
        """Return a status with what the server says of it, for messages."""
        try:
            said = json.loads(content)["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            said = ""
        name = f"status {status}"
        return f"{name}: {self.shown(said)}" if isinstance(said, str) and said else name

    def _read(self, status: int, retry_after: str, content: bytes) -> Completion:
        if status == HTTPStatus.TOO_MANY_REQUESTS or status in FAILED:
            busy = status == HTTPStatus.TOO_MANY_REQUESTS
            raise Trouble(self._told(status, content), busy=busy, wait_s=_seconds(retry_after))
        if status != HTTPStatus.OK:
            raise Refused(self._told(status, content), status)
        try:
            answer = json.loads(content)
            written = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Refused("the answer is no chat completion", status) from None
        usage = answer.get("usage")
        counts = [usage.get(name) for name in COUNTS] if isinstance(usage, dict) else []
        tokens = sum(one for one in counts if isinstance(one, int) and one >= 0)
        return Completion(written if isinstance(written, str) else "", tokens)


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() and len(retry_after) < 9 else 0.0
