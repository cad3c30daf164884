"""Environments of OpenEnv servers, of which this service is a client by wire."""

from __future__ import annotations

import json
import math
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from flotilla_environment.builtin.gymnasium import state_of
from flotilla_environment.environment import Begun, Call, Reply, Task, Turn
from flotilla_environment.hosted import HostedTools
from flotilla_workers.functions import Refusal

if TYPE_CHECKING:
    from flotilla_environment.wire.openenv import OpenEnvSession

OWN = ("metadata",)
"""What every action and every observation has, and no policy needs."""
ACT = "act"
MOST_NUMBERS = 50


class OpenEnv(HostedTools):
    """An environment of an OpenEnv server: reward `return` is the sum of its rewards.

    A turn is the text of an action, a call of one of its tools, or a call of `act` with the fields of an action.
    """

    def __init__(
        self,
        *,
        url: str = "",
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        action: str = "",
        observation: str = "",
        reset: dict[str, Any] | None = None,
    ) -> None:
        """`command` starts a server for the run, with `{port}` in its place, `url` names one.

        `action` is the field that a turn fills, `observation` the one that the policy reads, and `reset` what the
        server is told at the begin of an episode.
        """
        super().__init__(limit_s=math.inf)  # `call_timeout_s` of the run bounds a step.
        if bool(command) == bool(url):
            raise ValueError("give either url, or command, a list of words")
        if isinstance(command, str) or (url and not url.startswith(("http://", "https://"))):
            raise ValueError("command is a list of words, and url begins with http:// or https://")
        self._url, self._command = url.rstrip("/"), command or []
        self._environment, self._headers = environment or {}, headers or {}
        self._field, self._shown, self._reset = action, observation, reset or {}
        self._held = AsyncExitStack()
        self._session: OpenEnvSession | None = None
        self._rewards: list[float] = []
        self._steps = 0
        self._done = False
        self._state = ""

    async def begin(self, task: Task) -> Begun:  # type: ignore[override]
        from flotilla_environment.wire.http import Lost

        try:
            schema = await self._reached()
        except Lost:
            if not self._command:
                raise Refusal(f"the OpenEnv server is not there: {self._url}") from None
            schema = await self._reached()  # It was about to end when it was looked at.
        assert self._session is not None
        own = task.info.get("reset")
        seed = {"seed": int(task.info.get("seed", task.seed)) % 2**31}
        try:
            seen = await self._session.reset(seed | self._reset | (own if isinstance(own, dict) else {}))
            tools = await self._tools_of(schema)
        except Lost as error:
            raise Refusal(f"the OpenEnv server was lost at the begin: {error}") from None
        if seen.get("done"):
            raise Refusal("the episode of the OpenEnv server has ended before its first turn")
        self._state = state_of(_fields(seen))
        return Begun(_with(task.messages, self._text_of(seen)), tools, state=self._state)

    async def _reached(self) -> dict[str, Any]:
        """Reach the server, which is started where it has to be; return the schema of its actions."""
        from flotilla_environment.rooms import variables_of
        from flotilla_environment.wire.http import Address
        from flotilla_environment.wire.openenv import OpenEnvSession

        await self._held.aclose()
        place = self.place
        address = Address(self._url, variables_of(place.jail, self._headers))
        if self._command:
            serving = place.servers.of(
                place.run_id, self._command, self._environment, place.jail, trusted=place.trusted
            )
            server = await self._held.enter_async_context(serving)
            address = Address(f"http://127.0.0.1:{server.port}", address.headers, server.room)
        self._session = OpenEnvSession(address)
        return await self._session.action()

    async def _tools_of(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tools by which the policy acts, and none where it acts by what it writes."""
        assert self._session is not None
        fields = {name: one for name, one in schema.get("properties", {}).items() if name not in OWN}
        if self._field:
            if self._field not in fields:
                raise Refusal(f"actions have no field {self._field}; they have {', '.join(fields)}")
            return []
        if {"tool_name", "arguments"} <= {*fields}:
            return await self._session.tools()
        if len(fields) == 1 and fields[only := next(iter(fields))].get("type") == "string":
            self._field = only
            return []
        required = [name for name in schema.get("required", ()) if name in fields]
        parts = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        parameters = {"type": "object", "properties": fields, "required": required} | parts
        return [
            {
                "name": ACT,
                "description": schema.get("description", "Take an action."),
                "parameters": parameters,
            }
        ]

    async def reply(self, turn: Turn) -> Reply:  # type: ignore[override]
        if self._field:
            text, _ = await self._stepped({self._field: turn.content})
            reply = Reply(text)
        else:
            reply = await super().reply(turn)
        return await self._ended() if self._done or reply.done else Reply(reply.messages, state=self._state)

    async def call(self, call: Call, limit_s: float) -> tuple[str, bool]:
        if self._done:
            return "error: the episode has ended", False
        if call.name == ACT:
            return await self._stepped(call.arguments)
        return await self._stepped({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})

    async def answered(self, answer: str) -> Reply:
        return await self._ended()

    async def _stepped(self, action: dict[str, Any]) -> tuple[str, bool]:
        """Take an action; return what the policy reads of it, and whether the server took it."""
        from flotilla_environment.wire.http import Lost
        from flotilla_environment.wire.openenv import ActionRefused

        assert self._session is not None
        try:
            seen = await self._session.step(action)
        except ActionRefused as error:
            return f"error: {error}", False
        except Lost as error:
            raise Refusal(f"the OpenEnv server was lost in a step: {error}") from None
        self._steps += 1
        if seen.get("reward") is not None:
            self._rewards.append(float(seen["reward"]))
        self._done = bool(seen.get("done"))
        self._state = state_of(_fields(seen))
        return self._text_of(seen), not _fields(seen).get("error")

    def _text_of(self, seen: dict[str, Any]) -> str:
        """Return what the policy reads of an observation: one field, its only text, or all of it as JSON."""
        from flotilla_environment.wire.mcp import shortened, text_of

        fields = _fields(seen)
        if "tool_name" in fields:
            error, result = fields.get("error"), fields.get("result")
            if error:
                return f"error: {error.get('message', error) if isinstance(error, dict) else error}"
            if isinstance(result, dict) and isinstance(result.get("content"), list):
                return text_of(result)
            return shortened(result if isinstance(result, str) else json.dumps(result))
        if self._shown and self._shown not in fields:
            raise Refusal(f"observations have no field {self._shown}; they have {', '.join(fields)}")
        if not self._shown and not fields:
            return "The episode begins."
        only = (
            fields[self._shown]
            if self._shown
            else next(iter(fields.values()))
            if len(fields) == 1
            else fields
        )
        return shortened(only if isinstance(only, str) else json.dumps(only))

    async def _ended(self) -> Reply:
        from flotilla_environment.wire.http import Lost
        from flotilla_environment.wire.openenv import ActionRefused

        assert self._session is not None
        try:
            state = await self._session.state()
        except (Lost, Refusal, ActionRefused):
            state = {}  # It holds metrics alone: the rewards are known.
        counted = [
            (name, one) for name, one in state.items() if type(one) in (int, float) and name != "step_count"
        ]
        metrics = (
            dict(counted[:MOST_NUMBERS]) | {"steps": float(self._steps)} | ({} if self._field else self.count)
        )
        return Reply(
            done=True, rewards={"return": sum(self._rewards)} if self._rewards else {}, metrics=metrics
        )

    async def close(self) -> None:  # type: ignore[override]
        if self._session is not None:
            await self._session.close()
        await self._held.aclose()


def _fields(seen: dict[str, Any]) -> dict[str, Any]:
    observation = seen.get("observation")
    if not isinstance(observation, dict):
        raise Refusal(f"the OpenEnv server observes {observation!r:.200}, expected an object")
    return {name: one for name, one in observation.items() if name not in OWN}


def _with(messages: list[dict[str, Any]], seen: str) -> list[dict[str, Any]]:
    """Return the prompt with what the policy sees at first behind it."""
    *others, last = messages or [{"role": "user", "content": ""}]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": seen}]
    return [*others, last | {"content": f"{last['content']}\n\n{seen}".strip()}]
