"""A real HTTP server that does nothing but call a dialect, and the vendor's own client in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest_asyncio
from aiohttp import web

from flotilla_core.errors import FlotillaError
from flotilla_environment.gateway.anthropic_messages import AnthropicMessages
from flotilla_environment.gateway.dialect import Completed, Completion, Dialect
from flotilla_environment.gateway.openai_chat import OpenAIChat
from flotilla_environment.gateway.openai_responses import OpenAIResponses
from flotilla_environment.gateway.refusals import status_of

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
MODEL = "policy"


class Vendor:
    """One dialect, with what it was asked for last and what it answers next."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.asked = Completion(())
        self.done: Completed | FlotillaError
        self.requests = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        try:
            self.asked = self.dialect.read(await request.json())
            if isinstance(self.done, FlotillaError):
                raise self.done
        except FlotillaError as error:
            return web.json_response(self.dialect.refusal(error), status=status_of(error))
        if not self.asked.stream:
            return web.json_response(self.dialect.answer(self.asked, self.done))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": the turn is being written\n\n")
        for event in self.dialect.events(self.asked, self.done):
            await response.write(event)
        return response


class Chat(Vendor):
    """The package `openai`, Chat Completions."""

    def __init__(self, url: str = "") -> None:
        super().__init__(OpenAIChat())
        self.url = url

    def open(self, url: str) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Any:
        given = {"model": MODEL, "messages": history, "tools": [{"type": "function", "function": TOOL}]}
        if stream:
            async with self.client.chat.completions.stream(**given, **more) as events:
                await events.until_done()  # the final completion raises where the turn was cut
                return events.current_completion_snapshot
        return await self.client.chat.completions.create(**given, **more)

    def said(self, answer: Any) -> list[Any]:
        return [answer.choices[0].message]

    def result(self, call_id: str, text: str) -> Any:
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    def text(self, answer: Any) -> str:
        return answer.choices[0].message.content or ""

    def calls(self, answer: Any) -> list[tuple[str, str, Any]]:
        called = answer.choices[0].message.tool_calls or []
        return [(one.id, one.function.name, json.loads(one.function.arguments)) for one in called]


class Responses(Chat):
    """The package `openai`, Responses."""

    def __init__(self) -> None:
        super().__init__()
        self.dialect = OpenAIResponses()

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Any:
        given = {"model": MODEL, "input": history, "tools": [{"type": "function", "strict": True, **TOOL}]}
        if stream:
            async with self.client.responses.stream(**given, **more) as events:
                return [one async for one in events][-1].response
        return await self.client.responses.create(**given, **more)

    def said(self, answer: Any) -> list[Any]:
        return [*answer.output]

    def result(self, call_id: str, text: str) -> Any:
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    def text(self, answer: Any) -> str:
        return str(answer.output_text)

    def calls(self, answer: Any) -> list[tuple[str, str, Any]]:
        called = [item for item in answer.output if item.type == "function_call"]
        return [(one.call_id, one.name, json.loads(one.arguments)) for one in called]


class Messages(Vendor):
    """The package `anthropic`."""

    def __init__(self) -> None:
        super().__init__(AnthropicMessages())

    def open(self, url: str) -> None:
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0)

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Any:
        tool = {"name": TOOL["name"], "description": "Adds.", "input_schema": TOOL["parameters"]}
        given = {"model": MODEL, "max_tokens": 99, "messages": history, "tools": [tool]}
        if stream:
            async with self.client.messages.stream(**given, **more) as events:
                return await events.get_final_message()
        return await self.client.messages.create(**given, **more)

    def said(self, answer: Any) -> list[Any]:
        return [answer]

    def result(self, call_id: str, text: str) -> Any:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}
        return {"role": "user", "content": [block]}

    def text(self, answer: Any) -> str:
        return "".join(block.text for block in answer.content if block.type == "text")

    def calls(self, answer: Any) -> list[tuple[str, str, Any]]:
        called = [block for block in answer.content if block.type == "tool_use"]
        return [(one.id, one.name, one.input) for one in called]


VENDORS = {"chat": Chat, "responses": Responses, "messages": Messages}


@pytest_asyncio.fixture(params=VENDORS, scope="module", loop_scope="module")
async def vendor(request: Any) -> AsyncIterator[Vendor]:
    """One after the other the three dialects, each with the client of its vendor."""
    own = VENDORS[request.param]()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(own.dialect.path, own.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    own.open(f"http://{host}:{port}")
    yield own
    await own.client.close()
    await runner.cleanup()
