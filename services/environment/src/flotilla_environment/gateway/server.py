"""The HTTP server of the gateway: finds the session of a request, and answers in the dialect in which it was asked.

Invariants: nothing is done for a request that does not show a key of its session. Keys are compared in constant time,
and one of the two of a session asks for turns alone. A body is bounded, and what all bodies take together. Every
refusal is one of the dialect's. A stream that waits gives signs of life, and one whose client left holds nothing.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from aiohttp import web

from flotilla_core.errors import (
    Exhausted,
    FlotillaError,
    Internal,
    InvalidRequest,
    NotFound,
    Unauthenticated,
)
from flotilla_core.json_text import json_object
from flotilla_core.logger import get_logger
from flotilla_environment.gateway.anthropic_messages import AnthropicMessages
from flotilla_environment.gateway.dialect import Completion, Dialect
from flotilla_environment.gateway.openai_chat import OpenAIChat
from flotilla_environment.gateway.openai_responses import OpenAIResponses
from flotilla_environment.gateway.refusals import status_of
from flotilla_environment.gateway.session import Ask, Request, Session
from flotilla_environment.gateway.sessions import Sessions, hash_of
from flotilla_environment.gateway.turns import check
from flotilla_environment.worker import LARGEST_NUMBER, LONGEST_NAME, MOST_NUMBERS, SUM_OF_TURNS, is_number

MOST_BODY_BYTES = 16 << 20
MOST_OWN_BODY_BYTES = 1 << 20
"""The most bytes of a request that asks for no turn."""
MOST_BODIES_BYTES = 256 << 20
"""The most bytes of all requests that are read or answered at the same time."""
MOST_OF_A_SESSION = 64 << 20
"""The most bytes of those of one session."""
READ_LIMIT_S = 60.0
"""The time in which a request arrives whole."""
LONGEST_MODEL = 200
MODEL = "policy"
"""The name of the one model; an answer has the name with which its request asked."""
LONGEST_FAILURE = 4096
SIGN_OF_LIFE_S = 10.0
TASK_LIMIT_S = 25.0
"""The time that a request for a task waits, before its client asks again."""
DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(), AnthropicMessages())
PLAIN = DIALECTS[0]
"""The dialect of errors where a path belongs to none."""

Handler: TypeAlias = Callable[[web.Request, Session, bytes], Awaitable[web.StreamResponse]]
log = get_logger(__name__)


class _Refused(Exception):
    """A refusal with a status that is not that of its error."""

    def __init__(self, status: int, error: FlotillaError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


class Application:
    """Answers requests, for the sessions that there are."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._bytes: Counter[str] = Counter()
        """The bytes of requests that are read or answered, by session."""

    def made(self) -> web.Application:
        """Return the application as aiohttp serves it."""
        application = web.Application()
        for dialect in DIALECTS:
            application.router.add_post(
                f"/sessions/{{id}}{dialect.path}",
                self._guarded(_completion(dialect), dialect, MOST_BODY_BYTES, asks=True),
            )
        own: Sequence[tuple[str, str, Handler, bool]] = (
            ("GET", "/v1/models", _models, True),
            ("GET", "/task", _task, False),
            ("POST", "/rewards", _rewards, False),
            ("POST", "/end", _end, False),
        )
        for method, path, handler, asks in own:
            guarded = self._guarded(handler, PLAIN, MOST_OWN_BODY_BYTES, asks=asks)
            application.router.add_route(method, f"/sessions/{{id}}{path}", guarded)
        application.router.add_get("/tasks/next", _refusing(self._next_task, PLAIN))
        application.router.add_route("*", "/{path:.*}", _refusing(_nothing_here, PLAIN))
        return application

    def _guarded(
        self, handler: Handler, dialect: Dialect, most: int, *, asks: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request, asks)
            with self._room(session, _length_of(request, most), asks):
                return await handler(request, session, await _body(request, most))

        return _refusing(guarded, dialect)

    def _session_of(self, request: web.Request, asks: bool) -> Session:
        """Return the session of a request that shows its key; what `asks` for turns may show that of turns."""
        session = self._sessions.find(request.match_info["id"])
        shown = _key_of(request)
        of_turns = hmac.compare_digest(shown, session.turns_key.encode())
        if not (hmac.compare_digest(shown, session.key.encode()) or of_turns):
            raise Unauthenticated("the key is not that of this session")
        if of_turns and not asks:
            raise Unauthenticated(
                "this key asks for turns alone", next_step="Show that of FLOTILLA_SESSION_KEY."
            )
        return session

    @contextmanager
    def _room(self, session: Session, size: int, asks: bool) -> Iterator[None]:
        """Have room for a body, while it is read and answered; a request for a turn comes again where there is none."""
        whole, own = sum(self._bytes.values()), self._bytes[session.id]
        if own + size > MOST_OF_A_SESSION or whole + size > MOST_BODIES_BYTES:
            session.refused += asks
            raise Exhausted(
                "the gateway is busy",
                why=f"requests of {whole >> 20} MiB are answered now, {own >> 20} MiB of them of this session",
            )
        self._bytes[session.id] += size
        try:
            yield
        finally:
            self._bytes[session.id] -= size
            self._bytes += Counter()  # without those that have none

    async def _next_task(self, http: web.Request) -> web.StreamResponse:
        """Give a task to an agent that serves many; no content where there is none for now."""
        key = _key_of(http)
        queue = self._sessions.queue_of(key)
        if queue is None:
            raise Unauthenticated("the key is that of no agents")
        agent = hash_of(key)
        queue.comes(agent)
        try:
            async with asyncio.timeout(TASK_LIMIT_S):
                offer = await queue.take(http.query.get("run", ""))
        except TimeoutError:
            return web.Response(status=204)
        with queue.given(offer, agent) as session:
            url = f"{http.url.origin()}/sessions/{session.id}"
            shown = {"url": url, "key": session.key, "turns_key": session.turns_key}
            response = web.json_response({"session": shown, "task": session.task})
            await response.prepare(http)
            await response.write_eof()
        return response


def _refusing(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], dialect: Dialect
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer with what a handler raises, as the clients of a dialect read it."""

    async def answered(request: web.Request) -> web.StreamResponse:
        status = 0
        try:
            return await handler(request)
        except FlotillaError as error:
            refused = error
        except _Refused as error:
            refused, status = error.error, error.status
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # the client is told that it failed, and the log says why
            log.exception("a request failed", path=request.path)
            refused = Internal(f"a defect of Flotilla: {type(error).__name__}")
        headers = {"retry-after": "1"} if isinstance(refused, Exhausted) else None
        body = dialect.refusal(refused)
        return web.json_response(body, status=status or status_of(refused), headers=headers)

    return answered


async def _nothing_here(http: web.Request) -> web.StreamResponse:
    known = ", ".join(dialect.path for dialect in DIALECTS)
    raise NotFound(f"there is no {http.method} {http.path}", why=f"below a session there are {known}")


def _key_of(http: web.Request) -> bytes:
    bearer = http.headers.get("authorization", "")
    return (http.headers.get("x-api-key") or bearer.removeprefix("Bearer ")).encode(errors="surrogateescape")


def _length_of(http: web.Request, most: int) -> int:
    """Return for how many bytes of a body there is to be room."""
    if http.content_length is None:
        return most if http.body_exists else 0
    if http.content_length > most:
        raise _too_large(most)
    return http.content_length


async def _body(http: web.Request, most: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            async for part in http.content.iter_any():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        late = f"the request did not arrive whole in {READ_LIMIT_S:g} s"
        raise _Refused(web.HTTPRequestTimeout.status_code, InvalidRequest(late)) from None
    return bytes(body)


def _too_large(most: int) -> _Refused:
    way = "Shorten the history." if most == MOST_BODY_BYTES else ""
    error = InvalidRequest(f"such a request has at most {most:,} bytes", next_step=way)
    return _Refused(web.HTTPRequestEntityTooLarge.status_code, error)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return json_object(body, "", what="the body", finite=True)
    except FlotillaError as error:
        raise InvalidRequest(error.what, why=error.why) from None


def _completion(dialect: Dialect) -> Handler:
    async def completion(http: web.Request, session: Session, body: bytes) -> web.StreamResponse:
        request = _read(http, dialect, body)
        ask = session.ask(request)
        with ask.awaited():
            return await _told(http, dialect, request.completion, ask)

    return completion


def _read(http: web.Request, dialect: Dialect, body: bytes) -> Request:
    """Return what a request asks for."""
    given = _object(body)
    completion = dialect.read(given)
    check(completion)
    model = given.get("model")
    named = isinstance(model, str) and 0 < len(model) <= LONGEST_MODEL
    retries = http.headers.get("x-stainless-retry-count", "0")
    return Request.of(
        completion,
        str(model) if named else MODEL,
        http.path,
        body,
        mark=http.headers.get("idempotency-key", ""),
        repeats=retries.isdecimal() and int(retries) > 0,
    )


async def _told(http: web.Request, dialect: Dialect, asked: Completion, ask: Ask) -> web.StreamResponse:
    """Answer with a turn, once it is written."""
    if not asked.stream:
        done = await asyncio.shield(ask.answer)
        response: web.StreamResponse = web.json_response(dialect.answer(asked, done))
        await response.prepare(http)
        await response.write_eof()
    else:
        response = await _streamed(http, dialect, asked, ask)
    ask.delivered = True
    return response


async def _streamed(http: web.Request, dialect: Dialect, asked: Completion, ask: Ask) -> web.StreamResponse:
    """Answer with the events of a turn; what is refused before the first sign of life has a status of its own."""
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    while not (await asyncio.wait((ask.answer,), timeout=SIGN_OF_LIFE_S))[0]:
        if not response.prepared:
            await response.prepare(http)
        await response.write(b": the turn is being written\n\n")
    try:
        done = ask.answer.result()
    except FlotillaError as error:
        if not response.prepared:
            raise
        body = web.json_response(dialect.refusal(error)).body
        assert isinstance(body, bytes)
        await response.write(b"event: error\ndata: " + body + b"\n\n")
        await response.write_eof()
        return response
    if not response.prepared:
        await response.prepare(http)
    for event in dialect.events(asked, done):
        await response.write(event)
    await response.write_eof()
    return response


async def _models(http: web.Request, session: Session, body: bytes) -> web.StreamResponse:
    """List the one model, as clients of either vendor read it."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "flotilla"}
    one |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
    pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return web.json_response({"object": "list", "data": [one], **pages})


async def _task(http: web.Request, session: Session, body: bytes) -> web.StreamResponse:
    return web.json_response(session.task)


async def _rewards(http: web.Request, session: Session, body: bytes) -> web.StreamResponse:
    given = _object(body)
    for name, value in given.items():
        if name in (SUM_OF_TURNS, *session.given) or len(name) > LONGEST_NAME or not name.isprintable():
            raise InvalidRequest(f"{name[:80]!r} is no name of a reward", where=name[:80])
        if not is_number(value):
            raise InvalidRequest(f"{name} is no finite number of at most {LARGEST_NUMBER:g}", where=name)
    if len(session.rewards | given) + len(session.given) > MOST_NUMBERS:
        raise InvalidRequest(f"there are more than {MOST_NUMBERS} rewards, with those of the run itself")
    session.rewards |= {name: float(value) for name, value in given.items()}
    return web.json_response({"rewards": session.rewards})


async def _end(http: web.Request, session: Session, body: bytes) -> web.StreamResponse:
    """End a session; an agent that failed says why."""
    given = _object(body) if body else {}
    if failure := given.get("failure"):
        session.failure = (str(failure)[:LONGEST_FAILURE], str(given.get("traceback", ""))[-LONGEST_FAILURE:])
        match given.get("system"):
            case [int(number), str(path)]:
                session.of_system = number, path[:LONGEST_FAILURE]
    session.ended.set()
    session.close("its agent has ended it")
    return web.json_response({})
