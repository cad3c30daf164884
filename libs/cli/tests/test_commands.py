from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
)
from flotilla_cli import doctor
from flotilla_cli.watch import Told, print_plan, progress
from flotilla_client import connect
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.plan import size_limits
from flotilla_core.errors import NotFound
from flotilla_launch import launcher as launchers
from flotilla_launch.client import LauncherClient

RUN_YAML = "name: trial\nsteps: 2\ndata: {train: data.jsonl}\nrewards: [{reward: numeric}]\n"
Command = Callable[..., tuple[int, str, str]]


class RecordedCoordinator(CoordinatorServiceServicer):
    """Serves one run that ends as `end` says, over the real wire."""

    def __init__(self, end: run_pb2.RunState.ValueType) -> None:
        self.run = run_pb2.Run(
            run_id="trial-1", state=run_pb2.RUN_STATE_RUNNING, total_steps=2, directory="/runs/x"
        )
        self.end = end
        self.configs: list[str] = []

    async def StartRun(self, request: Any, context: Any) -> pb.StartRunResponse:
        self.configs.append(request.config_yaml)
        return pb.StartRunResponse(run=self.run)

    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        if request.run_id not in ("latest", "trial-1"):
            raise NotFound(f"there is no run {request.run_id!r}", next_step="flotilla run list")
        return pb.GetRunResponse(run=self.run, config_yaml="name: trial")

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        step = run_pb2.StepMetrics(step=1, metrics={"reward/mean": 0.25, "tokens_per_s": 1234.0})
        notice = run_pb2.Notice(level=run_pb2.NOTICE_LEVEL_WARNING, text="generator-0 is slow")
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=1, step=step))
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=2, notice=notice))
        self.run.state = self.end
        self.run.reason = "" if self.end == run_pb2.RUN_STATE_SUCCEEDED else "the loss is not finite"
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=3, run=self.run))

    async def QueryTimeline(self, request: Any, context: Any) -> AsyncIterator[pb.QueryTimelineResponse]:
        for chunk in (b'{"traceEvents"', b": []}"):
            yield pb.QueryTimelineResponse(chunk=chunk)


class ListingCoordinator(CoordinatorServiceServicer):
    """Knows of one run in each of these states."""

    def __init__(self, states: list[str]) -> None:
        self._states = states

    async def ListRuns(self, request: Any, context: Any) -> pb.ListRunsResponse:
        states = [run_pb2.RunState.Value(f"RUN_STATE_{state.upper()}") for state in self._states]
        return pb.ListRunsResponse(
            runs=[run_pb2.Run(run_id=f"run-{index}", state=state) for index, state in enumerate(states)]
        )


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the launcher, and return the numbers of replicas that each call requests."""
    asked: list[int] = []

    async def scale(self: Any, kind: Any, replicas: int, *, timeout_s: float) -> list[Any]:
        asked.append(replicas)
        return []

    monkeypatch.setattr(launchers, "require", lambda paths: SimpleNamespace(socket="/nowhere"))
    monkeypatch.setattr(LauncherClient, "scale", scale)
    return asked


def test_help_loads_nothing_heavy() -> None:
    heavy = ["grpc", "pydantic", "yaml", "numpy", "torch", "google.protobuf", "rich.console", "opentelemetry"]
    code = f"import sys, flotilla_cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_version_is_that_of_the_packages(flotilla: Command) -> None:
    assert flotilla("--version") == (0, f"flotilla {metadata.version('flotilla-core')}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(
    flotilla: Command, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    code, out, _ = flotilla("--show-completion")
    assert code == 0
    assert f"_FLOTILLA_COMPLETE=complete_{shell}" in out


def completed(flotilla: Command, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """What bash offers for the last word of `line`."""
    monkeypatch.setenv("_FLOTILLA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    code, out, err = flotilla()
    assert (code, err) == (0, "")
    return out.split()


def test_a_run_is_completed_from_what_is_on_disk(flotilla: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.yaml").write_text("name: other\n")
    directory = Path(".flotilla/other")
    directory.mkdir(parents=True)
    ledger = Ledger.open(directory / "ledger.sqlite")
    for run_id in ("sums-1", "words-2"):
        asyncio.run(ledger.save_run(RunRecord(run_id, "sums", RunState.FAILED, "", str(directory), 0.0)))
    ledger.close()
    offered = completed(flotilla, monkeypatch, "flotilla run show --stack other.yaml ")
    assert offered == ["latest", "words-2", "sums-1"]
    assert completed(flotilla, monkeypatch, "flotilla samples --stack other.yaml su") == ["sums-1"]
    assert completed(flotilla, monkeypatch, "flotilla run stop --stack nowhere.yaml ") == []
    assert completed(flotilla, monkeypatch, "flotilla run stop ") == []
    assert "checkpoint" in completed(flotilla, monkeypatch, "flotilla ch")


def test_a_setting_is_completed_by_key_and_value(flotilla: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(line: str) -> list[str]:
        return completed(flotilla, monkeypatch, f"flotilla {line}")

    Path("run.yaml").write_text(RUN_YAML)
    Path("logged.yaml").write_text("loop: client\n")
    assert {"algorithm.type=", "algorithm.loss."} <= set(offered("run start run.yaml algo"))
    assert offered("run start run.yaml loop=cl") == ["loop=client"]
    Path("losses").mkdir()
    keys = ["loop=", "loop_idle_timeout_s=", "lora.", "logged.yaml", "losses/"]
    assert offered("run plan run.yaml steps=3 lo") == keys
    assert offered("eval latest seed=") == ["seed=0"]
    assert offered("reward test run.yaml export_final=f") == ["export_final=false"]
    assert offered("run set latest checkpoint.k") == ["checkpoint.keep=", "checkpoint.keep=2"]
    Path("stack.yaml").write_text("generator: {replicas: 1}\n")
    assert offered("config validate stack.yaml generator.engine=") == [
        "generator.engine=vllm",
        "generator.engine=sim",
    ]
    assert offered("config validate run.yaml resume=b") == ["resume=by_user"]
    assert offered("run start ") == offered("run start run") == [], "the shell completes files"


TYPED: dict[str, list[str]] = {
    "start run.yaml loop =": ["coordinator", "client"],
    "start run.yaml loop = cl": ["client"],
    "start run.yaml steps = 3 see": ["seed=", "seed=0"],
    "start run.yaml data.train =": [],
    "start run.yaml data.train = tr": [],
    "start run.yaml rewards.0.args.limit = tr": [],
    "set run.yaml checkpoint.keep =": ["2"],
}
"""What bash makes of a command that somebody types, and what it is to offer for the last word."""


@pytest.fixture(scope="module")
def offered_by_bash() -> dict[str, list[str]]:
    """What one bash with the completion of `flotilla` offers for each command of `TYPED`."""
    script = """
        flotilla=$1; shift
        eval "$(_FLOTILLA_COMPLETE=source_bash "$flotilla")"
        for typed in "$@"; do
            COMP_WORDS=(flotilla run $typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _flotilla_completion "$flotilla"
            echo "${COMPREPLY[*]}"
        done
    """
    installed = str(Path(sys.executable).parent / "flotilla")
    shown = subprocess.run(
        ["bash", "-c", script, "bash", installed, *TYPED], capture_output=True, text=True, check=True
    )
    return dict(zip(TYPED, map(str.split, shown.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("typed", TYPED)
def test_bash_takes_a_setting_for_three_words_and_gets_the_last_one(
    offered_by_bash: dict[str, list[str]], typed: str
) -> None:
    assert offered_by_bash[typed] == TYPED[typed]


def test_the_completion_of_a_setting_loads_configuration_alone() -> None:
    heavy = ["grpc", "numpy", "torch", "rich.console", "opentelemetry"]
    code = f"""import sys, flotilla_cli.main, flotilla_cli.run
from types import SimpleNamespace
from flotilla_cli.completion import complete_setting
assert complete_setting(SimpleNamespace(params={{"arguments": ["run.yaml"]}}), "algo")
print([m for m in {heavy!r} if m in sys.modules])"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_commands_that_call_load_nothing_that_serves_or_records() -> None:
    heavy = ["structlog", "opentelemetry.sdk", "psutil", "nats", "numpy"]
    code = f"import sys, flotilla_client, flotilla_launch.client; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_plans_load_nothing_that_calls_serves_or_shows() -> None:
    heavy = ["grpc", "nats", "pyarrow", "structlog", "psutil", "jinja2", "opentelemetry", "rich.console"]
    code = f"import sys, flotilla_cli.run, flotilla_coordinator.plan; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_command_looks_through_no_installed_packages(tmp_path: Path) -> None:
    """Pydantic would, for plugins."""
    code = (
        "import importlib.metadata as m, flotilla_cli.main; m.entry_points = None; flotilla_cli.main.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    command = [sys.executable, "-c", code, "run", "list"]
    shown = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (shown.returncode, "is not running" in shown.stderr) == (3, True), shown.stderr


def test_every_mistake_in_a_stack_file_is_said_with_line_and_suggestion(flotilla: Command) -> None:
    Path("stack.yaml").write_text("name: ok\ngenerator:\n  replica: 1\n")
    code, out, err = flotilla("up", "--json")
    assert code == 2
    assert "stack.yaml:3" in err and "generator.replicas" in err
    assert json.loads(out)["error"]["reason"] == "invalid_config"
    assert not Path(".flotilla").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ps",), 3, "stack 'local' is not running"),
        (("scale", "generator", "2"), 3, "flotilla up"),
        (("scale", "trainer", "2"), 2, "use one of: generator, reward"),
        (("run", "list"), 3, "has no runs on disk"),
        (("run", "start", "nowhere.yaml"), 2, "nowhere.yaml"),
        (("run", "start", "steps=3"), 2, "no configuration file is given"),
        (("run", "show", "--coordinator", "127.0.0.1:1"), 3, "127.0.0.1:1"),
        (("logs",), 2, "has no logs"),
        (("timeline", "latest", "-o", "t.json"), 3, "has no runs on disk"),
        (("up", "--stack", "nowhere.yaml"), 2, "nowhere.yaml"),
        (("no-such-command",), 2, "no-such-command"),
        (("down",), 0, "nothing to do"),
    ],
)
def test_wrong_use_ends_with_its_code_and_says_what_to_do(
    flotilla: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended, _, err = flotilla(*arguments)
    assert (ended, words in err) == (code, True), err


LONG_NAME = "x" * 300
"""Longer than a file system takes."""
LONG_PATH = "x/" * 2046 + "x"
"""Too long once it is resolved against a folder."""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "start", LONG_NAME), 2, "cannot read the configuration file"),
        (("config", "validate", LONG_NAME), 2, "cannot read the configuration file"),
        (("config", "validate", "run.yaml", f"data.train={LONG_PATH}"), 2, "data.train: the file"),
        (
            ("config", "validate", "run.yaml", f"initial_weights={LONG_PATH}"),
            2,
            "initial_weights: the folder",
        ),
        (("config", "validate", "run.yaml", f"name={LONG_NAME}"), 2, "name: expected"),
        (("up", "--stack", LONG_NAME), 2, "cannot read the configuration file"),
        (("doctor", "--stack", LONG_NAME), 5, "cannot read the configuration file"),
        (("ps", "--stack", "far.yaml"), 2, "the stack's directory cannot be used"),
        (("doctor", "--stack", "far.yaml"), 5, "the model folder does not exist"),
        (("timeline", "latest", "-o", f"{LONG_NAME}/t.json"), 2, "cannot be made"),
        (("profile", "trainer", "-o", f"{LONG_NAME}/t.txt"), 2, "cannot be made"),
    ],
)
def test_path_that_is_too_long_is_refused_like_a_missing_one(
    flotilla: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    far = "/x" * 2047
    Path("run.yaml").write_text(RUN_YAML)
    Path("data.jsonl").write_text("")
    Path("far.yaml").write_text(f"model: {far}/x\nstate_dir: {far}\n")
    Path(".flotilla/local").mkdir(parents=True)
    ended, out, err = flotilla(*arguments)
    assert (ended, words in out + err, "Traceback" in err) == (code, True, False), out + err


@pytest.mark.parametrize(
    ("states", "kind", "replicas", "refusal"),
    [
        ("running", "generator", 0, "run run-0 needs a generator"),
        ("paused", "generator", 0, "run run-0 needs a generator"),
        ("paused running", "generator", 1, "2 runs are active, each needs a generator: run-0, run-1"),
        ("running", "reward", 0, "run run-0 needs a reward"),
        ("running paused", "reward", 0, "2 runs are active, and need a reward service: run-0, run-1"),
        ("running paused", "generator", 2, ""),
        ("running paused", "reward", 1, ""),
        ("stopped failed succeeded", "generator", 0, ""),
        ("stopped failed succeeded", "reward", 0, ""),
    ],
)
def test_what_runs_that_go_on_need_is_taken_only_by_who_says_so(
    flotilla: Command, serve: Any, launcher: list[int], states: str, kind: str, replicas: int, refusal: str
) -> None:
    serve(ListingCoordinator(states.split()))
    code, _, err = flotilla("scale", kind, str(replicas))
    assert (code, launcher) == ((2, []) if refusal else (0, [replicas]))
    assert refusal in err and (not refusal or "--yes" in err)
    code, _, _ = flotilla("scale", kind, str(replicas), "--yes")
    assert (code, launcher[-1]) == (0, replicas)


def test_run_start_prints_the_id_alone_and_sends_absolute_paths(
    flotilla: Command, serve: Any, tmp_path: Path
) -> None:
    coordinator = RecordedCoordinator(run_pb2.RUN_STATE_SUCCEEDED)
    serve(coordinator)
    Path("run.yaml").write_text(RUN_YAML)
    code, out, _ = flotilla("run", "start", "run.yaml", "steps=7")
    assert (code, out) == (0, "trial-1\n")
    assert f"train: {tmp_path / 'data.jsonl'}" in coordinator.configs[0]
    assert "steps: 7" in coordinator.configs[0]


def test_run_start_wait_streams_plain_lines_and_ends_with_the_run(flotilla: Command, serve: Any) -> None:
    serve(RecordedCoordinator(run_pb2.RUN_STATE_SUCCEEDED))
    Path("run.yaml").write_text(RUN_YAML)
    code, out, err = flotilla("run", "start", "run.yaml", "--wait", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "succeeded"
    assert "step 1/2  reward 0.250  1,234 tok/s" in err
    assert "warning: generator-0 is slow" in err


def test_a_log_of_quick_steps_is_short_and_says_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_pb2.Run(run_id="trial-1", state=run_pb2.RUN_STATE_RUNNING, total_steps=100, eta_seconds=180)
    with progress(run) as show:
        for step in range(1, 101):
            metrics = {"reward/mean": 0.5, "eval/accuracy": 0.25}
            show(run_pb2.RunEvent(step=run_pb2.StepMetrics(step=step, metrics=metrics)))
        show(
            run_pb2.RunEvent(notice=run_pb2.Notice(level=run_pb2.NOTICE_LEVEL_INFO, text="held-out accuracy"))
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/100  reward 0.500  about 3m left"
    assert lines[-2:] == ["step 100/100  reward 0.500", "held-out accuracy"]
    assert len(lines) < 10


def test_the_end_of_a_run_says_what_to_look_at() -> None:
    told = Told()

    def notice(level: run_pb2.NoticeLevel.ValueType, text: str) -> None:
        told.note(run_pb2.RunEvent(notice=run_pb2.Notice(level=level, text=text)))

    notice(run_pb2.NOTICE_LEVEL_INFO, "held-out accuracy 0.5")
    notice(run_pb2.NOTICE_LEVEL_INFO, "tracker wandb shows the run: http://nowhere/run")
    for text in ("old", "twice", "new", "twice", "newest"):
        notice(run_pb2.NOTICE_LEVEL_WARNING, text)
    told.note(run_pb2.RunEvent(step=run_pb2.StepMetrics(step=1)))
    assert told.lines() == [
        "5 warnings; the last:",
        "  new",
        "  twice (2 times)",
        "  newest",
        "tracker wandb shows the run: http://nowhere/run",
    ]


def test_a_pause_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_pb2.Run(run_id="trial-1", state=run_pb2.RUN_STATE_RUNNING, total_steps=100)
    with progress(run) as show:
        for state in (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_RUNNING):
            show(run_pb2.RunEvent(run=run_pb2.Run(state=state, phase="paused", total_steps=100)))
    assert capsys.readouterr().err.splitlines() == ["paused"]


def test_failed_run_ends_with_1_and_its_reason(flotilla: Command, serve: Any) -> None:
    serve(RecordedCoordinator(run_pb2.RUN_STATE_FAILED))
    code, out, err = flotilla("run", "watch", "--json")
    assert code == 1
    ended = json.loads(out)
    assert (ended["state"], ended["reason"]) == ("failed", "the loss is not finite")
    assert {"run_id", "directory", "metrics"} <= ended.keys()
    assert "run trial-1 failed: the loss is not finite" in err


def test_a_run_that_ended_says_what_would_have_helped_it(flotilla: Command, serve: Any) -> None:
    coordinator = RecordedCoordinator(run_pb2.RUN_STATE_SUCCEEDED)
    coordinator.run.advice = "look at the rewards"
    serve(coordinator)
    code, _, err = flotilla("run", "watch")
    assert code == 0 and err.splitlines()[-2:] == ["advice: look at the rewards", "files: /runs/x"]


def test_error_of_the_coordinator_arrives_whole(flotilla: Command, serve: Any) -> None:
    serve(RecordedCoordinator(run_pb2.RUN_STATE_SUCCEEDED))
    code, out, err = flotilla("run", "show", "other", "--json")
    assert code == 2
    assert json.loads(out)["error"] == {
        "reason": "not_found",
        "what": "there is no run 'other'",
        "where": "",
        "why": "",
        "next": "flotilla run list",
    }
    assert "next:  flotilla run list" in err


def test_sync_client_follows_a_run(serve: Any) -> None:
    serve(RecordedCoordinator(run_pb2.RUN_STATE_SUCCEEDED))
    with connect() as fleet:
        kinds = [event.WhichOneof("event") for event in fleet.watch_run("latest")]
        assert fleet.get_run().state == run_pb2.RUN_STATE_SUCCEEDED
        assert b"".join(fleet.timeline()) == b'{"traceEvents": []}'
    assert kinds == ["step", "notice", "run"]


def test_an_example_that_cannot_be_made_shows_the_last_words_of_its_script(flotilla: Command) -> None:
    example = Path("examples/arithmetic")
    example.mkdir(parents=True)
    (example / "stack.yaml").write_text("model: examples/arithmetic/model\n")
    (example / "make_model.py").write_text("raise SystemExit('no space left')\n")
    code, _, err = flotilla("up")
    assert code == 5
    assert "no space left" in err and "make_model.py" in err


def test_a_plan_needs_no_fleet_and_names_what_is_missing(flotilla: Command) -> None:
    Path("run.yaml").write_text(RUN_YAML)
    Path("stack.yaml").write_text("model: nowhere/at/all\n")
    code, out, err = flotilla("run", "plan", "run.yaml", "--json")
    assert code == 2
    assert "no fleet is running" in err
    (error,), (finding,) = (json.loads(out)[name] for name in ("errors", "findings"))
    assert (finding["severity"], finding["code"]) == ("error", "not_found")
    assert finding["where"].endswith("nowhere/at/all") and error.startswith(f"{finding['what']} (")


@pytest.mark.parametrize(
    ("flags", "said"),
    [("avx512_bf16", "bfloat16 is faster than float32"), ("avx2", "no instructions for bfloat16")],
)
def test_doctor_says_which_processors_compute_in_bfloat16(
    flotilla: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, said: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse\n")
    monkeypatch.setattr(size_limits, "_CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(doctor, "_cgroup_cpus", lambda: None)
    for cores, status in ((4, "passed"), (8, "warning")):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        _, out, _ = flotilla("doctor", "--json")
        (cpu,) = (check for check in json.loads(out)["checks"] if check["check"] == "cpu")
        assert cpu["status"] == status and said in cpu["finding"]


def test_doctor_names_the_missing_model_and_fails(flotilla: Command) -> None:
    Path("stack.yaml").write_text("model: /nowhere/model\n")
    code, out, _ = flotilla("doctor", "--json")
    assert code == 5
    report = json.loads(out)
    checks = {check["check"]: check for check in report["checks"]}
    assert not report["ok"]
    assert checks["model"]["status"] == "failed"
    assert "/nowhere/model" in checks["model"]["finding"] and checks["model"]["remedy"]
    assert checks["nats-server"]["status"] == "passed"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train=nowhere.jsonl"], "data.train: the file"),
        (["initial_weights=nowhere"], "initial_weights: the folder"),
        (["rewards.0.reward=exactt"], "rewards[0].reward: there is no reward 'exactt'"),
        (["rollout.prompts_per_step=1000000000"], "less than or equal to 100000"),
        (["rollout={prompts_per_step: 100000, max_staleness: 3}"], "200,000 groups would be under way"),
        (["rollout.sampling.temperature=1e308"], "rollout.sampling.temperature: expected less than"),
    ],
)
def test_config_validate_refuses_what_no_fleet_is_needed_for(
    flotilla: Command, overrides: list[str], told: str
) -> None:
    Path("run.yaml").write_text(RUN_YAML)
    Path("data.jsonl").write_text("")
    code, _, err = flotilla("config", "validate", "run.yaml", *overrides)
    assert code == 2 and told in err and "Traceback" not in err


def test_config_validate_looks_for_the_models_of_a_stack(flotilla: Command) -> None:
    Path("stack.yaml").write_text("model: nowhere/at/all\nbind: {credential_file: no-file}\n")
    code, _, err = flotilla("config", "validate", "stack.yaml")
    assert code == 2 and "model: there is no such folder" in err and "bind.credential_file" in err


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        ("model: nowhere/at/all\n", "model: there is no such folder"),
        ("model: /nowhere/model\n", "model: there is no such folder"),
        ("model: folder\nteacher: {model: /nowhere/teacher}\n", "teacher.model: there is no such folder"),
        ("model: .\n", "has no config.json"),
        ("model: folder\nbind: {credential_file: no-file}\n", "bind.credential_file"),
        ("model: nobody/nothing\n", "the hub did not give the model"),
        ("", "there is no stack file, which names the model"),
    ],
)
def test_up_refuses_what_cannot_start_before_it_starts_anything(
    flotilla: Command, monkeypatch: pytest.MonkeyPatch, stack: str, told: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("folder").mkdir()
    Path("folder/config.json").write_text("{}")
    if stack:
        Path("stack.yaml").write_text(stack)
    code, out, err = flotilla("up")
    assert (code, out, told in err) == (2, "", True), err
    assert not Path(".flotilla").exists()


def test_a_plan_says_each_reason_against_the_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = run_pb2.PlanLine(name="steps", value="3", explanation="")
    print_plan(run_pb2.Plan(lines=[line], errors=["too large"], warnings=["slow"]), as_json=False)
    out, err = capsys.readouterr()
    assert "steps" in out and err == "warning: slow\nerror: too large\n"


def test_config_validate_resolves_and_schema_describes(flotilla: Command) -> None:
    Path("run.yaml").write_text(RUN_YAML)
    Path("data.jsonl").write_text("")
    code, out, _ = flotilla("config", "validate", "run.yaml", "steps=9", "--json")
    assert code == 0
    resolved = json.loads(out)
    assert (resolved["kind"], resolved["config"]["steps"]) == ("run", 9)
    assert any("data.train" in checked for checked in resolved["checked"])
    assert any("rewards[0].reward numeric" in checked for checked in resolved["checked"])
    code, out, _ = flotilla("config", "schema", "stack")
    assert code == 0
    assert "ready_timeout_s" in json.loads(out)["properties"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "the model belongs to no run"),
        (["model", "--data", "held-out.jsonl"], "--data FILE and --reward NAME"),
        (["model", "--checkpoint", "best"], "--checkpoint chooses among those of a run"),
        (["empty"], "neither a model nor a checkpoint"),
        (["nothing-there"], "the stack has no runs on disk"),
        (["model", "run.yaml"], "run trial has no `evaluation`"),
    ],
)
def test_eval_says_what_it_lacks_before_it_starts_anything(
    flotilla: Command, arguments: list[str], message: str
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("empty").mkdir()
    Path("run.yaml").write_text(RUN_YAML)
    code, _, err = flotilla("eval", *arguments)
    assert code == 2 and message in err
