"""Commands that ask a coordinator need no package of it; those that need one say what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer

COMMANDS = """import contextlib, io, json, os, sys
sys.path = [folder for folder in sys.path if not os.path.isdir(f"{folder}/flotilla_coordinator")]
from flotilla_cli.main import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[:] = ["flotilla", *arguments]
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    texts = [(text.flush(), text.buffer.getvalue().decode())[1] for text in (out, err)]
    print(json.dumps([code, *texts]))
"""
RUN_YAML = "name: trial\nsteps: 2\ndata: {train: data.jsonl}\nrewards: [{reward: numeric}]\n"
INSTALL = "pip install --find-links dist -c dist/constraints.txt flotilla-coordinator"


def ended(*commands: str, **environment: str) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each command, in an interpreter that cannot import the coordinator."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([command.split() for command in commands])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


class OneRun(CoordinatorServiceServicer):
    """A coordinator with a run that ends as soon as somebody watches it, on another machine."""

    def __init__(self) -> None:
        self.run = run_pb2.Run(
            run_id="trial-1",
            state=run_pb2.RUN_STATE_RUNNING,
            directory="/far/trial-1",
            metrics={"eval/accuracy": 0.5, "eval/step": 2.0},
        )

    async def StartRun(self, request: Any, context: Any) -> pb.StartRunResponse:
        return pb.StartRunResponse(run=self.run)

    async def PlanRun(self, request: Any, context: Any) -> pb.PlanRunResponse:
        return pb.PlanRunResponse(plan=run_pb2.Plan(lines=[run_pb2.PlanLine(name="samples", value="8")]))

    async def ListRuns(self, request: Any, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[self.run])

    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self.run, config_yaml=RUN_YAML)

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        self.run.state = run_pb2.RUN_STATE_SUCCEEDED
        self.run.ended_at.GetCurrentTime()
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=1, run=self.run))

    async def UpdateRun(self, request: Any, context: Any) -> pb.UpdateRunResponse:
        return pb.UpdateRunResponse(run=self.run)

    async def ListSamples(self, request: Any, context: Any) -> pb.ListSamplesResponse:
        sample = pb.Sample(sample_id="trial-1/0", state=pb.SAMPLE_STATE_DURABLE, prompt="1+1=", response="2")
        return pb.ListSamplesResponse(samples=[sample])

    async def QueryTimeline(self, request: Any, context: Any) -> AsyncIterator[pb.QueryTimelineResponse]:
        yield pb.QueryTimelineResponse(chunk=b'{"traceEvents": []}')

    async def ListServices(self, request: Any, context: Any) -> pb.ListServicesResponse:
        reward = reg.Registration(name="reward-7", kind=reg.SERVICE_KIND_REWARD, address="127.0.0.1:1")
        return pb.ListServicesResponse(services=[pb.Service(registration=reward)])


@pytest.fixture
def coordinator(serve: Callable[..., str]) -> OneRun:
    made = OneRun()
    serve(made)
    return made


def test_a_run_is_started_followed_and_looked_at(coordinator: OneRun) -> None:
    Path("run.yaml").write_text(RUN_YAML)
    told = {
        "run plan run.yaml": "samples",
        "run start run.yaml": "trial-1",
        "run list": "trial-1",
        "run show": "/far/trial-1",
        "run set trial-1 steps=3": "steps=3 from step 1 on",
        "run stop trial-1": "run trial-1 has ended already",
        "samples latest": "1+1=",
        "timeline latest -o t.json": "wrote t.json",
        "replicas list": "OWES TOKENS",
        "logs": "trained",
        "run watch": "held-out accuracy",
        "token create --role read --name ana -o -": "role read, ana",
        "config schema run": "learning_rate",
    }
    logs = Path(".flotilla/local/logs")
    logs.mkdir(mode=0o700)
    (logs / "trainer.log").write_text("trained\n")
    found = dict(zip(told, ended(*told), strict=True))
    assert {name: one for name, one in found.items() if one[0] or told[name] not in one[1] + one[2]} == {}
    assert Path("t.json").read_text() == '{"traceEvents": []}'


def test_commands_that_work_by_its_code_say_what_to_install(coordinator: OneRun) -> None:
    Path("run.yaml").write_text(RUN_YAML)
    commands = (
        "run compare a b",
        "checkpoint list latest",
        "config validate run.yaml",
        "init --model model --data data.jsonl",
        "doctor",
        "eval model",
        "samples latest --parquet samples.parquet",
    )
    for command, (code, out, _) in zip(commands, ended(*(f"{one} --json" for one in commands)), strict=True):
        error = json.loads(out)["error"]
        assert (code, error["reason"], error["where"]) == (5, "failed_precondition", sys.prefix), command
        assert error["what"] == "the package flotilla-coordinator is not installed here"
        assert (
            error["why"]
            and error["next"] == f"install that package in the release of this command: {INSTALL}"
        )


def test_where_none_answers_the_coordinator_is_what_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code, _, err), *answers = ended("ps", "run list --json", "timeline latest -o t.json --json")
    assert code == 3 and "stack 'local' is not running" in err, "it asks the launcher alone"
    for code, out, _ in answers:
        error = json.loads(out)["error"]
        assert (code, error["reason"]) == (3, "unavailable")
        assert "no coordinator answers" in error["why"] and error["next"].endswith(INSTALL)


def test_a_shell_completes_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ("flotilla checkpoint ", "flotilla run show "):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        assert ended("", _FLOTILLA_COMPLETE="complete_bash", **words) == [(0, "\n", "")]
