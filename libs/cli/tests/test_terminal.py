"""What samples, rows, names, errors and logs hold reaches no terminal as a command to it, by any way out."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import threading
import tty
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from flotilla_cli import failures
from flotilla_cli import main as command_line
from flotilla_core.errors import InvalidRequest
from flotilla_testing.hostile_text import HALF, HOSTILE, MARKUP, SEQUENCES, obeyed

TEXT = f"{HOSTILE} {MARKUP}"
CONFIGURATION = "name: a\nsteps: 1\ndata: {train: a.jsonl}\nrewards: [{reward: exact}]\n"
OURS = re.compile(r"\x1b\[(\d{0,3}(;\d{1,3})*m|\?25[lh]|1A|2K)|\r")
"""Colours, and how a live line draws itself again."""
RUN = run_pb2.Run(
    run_id="trial-1",
    name=TEXT,
    phase=TEXT,
    reason=TEXT,
    advice=TEXT,
    total_steps=3,
    state=run_pb2.RUN_STATE_RUNNING,
)


class Hostile(CoordinatorServiceServicer):
    """A coordinator whose every text is hostile."""

    directory = ""

    def run(self, state: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_RUNNING) -> run_pb2.Run:
        run = run_pb2.Run(directory=self.directory, state=state)
        run.MergeFrom(RUN)
        run.state = state
        return run

    async def GetRun(self, request: Any, context: Any) -> pb.GetRunResponse:
        if request.run_id == "refused":
            raise InvalidRequest(TEXT, where=TEXT, why=TEXT, next_step=TEXT)
        return pb.GetRunResponse(run=self.run(), config_yaml=CONFIGURATION)

    async def ListRuns(self, request: Any, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[self.run(run_pb2.RUN_STATE_FAILED), self.run()])

    async def ListSamples(self, request: Any, context: Any) -> pb.ListSamplesResponse:
        sample = pb.Sample(
            sample_id=TEXT, state=pb.SAMPLE_STATE_DROPPED, drop_reason=TEXT, prompt=TEXT, response=TEXT
        )
        return pb.ListSamplesResponse(samples=[sample])

    async def PlanRun(self, request: Any, context: Any) -> pb.PlanRunResponse:
        line = run_pb2.PlanLine(name=TEXT, value=TEXT, explanation=TEXT)
        return pb.PlanRunResponse(plan=run_pb2.Plan(lines=[line], warnings=[TEXT], errors=[TEXT]))

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        notice = run_pb2.Notice(level=run_pb2.NOTICE_LEVEL_WARNING, text=TEXT)
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=1, notice=notice))
        ended = self.run(run_pb2.RUN_STATE_FAILED)
        ended.ended_at.GetCurrentTime()
        yield pb.WatchRunResponse(event=run_pb2.RunEvent(sequence=2, run=ended))


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The command on a terminal of its own: all that the terminal gets."""
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["flotilla", *arguments])
        return shown(monkeypatch, command_line.main)

    return run


def shown(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None]) -> str:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    got: list[bytes] = []

    def read() -> None:
        try:
            while block := os.read(ours, 1 << 16):
                got.append(block)
        except OSError:  # The other end is closed.
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        patched.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit):
            command()
    reader.join(20)
    os.close(ours)
    return b"".join(got).decode()


def assert_shown(text: str) -> None:
    """The text is there, as it is read; nothing in it is obeyed."""
    assert not [one for one in SEQUENCES if one in text]
    assert not obeyed(OURS.sub("", text))


@pytest.fixture
def hostile(serve: Callable[..., str], tmp_path: Path) -> Hostile:
    coordinator = Hostile()
    serve(coordinator)
    coordinator.directory = str(tmp_path / "a run")
    return coordinator


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    "arguments",
    [
        ("samples", "latest"),
        ("samples", "latest", "--full"),
        ("samples", "latest", "--json"),
        ("run", "list"),
        ("run", "list", "--json"),
        ("run", "show", "latest"),
        ("run", "show", "latest", "--json"),
        ("run", "watch", "latest"),
        ("run", "plan", "run.yaml"),
        ("run", "plan", "run.yaml", "--json"),
        ("run", "show", "refused"),
        ("run", "show", "refused", "--json"),
    ],
    ids=" ".join,
)
def test_no_text_of_a_coordinator_is_obeyed(
    on_terminal: Callable[..., str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIGURATION)
    text = on_terminal(*arguments)
    assert_shown(text)
    assert "aG9zdGlsZQ==" in text
    if arguments[0] != "samples" or "--full" in arguments:
        assert MARKUP in text, "markup is shown as it is"


def test_answers_that_a_run_keeps_are_shown(
    on_terminal: Callable[..., str], hostile: Hostile, tmp_path: Path
) -> None:
    line = {
        "step": 0,
        "policy_version": "0.0",
        "set": TEXT,
        "sample_id": TEXT,
        "prompt": TEXT,
        "response": TEXT + HALF,
        "answer": TEXT,
        "info": {"a": TEXT + HALF},
        "reward": 1.0,
        "reward_parts": [{"reward": TEXT, "value": 1.0}],
    }
    path = Path(hostile.directory) / "samples" / "eval-000000.jsonl.zst"
    path.parent.mkdir(parents=True)
    path.write_bytes(zstandard.ZstdCompressor().compress((json.dumps(line) + "\n").encode()))
    for more in ((), ("--full",), ("--json",)):
        text = on_terminal("samples", "latest", "--evaluation", *more)
        assert_shown(text)
        assert "aG9zdGlsZQ==" in text and "Traceback" not in text


@pytest.mark.usefixtures("hostile")
def test_lines_of_logs_are_shown(on_terminal: Callable[..., str]) -> None:
    logs = Path(".flotilla/local/logs")
    logs.mkdir(mode=0o700)
    lines = [*SEQUENCES, MARKUP]
    (logs / "trainer.log").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\x9b31m\n")
    for more in ((), ("--json",)):
        text = on_terminal("logs", "trainer", *more)
        assert_shown(text)
        assert "aG9zdGlsZQ==" in text and MARKUP in text


@pytest.mark.parametrize(
    "arguments",
    [
        (HOSTILE.replace("\0", ""),),
        (f"--{HOSTILE}".replace("\0", ""),),
        ("samples", "latest", "--step", HOSTILE),
        ("samples", "latest", "--state", HOSTILE),
        ("run", "plan", HOSTILE.replace("\0", "")),
        ("run", "plan", f"{HOSTILE}=1"),
        ("config", "show", f"{HOSTILE}.yaml".replace("\0", "")),
        ("up", f"{HOSTILE}.yaml".replace("\0", "")),
    ],
    ids=["command", "option", "number", "choice", "file", "override", "config", "stack"],
)
def test_an_argument_that_is_quoted_is_shown(
    on_terminal: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = on_terminal(*arguments)
    assert_shown(text)
    assert "Traceback" not in text


def test_the_traceback_of_a_defect_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, lambda: failures.fail(ValueError(TEXT + HALF)))
    assert_shown(text)
    assert "ValueError" in text and MARKUP in text


def test_the_list_of_all_commands_says_what_each_says_of_itself() -> None:
    own = {
        name: command.help.split("\n\n")[0] for name, command in command_line.load_commands().commands.items()
    }
    assert own == {entry.name: entry.help for entry in command_line.ENTRIES}


def test_only_one_module_prints() -> None:
    folder = Path(command_line.__file__).parent
    prints = re.compile(r"(?<!console\.)\bprint\(|std(out|err)\.write|typer\.(echo|secho)|Console\(")
    others = [path for path in sorted(folder.glob("*.py")) if path.name != "output.py"]
    assert others and [path.name for path in others if prints.search(path.read_text())] == []
