"""A small OpenEnv server, written to its public protocol: a number is guessed, by text, by fields or by a tool."""

from __future__ import annotations

import json
import sys
from typing import Any

from aiohttp import WSMsgType, web

TEXT = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}}, "required": ["guess"]}
FIELDS = {
    "properties": {"at": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["at"],
    "description": "G.",
}
TOOLS = {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}, "metadata": {}}}
SCHEMAS = {"text": TEXT, "stateless": TEXT, "fields": FIELDS, "tools": TOOLS}
LISTED = {"tools": [{"name": "guess", "description": "Guess.", "input_schema": {"type": "object"}}]}


class Server:
    """Sessions of the game, at most `most` at once."""

    def __init__(self, kind: str = "text", most: int = 8) -> None:
        self.kind, self.most = kind, most
        self.sessions = 0
        self.resets: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/schema", self.schema)
        app.router.add_get("/ws", self.session)
        return app

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMAS[self.kind], "observation": {}, "state": {}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=True)
        await socket.prepare(request)
        if self.sessions >= self.most:
            await self.fail(socket, "full", "CAPACITY_REACHED", max_sessions=self.most)
            await socket.close()
            return socket
        self.sessions += 1
        try:
            await self.play(socket)
        finally:
            self.sessions -= 1
        return socket

    async def play(self, socket: web.WebSocketResponse) -> None:
        number, steps = 0, 0
        async for message in socket:
            asked = json.loads(message.data) if message.type is WSMsgType.TEXT else {"type": "close"}
            data = asked.get("data", {})
            if asked["type"] == "close":
                return
            if asked["type"] == "reset":
                self.resets.append(data)
                number = data["seed"] % data.get("largest", 10)
                await self.say(socket, "observation", self.seen("Guess.", None, False))
            elif asked["type"] == "state" and self.kind == "stateless":
                await self.fail(socket, "there is no state", "EXECUTION_ERROR")
            elif asked["type"] == "state":
                await self.say(
                    socket, "state", {"episode_id": "e", "step_count": steps, "misses": float(steps)}
                )
            elif asked["type"] == "mcp":
                await self.say(socket, "mcp", {"jsonrpc": "2.0", "id": data["id"], "result": LISTED})
            else:
                steps += 1
                await self.step(socket, data, number)

    async def step(self, socket: web.WebSocketResponse, data: dict[str, Any], number: int) -> None:
        given = data.get("arguments", data)
        guess = given.get("guess", given.get("at"))
        if str(guess).startswith("say "):
            for _ in range(int(guess[4:])):
                await self.say(socket, "observation", self.seen("Said.", None, False))
        elif guess == "leave":
            await socket.close()
        elif guess == "break":
            await self.fail(socket, "it broke", "EXECUTION_ERROR")
        elif not str(guess).isdecimal():
            errors = [{"loc": ["guess"], "msg": "no number"}]
            await self.fail(socket, "Invalid message", "VALIDATION_ERROR", errors=errors)
        elif int(guess) == number:
            await self.say(socket, "observation", self.seen("Found.", 1.0, True))
        else:
            await self.say(
                socket, "observation", self.seen("More." if int(guess) < number else "Less.", -0.25, False)
            )

    def seen(self, text: str, reward: float | None, done: bool) -> dict[str, Any]:
        observation: dict[str, Any] = {"hint": text, "metadata": {"at": 1}}
        if self.kind == "fields":
            observation["size"] = len(text)
        if self.kind == "tools" and text != "Guess.":
            result = {"content": [{"type": "text", "text": text}]}
            observation = {"tool_name": "guess", "result": result, "error": None}
        return {"observation": observation, "reward": reward, "done": done}

    async def say(self, socket: web.WebSocketResponse, kind: str, data: dict[str, Any]) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))

    async def fail(self, socket: web.WebSocketResponse, message: str, code: str, **more: Any) -> None:
        await self.say(socket, "error", {"message": message, "code": code, **more})


if __name__ == "__main__":
    web.run_app(Server().app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
