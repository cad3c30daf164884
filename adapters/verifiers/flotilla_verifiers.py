"""Plays environments of verifiers as an agent of Flotilla.

It runs in an environment of its own, beside no package of Flotilla's: the environment service gives it a base URL and a
key for each episode (docs/agents.md), and it gives back the rewards. Run as `flotilla-verifiers play TASKSET`, by the
command of an agent, and as `flotilla-verifiers rows TASKSET` to write the lines of data of a run.

Invariants: every seat of an environment asks the policy. Programs of harnesses run by this interpreter and its
packages: nothing is installed while an episode is played. An episode with an error gives no reward.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

MODEL = "policy"
NO_TASK = 204
CHAT = "flotilla_chat.py"
OWN_TOOLS = {"--bash", "--edit", "--search"}
"""The arguments by which the chat program runs commands of the policy: these need a process and a folder."""
FILE_ARGUMENT = "--initial-messages-file"
WAIT_S = 60.0
"""Longer than the gateway waits for a task before it says that there is none."""


@dataclass(frozen=True)
class Session:
    """The place of one episode at the gateway, and its task."""

    url: str
    key: str
    task: dict[str, Any]


def main() -> None:
    arguments = _arguments()
    # A module of a taskset may lie in the folder that the run names; servers of its tools import it, too.
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    if arguments.do == "rows":
        _write_rows(arguments)
        return
    asyncio.run(_play(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flotilla-verifiers", description=__doc__)
    commands = parser.add_subparsers(dest="do", required=True)
    play = commands.add_parser("play", help="Play the episodes of a run.")
    rows = commands.add_parser("rows", help="Write a line of data for each task.")
    for command in (play, rows):
        command.add_argument(
            "taskset", help="Id of a taskset: an installed package, or a module in this folder."
        )
        command.add_argument(
            "--config", type=json.loads, default={}, help="Settings of the environment, as JSON."
        )
    play.add_argument("--harness", default="null", help="Id of the harness of each seat that names none.")
    play.add_argument("--max-turns", type=int, help="Turns of each seat; then what there is is scored.")
    rows.add_argument("--count", type=int, default=1_000, help="The most lines.")
    rows.add_argument("--first", type=int, default=0, help="Index of the first task.")
    rows.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> vf.EnvConfig:
    """Return the settings of the environment, whose seats play here and ask the policy."""
    given = dict(arguments.config)
    given["taskset"] = {**given.get("taskset", {}), "id": arguments.taskset}
    seats = agent_config_fields(resolve_env_config(given))
    for name in seats:
        seat = {"runtime": {"type": "subprocess"}, **given.get(name, {})}
        if arguments.do == "play":
            seat.setdefault("harness", {"id": arguments.harness})
            seat.setdefault("max_turns", arguments.max_turns)
        given[name] = seat
    return resolve_env_config(given)


def _write_rows(arguments: argparse.Namespace) -> None:
    tasks = load_taskset(_config(arguments).taskset)
    chosen = itertools.islice(tasks, arguments.first, arguments.first + arguments.count)
    with arguments.output.open("w", encoding="utf-8") as file:
        for task in chosen:
            row = {"prompt": task.data.prompt_text or task.data.name or "-", "index": task.data.idx}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class Tasks:
    """The tasks of a taskset by their index; those before an index are read once."""

    def __init__(self, taskset: vf.Taskset) -> None:
        self._left = iter(taskset)
        self._read: list[vf.Task] = []

    def of(self, task: dict[str, Any]) -> vf.Task:
        """Return the task of a line: that of its column `index`."""
        index = task["info"].get("index")
        if not isinstance(index, int | float) or index != int(index) or index < 0:
            raise SystemExit(
                f"the column index of the line is {index!r}: write lines by flotilla-verifiers rows"
            )
        self._read += itertools.islice(self._left, max(0, int(index) + 1 - len(self._read)))
        if index >= len(self._read):
            raise SystemExit(
                f"the taskset has {len(self._read)} tasks, and the line asks for that of index {index}"
            )
        return self._read[int(index)]


async def _play(arguments: argparse.Namespace) -> None:
    # Their packages are those of this interpreter; verifiers would fetch them by `uv`.
    SubprocessRuntime.prepare_uv_script = _prepared  # type: ignore[method-assign]
    SubprocessRuntime.run_program = _run_program  # type: ignore[method-assign]
    environment = load_environment(_config(arguments))
    tasks = Tasks(environment.taskset)
    for number, session in enumerate(_sessions()):
        rewards = await _played(environment, tasks.of(session.task), session, number)
        headers = {"Authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=WAIT_S) as client:
            (await client.post(f"{session.url}/rewards", json=rewards)).raise_for_status()
            (await client.post(f"{session.url}/end")).raise_for_status()


async def _prepared(
    runtime: SubprocessRuntime,
    script: str | bytes,
    env: dict[str, str] | None = None,
    *,
    activate: bool = True,
) -> list[str]:
    """Return what runs a program of a harness."""
    if script != CHAT_PROGRAM_SOURCE:
        raise RuntimeError(
            "this harness needs packages of its own: only those with the chat program play here"
        )
    path = f"{runtime.scripts_dir}/{CHAT}"
    if not Path(path).exists():
        await runtime.write(path, CHAT_PROGRAM_SOURCE.encode())
    return [sys.executable, path]


async def _run_program(runtime: SubprocessRuntime, argv: list[str], env: dict[str, str]) -> ProgramResult:
    """Run the program of a harness: a chat without tools of its own here, at once, all else as a process."""
    program, *arguments = argv[1:]
    if Path(program).name != CHAT or OWN_TOOLS & {*arguments}:
        return await runtime.run(argv, env)
    arguments = [_below(runtime, argument) for argument in arguments]
    # It reads its arguments before it waits for anything.
    before, sys.argv = sys.argv, [CHAT, *arguments]
    try:
        await _chat()()
    except SystemExit as left:
        return ProgramResult(left.code if isinstance(left.code, int) else 1, "", str(left))
    except Exception:  # noqa: BLE001 - what a process would print, and end by
        return ProgramResult(1, "", traceback.format_exc())
    finally:
        sys.argv = before
    return ProgramResult(0, "", "")


def _below(runtime: SubprocessRuntime, argument: str) -> str:
    """Return an argument whose file is found from any folder."""
    name, sign, path = argument.partition("=")
    return f"{name}={runtime.workdir}/{path}" if name == FILE_ARGUMENT and sign else argument


@cache
def _chat() -> Callable[[], Awaitable[None]]:
    """Return the main function of the chat program."""
    module = ModuleType("chat")
    exec(compile(CHAT_PROGRAM_SOURCE, CHAT, "exec", dont_inherit=True), module.__dict__)
    main: Callable[[], Awaitable[None]] = module.__dict__["main"]
    return main


async def _played(environment: vf.Env, task: vf.Task, session: Session, number: int) -> dict[str, float]:
    """Return the rewards of one episode."""
    with _key(session.key, number) as variable:
        client = vf.EvalClientConfig(base_url=f"{session.url}/v1", api_key_var=variable)
        # What serves an episode ends with it, so nothing grows with their number.
        async with environment.serving():
            episode = await environment.run_episode(task, vf.ModelContext(model=MODEL, client=client))
    if not episode.ok:
        errors = [error for one in (episode, *episode.traces) for error in one.errors]
        told = "\n".join(f"{error.type}: {error.message}" for error in errors)
        raise SystemExit(f"the episode of verifiers failed: {told or 'no reason is told'}")
    several = len(episode.traces) > 1
    return {
        f"{trace.agent.name or at}.{name}" if several else name: reward.value
        for at, trace in enumerate(episode.traces)
        for name, reward in trace.rewards.items()
        if reward is not None
    }


@contextmanager
def _key(key: str, number: int) -> Iterator[str]:
    """Give the variable in which a client finds its key; programs of harnesses inherit none of this name."""
    name = f"FLOTILLA_API_KEY_{number}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _sessions() -> Iterator[Session]:
    """Give the episode of this process, or one after the other where it is a process of the run."""
    if "FLOTILLA_TASKS_URL" not in os.environ:
        url, key = os.environ["FLOTILLA_SESSION_URL"], os.environ["FLOTILLA_SESSION_KEY"]
        yield Session(url, key, json.loads(_got(f"{url}/task", key)))
        return
    while True:
        if text := _got(os.environ["FLOTILLA_TASKS_URL"], os.environ["FLOTILLA_RUN_KEY"]):
            taken = json.loads(text)
            yield Session(taken["session"]["url"], taken["session"]["key"], taken["task"])


def _got(url: str, key: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return b"" if response.status == NO_TASK else response.read()


if __name__ == "__main__":
    main()
