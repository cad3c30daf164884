"""Answers a sum with the package `openai`, by Responses; it streams, and calculates where the policy asks to."""

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
        tools = [{"type": "function", "strict": True, **CALCULATE}]
        *_, end = client.responses.create(model="policy", input=history, tools=tools, stream=True)
        calls = [item for item in end.response.output if item.type == "function_call"]
        if not calls:
            return
        history += end.response.output
        for call in calls:
            told = calculate(call.arguments)
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": told})
