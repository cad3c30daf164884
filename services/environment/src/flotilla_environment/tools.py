"""Environments whose turns call tools: functions of Python, described to the policy by their signatures.

Invariants: what the policy does wrong, such as an unknown tool or a missing argument, is told to the policy, and is no
error of the environment. What a tool raises itself is told too, where it is a `ValueError`; anything else is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from flotilla_environment.environment import (
    MOST_PROGRAM_S,
    Begun,
    Call,
    Environment,
    Message,
    Program,
    Reply,
    Task,
    Turn,
)

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def described(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool as chat templates know it: its name, its docstring and the schema of its parameters."""
    hints, parameters = get_type_hints(tool), inspect.signature(tool).parameters.values()
    return {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": {
            "type": "object",
            "properties": {one.name: {"type": _type(hints.get(one.name, str))} for one in parameters},
            "required": [one.name for one in parameters if one.default is one.empty],
        },
    }


def _type(hint: Any) -> str:
    return _TYPES.get(getattr(hint, "__origin__", hint), "string")


def _misfit(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a call; empty where they fit the signature."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return str(error)
    hints = get_type_hints(tool)
    for name, value in arguments.items():
        hint = hints.get(name)
        wanted = getattr(hint, "__origin__", hint)
        if wanted in _TYPES and not (type(value) is wanted or (wanted is float and type(value) is int)):
            return f"{name} is {value!r:.80}, expected a value of type {_TYPES[wanted]}"
    return ""


def called(tools: Mapping[str, Callable[..., Any]], call: Call) -> tuple[str | Program, bool]:
    """Return what a call gave, as text or as a program to be run, and whether it succeeded."""
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}; there is {', '.join(tools) or 'none'}", False
    if misfit := _misfit(tool, call.arguments):
        return f"error: {call.name}: {misfit}", False
    try:
        given = tool(**call.arguments)
        return given if isinstance(given, Program) else str(given), True
    except ValueError as error:
        return f"error: {error}", False


def python_tool(*, limit_s: float = 5.0) -> Callable[[str], Program]:
    """Return a tool by which the policy runs programs of Python, each for `limit_s` and in a jail of its own."""
    if not 0 < limit_s <= MOST_PROGRAM_S:
        raise ValueError(f"limit_s of a program is above 0 and at most {MOST_PROGRAM_S:g}")

    def python(code: str) -> Program:
        """Run a program of Python and read what it prints. Each program starts anew, without what earlier ones had."""
        return Program(code, limit_s)

    return python


class ToolEnvironment(Environment):
    """Runs the tools that turns call; a turn without a call is the answer, and ends the episode."""

    system = ""
    """Text of a message of the system before the prompt; empty: none is added."""

    def __init__(self) -> None:
        self.task = Task([])
        self.count = {"tool_calls": 0.0, "tool_errors": 0.0}

    def tools(self) -> list[Callable[..., Any]]:
        """Return the functions that the policy may call."""
        raise NotImplementedError(f"{type(self).__name__} has no tools()")

    def score(self, answer: str) -> dict[str, float]:
        """Return the rewards of an answer; without any the rewards of the run score it."""
        return {}

    def begin(self, task: Task) -> Begun:
        self.task = task
        first = [{"role": "system", "content": self.system}] if self.system else []
        return Begun([*first, *task.messages], [described(tool) for tool in self.tools()])

    def reply(self, turn: Turn) -> Reply:
        messages: list[Message] = []
        if turn.unparsed:
            self.count["tool_errors"] += 1
            messages.append({"role": "user", "content": f"error: {turn.unparsed}"})
        tools = {tool.__name__: tool for tool in self.tools()}
        for call in turn.calls:
            text, succeeded = called(tools, call)
            self.count["tool_calls"] += 1
            self.count["tool_errors"] += not succeeded
            messages.append({"role": "tool", "content": text, "tool_call_id": call.id})
        if messages:
            return Reply(messages)
        return Reply(done=True, rewards=self.score(turn.content), metrics=self.count)

    def stop(self, ending: str) -> Reply:
        return Reply(done=True, rewards=self.score(""), metrics=self.count)
