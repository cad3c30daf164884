"""Tasks in folders of Harbor's format: the policy works in a room, and the tests of the task score what is there."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_environment.environment import Begun, Call, Reply, Task
from flotilla_environment.hosted import HostedTools
from flotilla_workers.functions import Refusal

if TYPE_CHECKING:
    from flotilla_environment.builtin.harbor_task import HarborTask, RoomFile
    from flotilla_environment.rooms import Room

TOOL = {
    "name": "bash",
    "description": "Run a command of bash in the folder of the task, and read what it prints. Each command is a "
    "shell of its own; files, and what it leaves in the background, stay.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
LONGEST_COMMAND = 64 * 1024
MOST_REWARD_BYTES = 64 * 1024
PART_BYTES = 4 << 20


class Harbor(HostedTools):
    """Tasks of Harbor with a shell: rewards are those that the tests of the task write."""

    def __init__(self, tasks: str, *, bases: list[str] | None = None, limit_s: float = 20.0) -> None:
        """`tasks` is a folder of a task, or one with the folders that the column `task` names."""
        super().__init__(limit_s=limit_s)
        self._tasks = Path(tasks).absolute()
        self._bases = bases
        self._room: Room | None = None
        self._task: HarborTask | None = None

    async def begin(self, task: Task) -> Begun:  # type: ignore[override]
        from flotilla_environment.builtin.harbor_task import BASES, VERIFIER, read_task

        bases = BASES if self._bases is None else tuple(self._bases)
        self._task = own = await asyncio.to_thread(read_task, self._folder(task), bases)
        self._refuse_host()
        self._room = await self.place.room(own.writable)
        await self._put(own.files)
        folders = [own.workdir, VERIFIER, "/logs/agent", "/logs/artifacts"]
        made = await self._run(["mkdir", "-p", *folders], "/", {}, 10.0)
        if made["code"]:
            raise Refusal(f"the folders of the task cannot be made: {made['text']}")
        system = [message for message in task.messages if message["role"] == "system"]
        return Begun([*system, {"role": "user", "content": own.instruction}], [TOOL])

    def _folder(self, task: Task) -> Path:
        if (self._tasks / "task.toml").exists():
            return self._tasks
        name = str(task.info.get("task", ""))
        folder = (self._tasks / name).resolve()
        if (
            not name
            or not folder.is_relative_to(self._tasks.resolve())
            or not (folder / "task.toml").exists()
        ):
            raise Refusal(
                f"{self._tasks} has no task.toml, and the column task of the line, {name!r}, names no folder with one"
            )
        return folder

    def _refuse_host(self) -> None:
        from flotilla_workers.jail.level import Level

        if self.place.trusted or (
            not self.place.jail.refusal and self.place.jail.level is not Level.NAMESPACES
        ):
            raise Refusal(
                f"a task needs a jail of level namespaces, with folders of its own, and has {self.place.jail.level}"
                f"{' because the run trusts it' if self.place.trusted else ''}: see `flotilla doctor`"
            )

    async def _put(self, files: list[RoomFile]) -> None:
        assert self._room is not None
        for file in files:
            for first in range(0, max(1, len(file.data)), PART_BYTES):
                part = base64.b64encode(file.data[first : first + PART_BYTES]).decode()
                await self._room.ask("write", path=file.path, data=part, mode=file.mode, afresh=not first)

    async def _run(
        self, command: list[str], folder: str, variables: dict[str, str], limit_s: float
    ) -> dict[str, Any]:
        assert self._room is not None
        said = await self._room.ask(
            "run", limit_s, command=command, folder=folder, environment=variables, limit_s=limit_s
        )
        return dict(said)

    async def call(self, call: Call, limit_s: float) -> tuple[str, bool]:
        command = call.arguments.get("command")
        if call.name != TOOL["name"] or not isinstance(command, str) or len(command) > LONGEST_COMMAND:
            return (
                f"error: there is one tool, bash, with a command of at most {LONGEST_COMMAND:,} characters",
                False,
            )
        assert self._task is not None
        said = await self._run(
            ["/bin/bash", "-c", command], self._task.workdir, self._task.variables, limit_s
        )
        text, code = said["text"] or "nothing was printed", said["code"]
        if code is None:
            return f"{text}\nerror: the command took longer than {limit_s:.0f} s, and was ended", False
        return (text, True) if code == 0 else (f"{text}\nexit code {code}", False)

    async def answered(self, answer: str) -> Reply:
        return Reply(done=True, rewards=await self._tested(), metrics=self.count)

    async def _tested(self) -> dict[str, float]:
        """Return the rewards that the tests write, in the room as the policy left it, but for its processes."""
        from flotilla_environment.builtin.harbor_task import TESTS, VERIFIER

        assert self._room is not None and self._task is not None
        await self._room.ask("alone")
        for folder in (TESTS, VERIFIER):
            await self._room.ask("empty", folder=folder)
        await self._put(self._task.tests)
        script, limit_s = f"{TESTS}/test.sh", self._task.tests_limit_s
        variables = self._task.variables | self._task.tests_variables
        said = await self._run(
            ["/bin/bash", "-c", f"chmod +x {script}; exec {script}"], self._task.workdir, variables, limit_s
        )
        if said["code"] is None:
            raise Refusal(f"the tests took longer than verifier.timeout_sec, {limit_s:g} s\n{said['text']}")
        for name in ("reward.json", "reward.txt"):
            found = await self._room.ask("read", path=f"{VERIFIER}/{name}", most=MOST_REWARD_BYTES)
            if found["text"] is not None:
                return _rewards(name, found["text"])
        raise Refusal(
            f"the tests wrote neither reward.txt nor reward.json in {VERIFIER}, and ended with code {said['code']}. "
            f"A room has no network\n{said['text']}"
        )

    async def close(self) -> None:  # type: ignore[override]
        if self._room is not None:
            await self._room.close()


def _rewards(name: str, text: str) -> dict[str, float]:
    """Return the rewards in a file of the tests, each a finite number."""
    try:
        found = json.loads(text) if name == "reward.json" else {"reward": float(text)}
    except (ValueError, RecursionError):
        raise Refusal(f"the tests wrote a {name} that is none: {text[:200]!r}") from None
    if not isinstance(found, dict) or not found:
        raise Refusal(f"the tests wrote a {name} that is no object with rewards: {text[:200]!r}")
    return {key: _reward(key, value) for key, value in found.items()}


def _reward(key: str, value: object) -> float:
    with suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(number := float(value)):
            return number
    raise Refusal(f"the tests wrote {value!r:.80} as reward {key}, expected a finite number")
