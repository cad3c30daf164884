"""Functions of users run in the jail of their stack; over gRPC, by a service as it is started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.errors import InvalidConfig
from flotilla_testing.reward_process import RewardProcess, reward_process
from flotilla_workers.jail.jail import Level, find

FUNCTIONS = """
import os, socket
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


async def value(service: RewardProcess, shown: Path, function: str, response: str) -> Any:
    reward = f"{shown / 'functions' / 'rewards.py'}:{function}"
    (outcome,) = await service.outcomes(reward, [response])
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


async def test_a_stack_gives_functions_what_they_need_by_name(
    shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    given = {"readable": [str(shown / "more")], "environment": ["GIVEN"]}
    async with reward_process(tmp_path, workers=1, isolation=given) as service:
        assert await value(service, shown, "sees", str(shown / "more")) == 1.0
        assert await value(service, shown, "has_variable", "GIVEN") == 1.0


async def test_a_host_below_the_level_that_is_demanded_runs_no_function(shown: Path, tmp_path: Path) -> None:
    if find().level is Level.NAMESPACES:
        pytest.skip("this host has the highest level")
    async with reward_process(tmp_path, workers=1, isolation={"at_least": "namespaces"}) as service:
        with pytest.raises(InvalidConfig, match="this host has no jail of level namespaces"):
            await value(service, shown, "sees", "")
