from __future__ import annotations

from pathlib import Path

import pytest

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_cli import processes

STARTING, READY = ProcessState.PROCESS_STATE_STARTING, ProcessState.PROCESS_STATE_READY


def fleet(trainer: ProcessState.ValueType, *, address: str = "", error: str = "") -> list[ProcessStatus]:
    kind = ServiceKind.SERVICE_KIND_TRAINER
    return [
        ProcessStatus(name="nats", state=READY),
        ProcessStatus(name="trainer", kind=kind, state=trainer, address=address, error=error),
    ]


def test_a_log_names_each_service_once_when_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with processes.boot_progress() as show:
        for _ in range(3):
            show(fleet(STARTING))
        for _ in range(3):
            show(fleet(READY))
    lines = [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.split() for line in lines] == [["nats", "ready"], ["trainer", "ready"]]


def test_a_slow_boot_says_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "REMIND_S", 0.0)
    with processes.boot_progress() as show:
        show(fleet(STARTING, address="127.0.0.1:7001"))
    assert "waiting: trainer starts its ranks, which load the model, for 0 s" in capsys.readouterr().err


def test_what_a_process_does_is_said_in_words() -> None:
    nats = ProcessStatus(name="nats", state=STARTING)
    assert processes.doing(nats) == "opens its store"
    assert processes.doing(fleet(STARTING)[1]) == "its process starts"
    failed = fleet(ProcessState.PROCESS_STATE_RESTARTING, error="it was killed by SIGKILL\n  last line")[1]
    assert processes.doing(failed) == "restarting: it was killed by SIGKILL"


def test_an_engine_that_starts_says_in_which_phase_it_is(tmp_path: Path) -> None:
    log = tmp_path / "generator-0.log"
    generator = ProcessStatus(
        name="generator-0",
        kind=ServiceKind.SERVICE_KIND_GENERATOR,
        state=STARTING,
        address="127.0.0.1:7002",
        log_path=str(log),
    )
    assert processes.doing(generator) == "loads the model into its engine", "without a log"
    log.write_text("==== an earlier start ====\nGraph capturing finished in 4 secs\n==== this one ====\n")
    assert processes.doing(generator) == "loads the model into its engine"
    for line, what in (
        (
            "INFO [gpu_model_runner.py:5] Model loading took 1.12 GiB memory and 0.5 seconds",
            "compiles its model",
        ),
        ("INFO [monitor.py:9] torch.compile took 12.31 s in total", "measures the memory for its KV cache"),
        ("INFO [gpu_worker.py:7] Available KV cache memory: 60.2 GiB", "captures its graphs"),
        ("INFO [gpu_model_runner.py:8] Graph capturing finished in 5 secs", "decodes its first tokens"),
    ):
        with log.open("a") as file:
            file.write(f"{line}\nanything else\n")
        assert processes.doing(generator) == what
