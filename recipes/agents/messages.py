"""Answers a sum of seven numbers with the package `anthropic`; it streams, and calculates where the policy asks for it.

Three numbers are added at a time. A sub-agent with a history of its own adds the second three; then the main agent's
history is compacted: what was found takes the place of all that was said. The reward is the share of the three sums
that are right.
"""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, DefaultHttpxClient

HTTP = DefaultHttpxClient()
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATE = {"name": "calculate", "description": "Calculate a sum.", "input_schema": EXPRESSION}


def total(expression: Any) -> str:
    try:
        return str(sum(map(int, expression.split("+"))))
    except (AttributeError, ValueError):
        return "0"


def answer(client: Anthropic, question: str) -> str:
    """Return what the policy answers to a question, in a history of its own."""
    history: list[Any] = [{"role": "user", "content": question}]
    text = ""
    for _ in range(2):
        asked = {"model": "policy", "max_tokens": 16, "messages": history, "tools": [CALCULATE]}
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        told = [(call.id, total(call.input.get("expression"))) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in told]
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return text


def solve(task: dict[str, Any]) -> dict[str, float]:
    client = Anthropic(http_client=HTTP)
    numbers = task["messages"][0]["content"].rstrip("=").split("+")
    first, second = "+".join(numbers[:3]), "+".join(numbers[3:6])
    found = [answer(client, f"{first}="), answer(client, f"{second}=")]
    parts = [text if text.isdecimal() and len(text) <= 3 else "0" for text in found]
    last = "+".join((*parts, numbers[6]))
    found.append(answer(client, f"{last}="))
    asked = (first, second, last)
    return {"right": sum(text == total(sums) for text, sums in zip(found, asked, strict=True)) / 3}
