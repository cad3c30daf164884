"""Episodes on a real environment service, played by the coordinator's client: none is harmed by another one."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from flotilla.common.v1.operate_pb2 import DrainRequest
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla_coordinator.rollouts.environments import Environments, EpisodeCall, EpisodeStart
from flotilla_coordinator.rollouts.episode_messages import Asked, Ended
from flotilla_core import rpc
from flotilla_core.errors import FailedPrecondition, InvalidConfig, Unavailable
from flotilla_testing.environment_process import EnvironmentProcess, environment_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = Path(__file__).parent
LIMIT_S = 60.0
CALL_LIMIT_S = 2.0

FAILS = {
    "init_raises": "RuntimeError: no",
    "tool_without_name": "a tool without a name",
    "recurses": "RecursionError",
    "raises": "KeyError: 'level'",
    "raises_escapes": "RuntimeError: ",
    "leaves": "SystemExit: bye",
    "kills_its_worker": "ended by SIGKILL",
    "ends_its_worker": "exited with status 0",
    "breaks_its_worker": "ended by SIGSEGV",
    "kills_its_keeper": "SIGKILL",
    "closes_every_descriptor": "the worker",
    "writes_to_every_descriptor": "no answer to its question",
    "message_of_100_mb": "bytes as JSON, of 983,040 at most",
    "million_messages": "expected a list of at most 1000",
    "deep_arguments": "returned a call whose arguments have more than 32 levels",
    "deep_arguments_as_text": "returned a call whose arguments are not JSON",
    "forged_role": "expected a role among",
    "nested_content": "expected text",
    "says_nothing": "returned no messages and is not done",
    "returns_nothing": "expected a Reply",
    "reward_is_nan": "expected a finite number",
    "reward_is_text": "expected a finite number",
    "many_rewards": "returned 100,000 rewards",
    "close_raises": "RuntimeError: close",
    "prints_much": "RuntimeError: printed",
}
HANGS = ("begin_never_ends", "never_ends", "sleeps")


@dataclass
class Service:
    """A service with one worker for each run, and a file with hostile environments."""

    process: EnvironmentProcess
    file: Path

    def run(
        self,
        name: str,
        run_id: str = "run",
        call_limit_s: float = CALL_LIMIT_S,
        episode_limit_s: float = math.inf,
        **parameters: Any,
    ) -> Environments:
        named = f"{self.file}:{name}" if name[0].isupper() else name
        pool = self.process.pool
        limits = {"call_limit_s": call_limit_s, "episode_limit_s": episode_limit_s}
        return Environments(run_id, named, parameters, pool, LIMIT_S, **limits)

    def workers(self) -> list[psutil.Process]:
        started = psutil.Process(self.process.process.pid).children(recursive=True)
        return [one for one in started if any("flotilla_workers.worker" in part for part in one.cmdline())]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    file = Path(shutil.copy(HERE / "hostile_environments.py", tmp_path_factory.mktemp("environments")))
    async with environment_process(file.parent) as process:
        yield Service(process, file)


async def said(call: EpisodeCall, *answers: str) -> list[str]:
    """Answer turns, and return what the environment said to each, before it asked for it."""
    found = []
    for answer in answers:
        asked = await call.asked()
        if asked is None:
            break
        found.append(asked.messages[-1]["content"])
        await call.written({"role": "assistant", "content": answer}, tokens=1)
    return found


async def played(environments: Environments, *answers: str, episode_id: str = "a") -> Ended:
    """Return the end of an episode, within which each answer has its turn."""
    async with asyncio.timeout(LIMIT_S), environments.begin(EpisodeStart(episode_id)) as call:
        await said(call, *answers)
        assert await call.asked() is None
        assert call.ended is not None
        return call.ended


async def refused(environments: Environments) -> None:
    """Begin episodes until none is taken."""
    with suppress(Unavailable):
        while True:
            async with environments.begin(EpisodeStart("late")) as call:
                await call.asked()


class Neighbours:
    """Episodes beside a hostile one: in its run and worker, and in another run."""

    def __init__(self, service: Service) -> None:
        self._runs = [service.run("Calm", run) for run in ("run", "run", "other")]
        self._held = [run.begin(EpisodeStart("a", seed=seed)) for seed, run in enumerate(self._runs)]

    async def begin(self) -> None:
        self._calls = [await held.__aenter__() for held in self._held]
        for seed, call in enumerate(self._calls):
            assert await said(call, "one") == [f"seed {seed}"]

    async def assert_unharmed(self) -> None:
        for seed, (call, held) in enumerate(zip(self._calls, self._held, strict=True)):
            assert await said(call, "two", "end") == [f"{seed}: one", f"{seed}: one two"]
            assert await call.asked() is None
            assert call.ended == Ended("completed", {"said": 3.0}, (0.5, 0.5, 1.0), {})
            await held.__aexit__(None, None, None)


@pytest.mark.parametrize("kind", [*FAILS, *HANGS])
async def test_a_hostile_episode_is_bounded_and_named_and_harms_no_other_one(
    service: Service, kind: str
) -> None:
    neighbours = Neighbours(service)
    await neighbours.begin()
    ended = await played(service.run("Hostile", kind=kind), "1", "2")
    if kind in HANGS:
        late = (
            f": the environment took longer than {CALL_LIMIT_S:g} s; its worker was ended, and other episodes"
        )
        assert ended.ending == "timeout" and late in ended.failure
    else:
        assert ended.ending == "error" and FAILS[kind] in ended.failure, ended
        assert len(ended.failure) < 5_000
    assert not ended.rewards and not ended.turn_rewards
    await neighbours.assert_unharmed()


async def test_what_an_episode_leaves_behind_harms_no_other_one(service: Service) -> None:
    neighbours = Neighbours(service)
    await neighbours.begin()
    async with service.run("Hostile", kind="writes_later").begin(EpisodeStart("a")) as call:
        assert await said(call, "1", "2") == ["begin", "go on"]
        assert await call.asked()
        await neighbours.assert_unharmed()
    ended = await played(service.run("Hostile", kind="forks_and_returns"), "1", "2")
    assert ended.rewards == {"forked": 1.0}, "the process that it forked answers nothing"


async def test_an_error_is_told_with_the_line_of_the_users_file(service: Service) -> None:
    lines = service.file.read_text().splitlines()
    raised = lines.index('        raise KeyError("level")') + 1
    ended = await played(service.run("Hostile", kind="raises"), "1", "2")
    assert ended.failure.startswith(f"{service.file}:{raised}: ")
    assert f"line {raised}, in raises" in ended.traceback and "flotilla_environment" not in ended.traceback
    ended = await played(service.run("Hostile", kind="returns_nothing"), "1", "2")
    (reply,) = (
        number
        for number, line in enumerate(lines, 1)
        if "def reply" in line
        and number > raised - 60
        and "Does what" in "".join(lines[number - 16 : number])
    )
    assert ended.failure.startswith(f"{service.file}:{reply}: ")


async def test_an_environment_that_does_not_load_fails_the_call(service: Service) -> None:
    reasons = {"Hostile": "missing a required", "Gone": "has no Gone", "nothing": "there is no environment"}
    for name, why in reasons.items():
        with pytest.raises(InvalidConfig, match=why):
            await played(service.run(name), "1")


async def test_an_episode_that_is_not_the_same_again_is_begun_anew_by_its_caller(service: Service) -> None:
    async with service.run("Random").begin(EpisodeStart("a")) as call:
        await said(call, "1")
        assert await call.asked()
        await played(service.run("Hostile", kind="kills_its_worker"), "1", "2")
        await call.written({"role": "assistant", "content": "2"})
        with pytest.raises(FailedPrecondition, match="cannot go on in another worker"):
            await call.asked()
    assert service.process.pool.replicas(), "the replica is well"


async def test_a_stop_gives_the_rewards_for_what_there_is(service: Service) -> None:
    run = service.run("dialogue")
    info = {"questions": ["1 + 1?", "2 + 2?"], "answers": ["2", "4"]}
    async with run.begin(EpisodeStart("a", [{"role": "system", "content": "add"}], info=info)) as call:
        asked = await call.asked()
        assert asked == Asked(
            [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1?"}], tools=[]
        )
        await call.written({"role": "assistant", "content": "It is 2."})
        assert await call.asked() == Asked([{"role": "user", "content": "2 + 2?"}], tools=[])
        assert await call.stop("max_turns") == Ended("max_turns", {"correct": 0.5}, (), {})
        assert await call.asked() is None


async def test_calls_of_tools_travel_as_chat_templates_know_them(service: Service) -> None:
    start = EpisodeStart("a", [{"role": "user", "content": "12 * 12?"}], answer="144")
    async with service.run("calculator").begin(start) as call:
        asked = await call.asked()
        assert asked is not None and asked.messages == [*start.messages]
        (tool,) = asked.tools
        assert (tool["type"], tool["function"]["name"]) == ("function", "calculate")
        function = {"name": "calculate", "arguments": {"expression": "12 * 12"}}
        calls = [{"id": "000000001", "type": "function", "function": function}]
        await call.written({"role": "assistant", "content": "", "tool_calls": calls})
        asked = await call.asked()
        assert asked is not None
        assert asked.messages == [{"role": "tool", "content": "144", "tool_call_id": "000000001"}]
        forged = [{"id": "2", "type": "function", "function": {"name": "\x1b[2J", "arguments": {}}}]
        await call.written({"role": "assistant", "content": "", "tool_calls": forged})
        asked = await call.asked()
        assert asked is not None and "not of one line" in asked.messages[0]["content"]
        await call.written({"role": "assistant", "content": "144"})
        assert await call.asked() is None
    assert call.ended == Ended("completed", {"correct": 1.0}, (), {"tool_calls": 1.0, "tool_errors": 1.0})


async def test_the_wait_for_a_worker_is_no_time_of_an_environment(service: Service) -> None:
    run = service.run("Calm", run_id="slow", slow_s=0.2, episode_limit_s=1.0)
    ended = await asyncio.gather(*(played(run, "end", episode_id=str(number)) for number in range(8)))
    assert {one.ending for one in ended} == {"completed"}, ended


async def test_a_caller_that_leaves_in_the_middle_of_a_reply_harms_no_other_episode(service: Service) -> None:
    neighbours = Neighbours(service)
    await neighbours.begin()
    for _ in range(3):
        async with service.run("Calm", slow_s=0.2).begin(EpisodeStart("a")) as call:
            await said(call, "1")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call.asked(), 0.05)
    await neighbours.assert_unharmed()


async def test_thousands_of_episodes_that_begin_at_once_share_one_worker(service: Service) -> None:
    before = service.workers()
    run = service.run("Calm", run_id="thousands", call_limit_s=LIMIT_S)

    async def one(seed: int) -> None:
        async with run.begin(EpisodeStart(str(seed), seed=seed)) as call:
            assert await said(call, "one", "end") == [f"seed {seed}", f"{seed}: one"]
            assert await call.asked() is None
            assert call.ended == Ended("completed", {"said": 2.0}, (0.5, 1.0), {})

    async with asyncio.timeout(100):
        await asyncio.gather(*map(one, range(2000)))
    assert len({*service.workers()} - {*before}) == 2, "one worker and its keeper"


async def test_programs_of_the_policy_run_in_jails_of_their_own(tmp_path: Path) -> None:
    programs = {
        "import os\nprint(os.getppid())\nkept = 1": "1",
        "kept": "NameError",
        "while True: pass": "took longer than 1 s",
        "2 ** 100": str(2**100),
    }
    async with environment_process(tmp_path, isolation={}) as process:
        run = Environments("run", "python", {"limit_s": 1.0}, process.pool, LIMIT_S)
        start = EpisodeStart("a", [{"role": "user", "content": "2 ** 100?"}], answer=str(2**100))
        async with asyncio.timeout(LIMIT_S), run.begin(start) as call:
            assert await call.asked()
            for code, text in programs.items():
                function = {"name": "python", "arguments": {"code": code}}
                calls = [{"id": "1", "type": "function", "function": function}]
                await call.written({"role": "assistant", "content": "", "tool_calls": calls})
                asked = await call.asked()
                assert asked is not None and text in asked.messages[0]["content"]
            await call.written({"role": "assistant", "content": f"It is {2**100}."})
            assert await call.asked() is None
    counts = {"programs": 4.0, "program_errors": 2.0, "tool_calls": 4.0, "tool_errors": 0.0}
    assert call.ended == Ended("completed", {"correct": 1.0}, (), counts)


async def test_a_replica_that_dies_is_unavailable_and_gets_no_more_episodes(tmp_path: Path) -> None:
    async with environment_process(tmp_path) as process:
        run = Environments("run", "frozen_lake", {}, process.pool, 1.0)
        async with run.begin(EpisodeStart("a")) as call:
            assert await call.asked()
            await process.process.kill()
            await call.written({"role": "assistant", "content": "right"})
            with pytest.raises(Unavailable, match="the environment replica is lost"):
                await call.asked()
        assert not process.pool.replicas()


async def test_a_replica_that_drains_ends_with_its_last_episode(tmp_path: Path) -> None:
    async with environment_process(tmp_path) as process:
        run = Environments("run", "frozen_lake", {"most_moves": 2}, process.pool, 1.0)
        async with run.begin(EpisodeStart("a")) as call:
            assert await call.asked()
            request = DrainRequest()
            request.grace.FromSeconds(600)
            await rpc.unary(OperateServiceStub(process.channel).Drain, request, timeout_s=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                await refused(run)
            await call.written({"role": "assistant", "content": "up"})
            assert await said(call, "up") and await call.asked() is None
        assert await asyncio.wait_for(process.process.wait(), LIMIT_S) == 0
