"""Answers a sum with the package `openai`, by Chat Completions; it streams, and calculates where the policy asks to."""

from __future__ import annotations

import json
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATE = {"name": "calculate", "description": "Calculate a sum.", "parameters": EXPRESSION}


def calculate(arguments: str) -> str:
    try:
        return str(sum(map(int, json.loads(arguments)["expression"].split("+"))))
    except (KeyError, ValueError):
        return "0"


def solve(task: dict[str, Any]) -> None:
    client = OpenAI(http_client=HTTP)
    history = [*task["messages"]]
    for _ in range(3):
        tools = [{"type": "function", "function": CALCULATE}]
        with client.chat.completions.stream(model="policy", messages=history, tools=tools) as events:
            events.until_done()
        message = events.current_completion_snapshot.choices[0].message
        if not message.tool_calls:
            return
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            told = calculate(call.function.arguments)
            history.append({"role": "tool", "tool_call_id": call.id, "content": told})
