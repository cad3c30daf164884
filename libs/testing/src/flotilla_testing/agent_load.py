"""A fleet with hundreds of agents at once, as in production but for the two models.

The agents are tasks of a few processes, which take four turns each over plain HTTP and whole histories. All else is
that of the load of episodes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_testing.episode_load import MOST_TOKENS, TURNS, EpisodeLoad
from flotilla_testing.stack import Stack

AGENT = f"""
import asyncio
import os
import sys
import time

import aiohttp

AT_ONCE, FOLDER, TOKEN_S = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])


async def play(http, taken, file):
    url, key = taken["session"]["url"], {{"authorization": "Bearer " + taken["session"]["key"]}}
    history, took = list(taken["task"]["messages"]), []
    for turn in range({TURNS}):
        asked_at = time.monotonic()
        body = {{"model": "any", "messages": history}}
        async with http.post(url + "/v1/chat/completions", json=body, headers=key) as said:
            answer = await said.json()
        message, now = answer["choices"][0]["message"], time.monotonic()
        took.append((now, now - asked_at, (answer["usage"]["completion_tokens"] - 1) * TOKEN_S))
        history += [message, {{"role": "user", "content": f"That is answer {{turn + 1}}; go on with the next one."}}]
    await http.post(url + "/rewards", json={{"length": float(len(message["content"]) % 7)}}, headers=key)
    await http.post(url + "/end", json={{}}, headers=key)
    file.write("".join(f"{{at:.6f}} {{seconds:.6f}} {{decoded:.6f}}\\n" for at, seconds, decoded in took))
    file.flush()


async def agent(http, file):
    key = {{"authorization": "Bearer " + os.environ["FLOTILLA_RUN_KEY"]}}
    while True:
        async with http.get(os.environ["FLOTILLA_TASKS_URL"], headers=key) as said:
            taken = await said.json() if said.status == 200 else None
        if taken:
            await play(http, taken, file)


async def main():
    limits = aiohttp.TCPConnector(limit=0)
    with open(f"{{FOLDER}}/turns-{{os.getpid()}}.txt", "a") as file:
        async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(None)) as http:
            await asyncio.gather(*(agent(http, file) for _ in range(AT_ONCE)))


asyncio.run(main())
"""


@dataclass(frozen=True)
class AgentLoad(EpisodeLoad):
    """The load of agents that a fleet has to carry."""

    episodes: int = 512
    episodes_per_step: int = 128
    token_s: float = 2 / 64
    agents: int = 2
    """The processes of agents."""

    @property
    def section(self) -> dict[str, Any]:
        return {**super().section, "gateway": {"sessions": self.episodes}}

    def run_file(self, stack: Stack) -> Path:
        file = stack.directory / "agent.py"
        file.write_text(AGENT)
        at_once = -(-self.episodes // self.agents)
        command = f"{sys.executable} {file} {at_once} {stack.directory} {self.token_s}"
        environment = {
            "name": "agent",
            "parameters": {"command": command, "processes": self.agents},
            "max_turns": TURNS,
            "episode_tokens": MOST_TOKENS,
            "trusted": True,
        }
        return self.endless(stack, environment)
