"""Commands that ask services themselves, over the real wire: their addresses come from a coordinator elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from flotilla.common.v1 import operate_pb2, operate_pb2_grpc, registration_pb2
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from flotilla.launcher.v1.launcher_pb2 import ListResponse, ProcessState, ProcessStatus
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from flotilla_cli.processes import (
    as_the_coordinator_sees,
    isolation_of,
    process_json,
    process_row,
    process_table,
    say_isolation,
)
from flotilla_cli.replicas import replica_json
from flotilla_core.errors import NotFound
from flotilla_launch import launcher as launchers
from flotilla_launch import state as launcher_state
from flotilla_launch.client import LauncherClient
from flotilla_testing.session_specs import as_struct

Command = Callable[..., tuple[int, str, str]]
LINES = ['{"time": "2026-01-01T00:00:02Z", "event": "elsewhere"}', "a plain line"]


class Elsewhere(CoordinatorServiceServicer):
    """A coordinator that knows one reward service on another machine, and a run with samples."""

    address = ""
    without_messages: ClassVar[list[bool]] = []
    """What each call for samples said."""

    async def ListServices(self, request: Any, context: Any) -> pb.ListServicesResponse:
        reward = registration_pb2.Registration(
            name="reward-7", kind=registration_pb2.SERVICE_KIND_REWARD, address=self.address, host="far"
        )
        return pb.ListServicesResponse(services=[pb.Service(registration=reward)])

    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=run_pb2.Run(run_id="trial-1"))

    async def ExportRun(self, request: Any, context: Any) -> pb.ExportRunResponse:
        return pb.ExportRunResponse(files=[f"/runs/{request.run_id}/parquet/metrics.parquet"])

    async def ListSamples(self, request: Any, context: Any) -> pb.ListSamplesResponse:
        self.without_messages.append(request.without_messages)
        first = int(request.page_token or 0)
        chosen = [one for one in SAMPLES if request.state in (0, one.state)]
        page = chosen[first : first + min(request.limit, 2)]
        more = first + len(page) < len(chosen)
        return pb.ListSamplesResponse(samples=page, next_page_token=str(first + len(page)) if more else "")


SAMPLES = [
    pb.Sample(
        sample_id=f"trial-1/{index}", step=index, state=state, prompt="1+1=\nthink", response="2", **rest
    )
    for index, (state, rest) in enumerate(
        [
            (pb.SAMPLE_STATE_DURABLE, {"reward": 0.0}),
            (pb.SAMPLE_STATE_DROPPED, {"drop_reason": "stale"}),
            (pb.SAMPLE_STATE_DURABLE, {"reward": 1.0}),
        ]
    )
]


class Operated(operate_pb2_grpc.OperateServiceServicer):
    log = True
    grace_s = -1.0

    async def Drain(self, request: Any, context: Any) -> operate_pb2.DrainResponse:
        self.grace_s = request.grace.ToTimedelta().total_seconds()
        return operate_pb2.DrainResponse()

    async def GetActivity(self, request: Any, context: Any) -> operate_pb2.GetActivityResponse:
        activity = operate_pb2.Activity(what="scoring 3 items", run_id="trial-1")
        activity.since.GetCurrentTime()
        return operate_pb2.GetActivityResponse(activities=[activity])

    async def DumpStacks(self, request: Any, context: Any) -> operate_pb2.DumpStacksResponse:
        found = [
            operate_pb2.ProcessStacks(process=name, pid=7, text=f"in {name}") for name in ("main", "rank 0")
        ]
        return operate_pb2.DumpStacksResponse(processes=found)

    async def Profile(self, request: Any, context: Any) -> operate_pb2.ProfileResponse:
        return operate_pb2.ProfileResponse(collapsed_stacks=f"main;score {request.samples_per_second}")

    async def TailLog(self, request: Any, context: Any) -> AsyncIterator[operate_pb2.TailLogResponse]:
        if not self.log:
            raise NotFound("reward-7 has no log file")
        for line in LINES[-request.lines :]:
            yield operate_pb2.TailLogResponse(line=line)


class Rewards(reward_pb2_grpc.RewardServiceServicer):
    """Knows two rewards: one whose parameters all have defaults, and one that needs a parameter."""

    async def ListRewards(self, request: Any, context: Any) -> reward_pb2.ListRewardsResponse:
        tolerances = {
            name: {"type": "number", "default": 0} for name in ("absolute_tolerance", "relative_tolerance")
        }
        pattern = {"pattern": {"type": "string"}}
        rewards = [
            reward_pb2.RewardInfo(
                name="numeric",
                description="The last number is within a tolerance of the answer.",
                parameters=as_struct({"properties": tolerances}),
            ),
            reward_pb2.RewardInfo(
                name="regex",
                description="Search for a pattern.",
                parameters=as_struct({"properties": pattern, "required": ["pattern"]}),
            ),
        ]
        return reward_pb2.ListRewardsResponse(rewards=rewards, isolation="landlock")


@pytest.fixture
def operated(serve: Callable[..., str]) -> Operated:
    """The reward service, which a coordinator names under the same address."""
    coordinator, service = Elsewhere(), Operated()
    coordinator.address = serve(coordinator, service, Rewards())
    return service


@pytest.mark.usefixtures("operated")
def test_stacks_shows_what_a_service_is_doing_and_every_process_of_it(flotilla: Command) -> None:
    code, out, err = flotilla("stacks", "reward-7")
    assert code == 0, err
    assert "scoring 3 items (run trial-1)" in out
    assert "=== reward-7 main, pid 7\nin main" in out and "rank 0" in out
    shown = json.loads(flotilla("stacks", "reward-7", "--json")[1])
    assert [one["process"] for one in shown["processes"]] == ["main", "rank 0"]
    assert shown["activities"][0]["what"] == "scoring 3 items"


@pytest.mark.usefixtures("operated")
def test_an_unknown_service_is_answered_with_those_that_run(flotilla: Command) -> None:
    for command in (("stacks", "trainer"), ("profile", "trainer", "-o", "p.txt"), ("drain", "trainer")):
        code, _, err = flotilla(*command)
        assert code == 2
        assert "there is no running service 'trainer'" in err and "name one of: reward-7" in err


@pytest.mark.usefixtures("operated")
def test_profile_writes_the_collapsed_stacks(flotilla: Command) -> None:
    code, _, err = flotilla("profile", "reward-7", "-o", "new/p.txt", "--seconds", "0.1", "--rate", "50")
    assert code == 0, err
    assert Path("new/p.txt").read_text() == "main;score 50\n"


def test_drain_asks_a_service_elsewhere_to_finish_and_end(flotilla: Command, operated: Operated) -> None:
    code, _, err = flotilla("drain", "reward-7", "--grace", "1.5")
    assert code == 0 and "reward-7 finishes what it has, for at most 1.5 s, and ends" in err
    assert operated.grace_s == 1.5
    assert json.loads(flotilla("drain", "reward-7", "--json")[1]) == {"service": "reward-7", "grace_s": 60.0}


@pytest.mark.parametrize(
    ("state", "code"),
    [(ProcessState.PROCESS_STATE_READY, 5), (ProcessState.PROCESS_STATE_ATTACHED, 0)],
    ids=["started by it", "attached"],
)
def test_drain_ends_no_service_that_a_launcher_would_start_again(
    flotilla: Command,
    operated: Operated,
    monkeypatch: pytest.MonkeyPatch,
    state: ProcessState.ValueType,
    code: int,
) -> None:
    process = ProcessStatus(name="reward-7", address=os.environ["FLOTILLA_COORDINATOR"], state=state)

    async def list_processes(self: LauncherClient) -> ListResponse:
        return ListResponse(processes=[process])

    for module, name in ((launcher_state, "find"), (launchers, "require")):
        monkeypatch.setattr(module, name, lambda paths: SimpleNamespace(socket="/nowhere"))
    monkeypatch.setattr(LauncherClient, "state", list_processes)
    ended, _, err = flotilla("drain", "reward-7")
    assert (ended, operated.grace_s) == ((code, -1.0) if code else (0, 60.0))
    assert ("end replicas with flotilla scale" in err) == bool(code)


@pytest.mark.usefixtures("operated")
def test_logs_of_files_and_of_services_elsewhere_are_merged_by_time(flotilla: Command) -> None:
    logs = Path(".flotilla/local/logs")
    logs.mkdir(mode=0o700)
    (logs / "trainer.log").write_text(
        '{"time": "2026-01-01T00:00:01Z", "event": "a"}\n{"time": "2026-01-01T00:00:03Z", "event": "b"}\n'
    )
    code, out, err = flotilla("logs", "--json")
    assert code == 0, err
    assert [json.loads(line)["name"] for line in out.splitlines()] == [
        "trainer",
        "reward-7",
        "reward-7",
        "trainer",
    ]
    assert flotilla("logs", "reward-7", "-n", "1")[1] == "a plain line\n"
    assert "elsewhere" not in flotilla("logs", "trainer")[1]
    assert "a plain line" in flotilla("logs", "reward")[1], "a kind stands for all services of it"
    assert flotilla("logs", "nothing")[0] == 2


def test_a_log_that_cannot_be_read_hides_no_other_one(flotilla: Command, operated: Operated) -> None:
    operated.log = False
    logs = Path(".flotilla/local/logs")
    logs.mkdir(mode=0o700)
    (logs / "trainer.log").write_text("here\n")
    code, out, err = flotilla("logs")
    assert (code, "here" in out, "reward-7 has no log file" in err) == (0, True, True), err
    code, _, err = flotilla("logs", "reward-7")
    assert code == 2 and "reward-7 has no log file" in err


@pytest.mark.usefixtures("operated")
def test_reward_list_names_every_reward_with_its_parameters(flotilla: Command) -> None:
    code, out, err = flotilla("reward", "list")
    assert code == 0, err
    assert "absolute_tolerance=0" in out and "is within a tolerance of the answer" in out
    rewards = {one["name"]: one for one in json.loads(flotilla("reward", "list", "--json")[1])["rewards"]}
    assert rewards.keys() == {"numeric", "regex"}
    assert rewards["regex"]["required"] == ["pattern"] and rewards["regex"]["services"] == ["reward-7"]
    assert "reward-7: functions of users run at level landlock" in err
    assert json.loads(flotilla("reward", "list", "--json")[1])["isolation"] == {"reward-7": "landlock"}


@pytest.mark.usefixtures("operated")
def test_samples_shows_each_with_its_reward_and_what_became_of_it(flotilla: Command) -> None:
    code, out, err = flotilla("samples", "latest")
    assert code == 0, err
    assert "dropped: stale" in out and "1+1= think" in out and len(out.splitlines()) == 4
    shown = json.loads(flotilla("samples", "latest", "--json")[1])
    assert [one["reward"] for one in shown["samples"]] == [0.0, None, 1.0], "no reward is not a reward of 0"
    dropped = json.loads(flotilla("samples", "latest", "--state", "dropped", "--json")[1])["samples"]
    assert [one["sample_id"] for one in dropped] == ["trial-1/1"]
    assert len(json.loads(flotilla("samples", "latest", "-n", "1", "--json")[1])["samples"]) == 1
    assert "--- prompt\n1+1=\nthink\n--- response\n2\n" in flotilla("samples", "latest", "--full")[1]
    assert flotilla("samples", "latest", "--state", "lost")[0] == 2


@pytest.mark.usefixtures("operated")
@pytest.mark.parametrize(("options", "without"), [((), True), (("--full",), False), (("--json",), False)])
def test_samples_asks_for_conversations_only_where_it_shows_them(
    flotilla: Command, options: tuple[str, ...], without: bool
) -> None:
    Elsewhere.without_messages.clear()
    assert flotilla("samples", "latest", *options)[0] == 0
    assert set(Elsewhere.without_messages) == {without}


@pytest.mark.usefixtures("operated")
def test_run_export_prints_the_files(flotilla: Command) -> None:
    code, out, err = flotilla("run", "export", "trial-1")
    assert (code, out) == (0, "/runs/trial-1/parquet/metrics.parquet\n"), err
    assert json.loads(flotilla("run", "export", "trial-1", "--json")[1])["files"] == [out.strip()]


def test_a_generator_that_sleeps_says_so_in_both_lists() -> None:
    kind = registration_pb2.SERVICE_KIND_GENERATOR
    process = ProcessStatus(name="generator-0", kind=kind, state=ProcessState.PROCESS_STATE_READY)
    registration = registration_pb2.Registration(name="generator-0", kind=kind)
    for asleep in (True, False):
        service = pb.Service(registration=registration, work_state=pb.WORK_STATE_READY, asleep=asleep)
        assert process_row(process, service)[2] == ("asleep" if asleep else "ready")
        assert (process_json(process, service)["state"], process_json(process, service)["asleep"]) == (
            "ready",
            asleep,
        )
        found = replica_json(service)
        assert found["asleep"] is asleep and found["why"] == ("asleep during the update" if asleep else "")
    assert process_json(process)["asleep"] is False


def test_how_functions_run_is_told_once_for_all_services_that_are_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind = registration_pb2.SERVICE_KIND_REWARD
    levels = ("landlock", "none", "refused", "landlock", "")
    services = {
        f"reward-{index}": pb.Service(registration=registration_pb2.Registration(kind=kind, isolation=level))
        for index, level in enumerate(levels)
    }
    services["generator-0"] = pb.Service()
    say_isolation(isolation_of(services))
    assert capsys.readouterr().err.splitlines() == [
        "reward-0, reward-3: functions of users run at level landlock",
        "reward-1: functions of users run at level none: NOT in a jail, but as the service itself",
        "reward-2: functions of users are refused: flotilla doctor says why",
    ]
    process = ProcessStatus(name="reward-0", kind=kind)
    assert process_json(process, services["reward-0"])["isolation"] == "landlock"


def test_versions_are_a_column_while_a_run_has_given_one() -> None:
    processes = [ProcessStatus(name=name) for name in ("generator-0", "reward-0")]
    service = pb.Service()
    columns, rows = process_table(processes, {"generator-0": service})
    assert columns[-1] == "SINCE" and {len(row) for row in rows} == {len(columns)}
    service.live_version.step = 3
    columns, rows = process_table(processes, {"generator-0": service})
    assert columns[-1] == "VERSION" and [row[-1] for row in rows] == ["0.3", ""]


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (registration_pb2.INSTANCE_STATE_UNSPECIFIED, ProcessState.PROCESS_STATE_UNSPECIFIED),
        (registration_pb2.INSTANCE_STATE_STARTING, ProcessState.PROCESS_STATE_STARTING),
        (registration_pb2.INSTANCE_STATE_READY, ProcessState.PROCESS_STATE_READY),
        (registration_pb2.INSTANCE_STATE_DRAINING, ProcessState.PROCESS_STATE_STOPPING),
        (registration_pb2.INSTANCE_STATE_FAILED, ProcessState.PROCESS_STATE_FAILED),
    ],
)
def test_a_service_that_was_started_elsewhere_is_shown_in_each_state(state: Any, shown: Any) -> None:
    registration = registration_pb2.Registration(name="reward-7", state=state)
    (process,) = as_the_coordinator_sees([], {"reward-7": pb.Service(registration=registration)})
    assert (process.name, process.state) == ("reward-7", shown)
