"""The episodes in a worker: how an environment is loaded, and how what it says becomes plain data.

Invariants: an episode that ended, or whose environment raised, is closed and forgotten before its answer leaves. What
an environment returns is checked here, so what is wrong with it is told with the line of its method. A worker calls
methods outside of an event loop, so one that is not `async` may run its own. Nothing heavy is imported here: workers
start with this.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from reprlib import repr
from typing import Any

from flotilla_core.terminal import is_one_line
from flotilla_environment.builtin import BUILTIN
from flotilla_environment.environment import Begun, Call, Environment, Program, Reply, Task, Turn
from flotilla_workers.functions import Refusal, Target, user_function

MOST_BYTES = 960 * 1024
"""The length of all that one reply says, as JSON; a worker's answer has at most 1 MiB."""
MOST_MESSAGES = 1_000
MOST_NUMBERS = 100
"""Rewards, and metrics, of one episode."""
MOST_CALLS = 1_000
"""Calls of tools in one message."""
LARGEST_NUMBER = 1e38
"""The largest reward or metric, as a trainer can take it."""
LONGEST_NAME = 200
DEEPEST = 32
"""Levels of a tool, and of the arguments of a call."""
SUM_OF_TURNS = "turns"
"""The name under which the coordinator keeps the sum of the rewards of turns."""
NOTHING: dict[str, Any] = {
    "messages": [],
    "tools": [],
    "done": True,
    "afresh": False,
    "state": "",
    "reward": None,
    "rewards": {},
    "metrics": {},
}
ROLES = ("system", "user", "assistant", "tool")


def load(target: Target) -> Callable[[Any], Any]:
    """Return what answers questions about the episodes of one environment."""
    found = BUILTIN[target.source] if target.kind == "builtin" else user_function(target)
    name = target.function or target.source
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise Refusal(f"{name} is no subclass of flotilla_environment.Environment")
    try:
        inspect.signature(found).bind(**target.parameters)
    except TypeError as error:
        given = ", ".join(f"{key}=" for key in target.parameters)
        raise Refusal(f"{name}{inspect.signature(found)} cannot be made with ({given}): {error}") from error
    return WorkerEpisodes(found, target.parameters).answered


class Episodes:
    """The episodes of one environment with its parameters."""

    def __init__(self, environment: Callable[..., Environment], parameters: dict[str, Any]) -> None:
        self._environment = environment
        self._parameters = parameters
        self._playing: dict[int, Environment] = {}
        self._tools: dict[int, list[str]] = {}

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return what the environment says; nothing of the end of an episode that nobody hears."""
        episode = question["episode"]
        if question["do"] == "close":
            await self.close(episode)
            return NOTHING
        said = None
        try:
            said = await self._said(episode, question)
        finally:
            if said is None:
                with suppress(Exception):  # What was raised before is what is told.
                    await self.close(episode)
        if said["done"]:
            await self.close(episode)
        return said

    async def close(self, episode: int) -> None:
        """Close and forget an episode, where it has not ended yet."""
        environment = self._playing.pop(episode, None)
        self._tools.pop(episode, None)
        if environment is not None:
            closing: Any = environment.close
            await self._what(closing())

    async def _said(self, episode: int, question: dict[str, Any]) -> dict[str, Any]:
        method: Callable[..., Any]
        if question["do"] == "begin":
            environment = self._playing[episode] = self._environment(**self._parameters)
            begun = await self._what(environment.begin(Task(**question["task"])))
            if not isinstance(begun, Begun):
                raise _refused(environment.begin, f"returned {repr(begun)}, expected a Begun")
            self._tools[episode] = _tools(environment.begin, begun.tools)
            reply, method = Reply(begun.messages, state=begun.state), environment.begin
        else:
            environment = self._playing[episode]
            if question["do"] == "stop":
                method = environment.stop
                reply = await self._what(environment.stop(question["ending"]))
            else:
                method = environment.reply
                reply = await self._what(environment.reply(_turn(question["turn"])))
            if not isinstance(reply, Reply):
                raise _refused(method, f"returned {repr(reply)}, expected a Reply")
        if question["do"] == "stop" and reply.reward is not None:
            raise _refused(method, "gives the reward of a turn, and a stop is none: give it in rewards")
        done = bool(reply.done) or question["do"] == "stop"
        said: dict[str, Any] = {
            "messages": _messages(method, reply.messages),
            "tools": [] if done else self._tools[episode],
            "afresh": bool(reply.afresh),
            "state": "" if done else _state(method, reply.state),
            "done": done,
            "reward": None if reply.reward is None else _number(method, "reward", reply.reward),
            "rewards": _numbers(method, "rewards", reply.rewards),
            "metrics": _numbers(method, "metrics", reply.metrics),
        }
        if SUM_OF_TURNS in said["rewards"]:
            raise _refused(
                method,
                f"names a reward {SUM_OF_TURNS}, which is the sum of the rewards of turns: give it another name",
            )
        if not done:
            _may_go_on(method, said)
        if (length := len(json.dumps(said))) > MOST_BYTES:
            raise _refused(method, f"says {length:,} bytes as JSON, of {MOST_BYTES:,} at most")
        return said

    async def _what(self, returned: Any) -> Any:
        """Return what a method returned, which may be `async`."""
        return await returned if inspect.iscoroutine(returned) else returned


class WorkerEpisodes(Episodes):
    """Episodes outside of an event loop: one whose method waits keeps the others waiting, too."""

    def __init__(self, environment: Callable[..., Environment], parameters: dict[str, Any]) -> None:
        super().__init__(environment, parameters)
        self._loop = asyncio.new_event_loop()

    def answered(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return what the environment says."""
        try:
            self.answer(question).send(None)
        except StopIteration as end:
            said: dict[str, Any] = end.value
            return said
        raise AssertionError("all that waits is run at once")

    async def _what(self, returned: Any) -> Any:
        return self._loop.run_until_complete(returned) if inspect.iscoroutine(returned) else returned


def _turn(said: dict[str, Any]) -> Turn:
    """Return a turn; a call whose arguments are no object is one that could not be read."""
    calls, unparsed = [], said["unparsed"]
    for call in said.pop("calls"):
        try:
            calls.append(Call(call["id"], call["name"], _object(call["arguments"] or "{}")))
        except ValueError as error:
            unparsed = unparsed or f"arguments of {call['name']} {error}"
    return Turn(**(said | {"calls": tuple(calls), "unparsed": unparsed}))


def _refused(method: Callable[..., Any], text: str) -> Refusal:
    """Return the refusal of what a method returned, with the line of the method."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}: " if code is not None else ""
    return Refusal(where + text)


def _may_go_on(method: Callable[..., Any], said: dict[str, Any]) -> None:
    """Refuse what nobody would read of an episode that goes on, and one that has nothing to go on with."""
    for what in ("rewards", "metrics"):
        if said[what]:
            names = ", ".join(said[what])
            raise _refused(
                method, f"gives {what} and is not done: {names} would be lost; give them at the end"
            )
    if not said["messages"]:
        raise _refused(method, "returned no messages and is not done: the policy has nothing to answer to")


def _state(method: Callable[..., Any], given: object) -> str:
    if not isinstance(given, str):
        raise _refused(method, f"returned {repr(given)} as state, expected text")
    return given


def _messages(method: Callable[..., Any], given: object) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, Sequence) or len(messages) > MOST_MESSAGES:
        raise _refused(
            method, f"returned {repr(given)} as messages, expected a list of at most {MOST_MESSAGES}"
        )
    return [_message(method, message) for message in messages]


def _message(method: Callable[..., Any], given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise _refused(method, f"returned a message {repr(given)}, expected a role among {', '.join(ROLES)}")
    content, message = given.get("content"), dict[str, Any]()
    if isinstance(content, Program):
        message["program"] = {"code": content.code, "limit_s": float(content.limit_s)}
        content = ""
    if not isinstance(content, str | None):
        raise _refused(method, f"returned a message whose content is {repr(content)}, expected text")
    if content and len(content) > MOST_BYTES:
        raise _refused(method, f"says at least {len(content):,} bytes as JSON, of {MOST_BYTES:,} at most")
    message |= {"role": given["role"], "content": content or ""}
    if given.get("tool_call_id"):
        message["tool_call_id"] = _name(method, given["tool_call_id"])
    if calls := given.get("tool_calls"):
        if len(calls) > MOST_CALLS:
            raise _refused(method, f"returned a message with {len(calls):,} calls, of {MOST_CALLS:,} at most")
        message["tool_calls"] = [_call_said(method, call) for call in calls]
    return message


def _call_said(method: Callable[..., Any], given: Any) -> dict[str, str]:
    """Return a call in a message of the environment's, which may be written as chat templates have it."""
    call = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(call, Mapping) or not call.get("name"):
        raise _refused(method, f"returned a call without a name: {repr(given)}")
    arguments = call.get("arguments", {})
    if arguments in ("", None):
        arguments = {}
    try:
        arguments = _object(arguments) if isinstance(arguments, str) else arguments
        text = _text_of(arguments)
    except ValueError as error:
        raise _refused(method, f"returned a call whose arguments {error}") from None
    name = _name(method, call["name"])
    return {"id": _name(method, given.get("id", "")), "name": name, "arguments": text}


def _object(text: str) -> dict[str, Any]:
    """Return the object in a text; raise ValueError, with what it is, where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"are not JSON: {error}") from None
    _text_of(value)
    return dict(value)


def _text_of(value: object) -> str:
    """Return an object as JSON; raise ValueError, with what it is, where it cannot be sent."""
    if not isinstance(value, dict):
        raise ValueError("are no JSON object")
    if is_deeper(value, DEEPEST):
        raise ValueError(f"have more than {DEEPEST} levels")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("hold what JSON does not have, such as a number that is not finite") from None


def is_deeper(value: object, levels: int) -> bool:
    """Return whether a value has more than so many levels of lists and objects."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(
        is_deeper(part, levels - 1) for part in parts if isinstance(part, dict | list | tuple)
    )


def _name(method: Callable[..., Any], given: object) -> str:
    if not isinstance(given, str) or len(given) > LONGEST_NAME or not is_one_line(given):
        raise _refused(
            method,
            f"named something {repr(given)}, expected one line of at most {LONGEST_NAME} characters",
        )
    return given


def _tools(method: Callable[..., Any], given: Sequence[Mapping[str, Any]]) -> list[str]:
    tools: list[str] = []
    for tool in given:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise _refused(method, f"returned a tool without a name: {repr(tool)}")
        try:
            tools.append(_text_of(dict(function)))
        except ValueError as error:
            raise _refused(method, f"returned a tool {repr(function['name'])} whose parts {error}") from None
    if len(tools) > MOST_MESSAGES or sum(map(len, tools)) > MOST_BYTES // 4:
        raise _refused(
            method, f"returned tools of {sum(map(len, tools)):,} bytes, of {MOST_BYTES // 4:,} at most"
        )
    return tools


def _numbers(method: Callable[..., Any], what: str, given: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise _refused(method, f"returned {repr(given)} as {what}, expected numbers by name")
    if len(given) > MOST_NUMBERS:
        raise _refused(method, f"returned {len(given):,} {what}, expected at most {MOST_NUMBERS}")
    return {_name(method, key): _number(method, f"{what} {key}", value) for key, value in given.items()}


def _number(method: Callable[..., Any], what: str, given: Any) -> float:
    if not is_number(given):
        raise _refused(
            method,
            f"returned {repr(given)} as {what}, expected a finite number of at most {LARGEST_NUMBER:g}",
        )
    return float(given)


def is_number(given: Any) -> bool:
    """Return whether something may be a reward."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        return False
    return math.isfinite(number) and abs(number) <= LARGEST_NUMBER and not isinstance(given, str)
