"""A small MCP server by standard input and output, written to the public protocol; `answered` serves HTTP as well."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"name": name, "description": f"{name}.", "inputSchema": NUMBER}
    for name in ("add", "fail", "picture", "refuse")
]
OWN = [
    {"name": name, "inputSchema": {"type": "object"}}
    for name in ("die", "leave", "pinged", "slow", "variable")
]
memory: list[int] = []


def result_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "text", "text": "no"}
    if name == "add":
        memory.append(arguments["a"])
        content["text"] = str(sum(memory))
    if name == "picture":
        content = {"type": "image", "data": "", "mimeType": "image/png"}
    if name == "variable":
        content["text"] = os.environ.get("GIVEN", "none")
    if name == "slow":
        time.sleep(60)
    if name == "die":
        os._exit(3)
    return {"content": [content], "isError": name == "fail"}


def answered(asked: dict[str, Any], version: str = "") -> dict[str, Any] | None:
    """Return the answer to a message; None where it needs none."""
    method, params = asked.get("method"), asked.get("params", {})
    if "id" not in asked or method is None:
        return None
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
    if method == "initialize":
        spoken = version or params["protocolVersion"]
        return answer | {
            "result": {"protocolVersion": spoken, "capabilities": {"tools": {}}, "serverInfo": {}}
        }
    if method == "tools/list":
        # Two pages.
        page = {"tools": OWN} if params.get("cursor") == "2" else {"tools": TOOLS, "nextCursor": "2"}
        return answer | {"result": page}
    if params.get("name") == "refuse":
        return answer | {"error": {"code": -32602, "message": "a is wrong"}}
    return answer | {"result": result_of(params["name"], params.get("arguments", {}))}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    sys.stdout.write("not a word of the protocol\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("params", {}).get("name") == "pinged":
            say({"jsonrpc": "2.0", "id": "mine", "method": "ping"})
            assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "mine", "result": {}}
        if (answer := answered(asked, *sys.argv[1:])) is not None:
            say({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            say(answer)
        if asked.get("params", {}).get("name") == "leave":
            return


if __name__ == "__main__":
    main()
