"""Functions of users run in the jail of their stack; over gRPC, by a service as it is started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import IsolationConfig
from flotilla_core.errors import InvalidConfig
from flotilla_reward.answers import Workers
from flotilla_testing.reward_process import RewardProcess, reward_process
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import find
from flotilla_workers.jail.level import Level

FUNCTIONS = """
import asyncio, ctypes, os, socket, subprocess, tempfile
import beside

def sees(prompt, response, answer, info):
    return float(os.path.exists(response))

def reads(prompt, response, answer, info):
    return float(len(open(response).read()) + 1)

def writes(prompt, response, answer, info):
    with open(response, "w") as file:
        file.write("1")
    return 1.0

def has_variable(prompt, response, answer, info):
    return float(response in os.environ)

def connects(prompt, response, answer, info):
    with socket.socket() as made:
        return float(made.connect_ex(("127.0.0.1", int(response))) == 0)

SEEN = []
THERE = {*os.listdir(tempfile.gettempdir())}  # this file may be below it

def finds_and_leaves(prompt, response, answer, info):
    libc = ctypes.CDLL(None, use_errno=True)
    found = [*SEEN, *{*os.listdir(tempfile.gettempdir())} - THERE]
    SEEN.append("memory")
    os.makedirs(os.path.join(tempfile.gettempdir(), "folder", "below"))
    open(os.path.join(tempfile.gettempdir(), "folder", "file"), "w").close()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.path.exists("/proc/self"):
        numbers = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        commands = [open(f"/proc/{name}/cmdline").read() for name in numbers]
        found += [one for one in commands if one.startswith("sleep")][1:]
        found += os.listdir("/dev/shm")
        open("/dev/shm/file", "w").close()
    try:
        open(f"/proc/{os.getppid()}/mem", "r+b")
        found.append("its memory")
    except OSError:
        pass
    if response == "shared" and libc.shmget(7, 4096, 0) >= 0:
        found.append("shared memory")
    if response == "shared":
        libc.shmget(7, 4096, 0o1600)
    if response == "dies":
        os.kill(os.getpid(), 9)
    return float(len(found))

def asks(prompt, response, answer, info):
    import urllib.request
    urllib.request.urlopen(response)

def wraps(prompt, response, answer, info):
    try:
        socket.create_connection(("192.0.2.1", 80))
    except OSError as error:
        raise ValueError("no page") from error

def needs_variable(prompt, response, answer, info):
    os.environ[response]

def lacks_key(prompt, response, answer, info):
    {}[response]

def fills(prompt, response, answer, info):
    raise MemoryError

async def waits(prompt, response, answer, info):
    await asyncio.sleep(0)
    return 1.0

def user(prompt, response, answer, info):
    return float(os.getuid()) + beside.NOTHING
"""


@pytest.fixture
def shown() -> Iterator[Path]:
    """A folder of a user's that any user may read, with what only its owner may."""
    with tempfile.TemporaryDirectory(prefix="flotilla-isolation-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "functions").mkdir()
        (folder / "functions" / "rewards.py").write_text(FUNCTIONS)
        (folder / "functions" / "beside.py").write_text("NOTHING = 0")
        (folder / "more").write_text("")
        yield folder


@pytest.fixture(autouse=True)
def needs_a_jail() -> None:
    if not find().level:
        pytest.skip(f"this host has no jail: {find().why_not_higher}")


async def value(
    service: RewardProcess, shown: Path, function: str, response: str, *, trusted: bool = False
) -> Any:
    reward = f"{shown / 'functions' / 'rewards.py'}:{function}"
    (outcome,) = await service.outcomes(reward, [response], trusted=trusted)
    return outcome.value.components[0].value if outcome.HasField("value") else outcome.error.message


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[RewardProcess]:
    async with reward_process(tmp_path, workers=1, isolation={}) as service:
        yield service


async def test_a_function_reads_its_own_folder_and_nothing_else_of_the_host(
    service: RewardProcess, shown: Path
) -> None:
    assert await value(service, shown, "sees", str(shown / "functions" / "beside.py")) == 1.0
    assert await value(service, shown, "sees", str(shown / "more")) == 0.0
    assert await value(service, shown, "sees", "/etc/passwd") == 0.0
    told = await value(service, shown, "writes", str(shown / "functions" / "made"))
    assert "Read-only" in told and "functions write to temporary folders alone" in told
    assert await value(service, shown, "writes", "/tmp/made") == 1.0
    assert not Path("/tmp/made").exists()


async def test_a_function_reaches_no_port_of_the_host_and_sees_no_variable_of_its_service(
    service: RewardProcess, shown: Path
) -> None:
    port = str(service.address.rpartition(":")[2])
    assert await value(service, shown, "connects", port) == 0.0
    assert await value(service, shown, "has_variable", "VIRTUAL_ENV_OF_NOBODY") == 0.0
    if os.geteuid() == 0:
        assert await value(service, shown, "user", "") != 0.0


async def test_what_the_jail_refuses_is_told_with_the_key_that_allows_it(
    service: RewardProcess, shown: Path
) -> None:
    told = await value(service, shown, "reads", str(shown / "more"))
    assert "No such file" in told and "name it in reward.isolation.readable of the stack" in told
    assert "reward.isolation" not in await value(service, shown, "reads", str(shown / "nowhere"))
    assert "reward.isolation.memory_gib" in await value(service, shown, "fills", "")
    assert "reward.isolation.environment of the stack names: name MY_KEY there" in await value(
        service, shown, "needs_variable", "MY_KEY"
    )
    assert "reward.isolation" not in await value(service, shown, "lacks_key", "MY_KEY")
    if find().level is Level.NAMESPACES:
        trusted = "`trusted: true` in the term of the run lets this function out of it"
        assert trusted in await value(service, shown, "writes", "/usr/bin/mine")
        for function, response in (
            ("asks", "http://192.0.2.1/"),
            ("asks", "http://a.example/"),
            ("wraps", ""),
        ):
            assert f"The jail has no network: {trusted}" in await value(service, shown, function, response)


async def test_a_function_that_its_run_trusts_runs_outside_of_the_jail_and_no_other_one_does(
    service: RewardProcess, shown: Path
) -> None:
    for _ in range(2):
        assert await value(service, shown, "sees", "/etc/passwd", trusted=True) == 1.0
        assert await value(service, shown, "sees", "/etc/passwd") == 0.0
    assert await value(service, shown, "user", "", trusted=True) == os.getuid()


async def test_functions_are_loaded_where_the_user_of_the_service_alone_may_go(
    service: RewardProcess, shown: Path
) -> None:
    for path in (*(shown / "functions").iterdir(), shown / "functions", shown):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert await value(service, shown, "sees", str(shown / "functions" / "beside.py")) == 1.0


async def test_of_a_folder_that_is_everybodys_a_function_sees_its_file_alone_as_it_is_now(
    service: RewardProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(0o1777)
    file, other = folder / "mine.py", folder / "other"
    other.write_text("")
    file.write_text(
        "def reward(prompt, response, answer, info):\n    open(response).close()\n    return 1.0\n"
    )
    (seen,) = await service.outcomes(f"{file}:reward", [str(file)])
    assert seen.value.components[0].value == 1.0
    (hidden,) = await service.outcomes(f"{file}:reward", [str(other)])
    assert "the jail does not show it" in hidden.error.message
    (folder / "new").write_text("def reward(prompt, response, answer, info):\n    return 7.0\n")
    os.replace(folder / "new", file)
    (changed,) = await service.outcomes(f"{file}:reward", [""])
    assert changed.value.components[0].value == 7.0


async def test_a_stack_gives_functions_what_they_need_by_name(
    shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    given = {"readable": [str(shown / "more")], "environment": ["GIVEN"]}
    async with reward_process(tmp_path, workers=1, isolation=given) as service:
        assert await value(service, shown, "sees", str(shown / "more")) == 1.0
        assert await value(service, shown, "has_variable", "GIVEN") == 1.0


async def test_a_sample_finds_nothing_that_one_before_it_left_where_workers_fork(
    shown: Path, tmp_path: Path
) -> None:
    async with reward_process(tmp_path, workers=1, isolation={"preload": ["decimal"]}) as service:
        reward = f"{shown / 'functions' / 'rewards.py'}:finds_and_leaves"
        responses = ["", "", "shared", "shared", "dies", ""]
        for outcome, response in zip(await service.outcomes(reward, responses), responses, strict=True):
            if response == "dies":
                assert "its process was ended by SIGKILL before it answered" in outcome.error.message
            else:
                assert outcome.value.components[0].value == 0.0, outcome
        assert await value(service, shown, "waits", "") == 1.0


async def test_a_worker_that_forks_answers_sample_after_sample_until_it_finds_what_it_cannot_remove(
    shown: Path,
) -> None:
    pool = Workers(1, lambda: find(IsolationConfig(preload=())))
    await pool.start()
    try:
        target = Target("file", str(shown / "functions" / "rewards.py"), "finds_and_leaves")
        question = {"prompt": "", "answer": "", "info": {}}
        pids = []
        for response in ("", "", "shared", ""):
            outcome, _ = await pool.ask(target, question | {"responses": [response]}, 20)
            assert outcome.value == 0.0
            pids += [pid for name, pid in pool.pids.items() if "unused" not in name]
        if find().level is Level.NAMESPACES:
            assert len(pids) == 3 and pids[0] == pids[1] != pids[2], (
                "none is left after that of shared memory"
            )
        assert pool.replaced == 0
    finally:
        await pool.stop()


async def test_a_host_below_the_level_that_is_demanded_runs_no_function(shown: Path, tmp_path: Path) -> None:
    if find().level is Level.NAMESPACES:
        pytest.skip("this host has the highest level")
    async with reward_process(tmp_path, workers=1, isolation={"at_least": "namespaces"}) as service:
        with pytest.raises(InvalidConfig, match="this host has no jail of level namespaces"):
            await value(service, shown, "sees", "")
