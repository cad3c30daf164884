"""The run directory: readable by ordinary tools while the run goes on, and never overwritten."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

from flotilla.common.v1.version_pb2 import VersionSpan
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.records import TokenSpan
from flotilla_coordinator.ledger.verdicts import TermVerdict
from flotilla_coordinator.records.directory import MOST_LOG_BYTES, RunDirectory
from flotilla_coordinator.records.report import conclude, export_parquet, write_plots
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_coordinator.views.samples import complete
from flotilla_core.errors import AlreadyExists, DiskFull
from flotilla_core.version import Version
from flotilla_data.samples import read_samples


def batch(step: int, samples: int = 2) -> Batch:
    members = [
        RolloutSample(
            sample_id=f"run/0/0/{index}",
            token_ids=np.array([1, 2], dtype=np.int32),
            logprobs=np.array([-1.0, -2.0], dtype=np.float32),
            text="zwölf",
            spans=(TokenSpan(Version(0, step), 0, 2),),
            reward=1.0,
            reward_terms=(1.0, 0.0),
            generator="generator-0",
        )
        for index in range(samples)
    ]
    group = RolloutGroup(
        "run/0/0", "6+6=", np.array([3], dtype=np.int32), members, answer="12", info={"level": [1, "two"]}
    )
    return Batch(step=step, groups=[group], cursor={})


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "stack" / "runs" / "count-1")


def test_a_directory_belongs_to_one_run(directory: RunDirectory) -> None:
    with pytest.raises(AlreadyExists, match="count-1"):
        RunDirectory.create(directory.path)


def test_metrics_are_json_lines_that_grow_by_whole_lines(directory: RunDirectory) -> None:
    directory.write_metrics(0, {"reward/mean": 0.5, "loss": math.nan})
    directory.write_metrics(1, {"reward/mean": 0.75})
    path = directory.path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert list(directory.read_metrics()) == [(0, {"reward/mean": 0.5}), (1, {"reward/mean": 0.75})]
    first = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert (first["step"], first["loss"]) == (0, None)


def test_a_line_that_was_cut_off_takes_no_later_one_with_it(directory: RunDirectory) -> None:
    directory.write_metrics(0, {"loss": 1.0})
    for name in ("metrics.jsonl", "events.jsonl", "evaluations.jsonl"):
        with (directory.path / name).open("ab") as file:
            file.write('{"step": 1, "text": "zwö'.encode()[:-1])
    directory.reopen({})
    directory.write_metrics(1, {"loss": 0.5})
    directory.write_metrics(2, {"loss": 0.25})
    directory.write_event(run_pb2.RunEvent(sequence=8))
    directory.write_evaluation(1, "1.1", 0.25)
    assert list(directory.read_metrics()) == [(step, {"loss": 0.5**step}) for step in range(3)]
    assert [json.loads(line)["step"] for line in (directory.path / "metrics.jsonl").open()] == [0, 1, 2]
    assert directory.last_sequence() == 8
    assert [line["accuracy"] for line in directory.read_evaluations()] == [0.25]


def test_samples_of_a_step_are_readable_by_zstd(directory: RunDirectory) -> None:
    path = directory.write_samples(batch(1), ["exact", "mine.py:shape"])
    assert path.name == "step-000001.jsonl.zst"
    lines = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode().splitlines()
    assert json.loads(lines[0])["response"] == "zwölf"
    (first, _) = directory.read_samples()
    assert first["policy_versions"] == [{"version": "0.1", "start": 0, "end": 2}]
    assert (first["reward"], first["logprob_mean"], first["step"]) == (1.0, -1.5, 1)
    assert (first["answer"], first["info"]) == ("12", {"level": [1, "two"]})
    assert first["reward_parts"] == [
        {"reward": "exact", "value": 1.0},
        {"reward": "mine.py:shape", "value": 0.0},
    ]


def test_answers_of_an_evaluation_are_apart_from_samples_and_the_last_attempt_counts(
    directory: RunDirectory,
) -> None:
    directory.write_samples(batch(4))
    paths = [
        directory.write_answers(step, [{"step": step, "response": text}])
        for step, text in ((0, "eins"), (4, "zwei"), (4, "drei"))
    ]
    assert [path.name for path in paths[1:]] == ["eval-000004.jsonl.zst", "eval-000004-2.jsonl.zst"]
    assert [line["response"] for line in read_samples(directory.path, "eval")] == ["eins", "drei"]
    assert [line["response"] for line in read_samples(directory.path, "eval", [0])] == ["eins"]
    assert {line["response"] for line in directory.read_samples()} == {"zwölf"}


def test_a_listed_sample_that_the_ledger_pruned_comes_from_its_step(directory: RunDirectory) -> None:
    directory.write_samples(batch(1))
    directory.write_samples(batch(2))
    (recorded, _) = directory.read_samples([2])
    durable = pb.Sample(sample_id=recorded["sample_id"], step=2, state=pb.SAMPLE_STATE_DURABLE, reward=1.0)
    dropped = pb.Sample(sample_id="dropped", step=2, state=pb.SAMPLE_STATE_DROPPED)
    again = pb.Sample(sample_id="run/0/0/1", step=2, state=pb.SAMPLE_STATE_ISSUED)
    scored = pb.Sample(sample_id="run/0/0/1", step=2, state=pb.SAMPLE_STATE_SCORED, reward=1.0)
    scored.version_spans.add(version=Version(1, 1).to_proto(), start=0, end=2)
    page = pb.ListSamplesResponse(samples=[durable, dropped, again])
    answered_again = pb.ListSamplesResponse(samples=[scored])
    complete(page, directory)
    complete(answered_again, directory)
    assert page.samples[0].response == "zwölf" and page.samples[0].version_spans[0].end == 2
    assert page.samples[0].version_spans[0].version.step == 2 and page.samples[1].response == ""
    assert page.samples[2] == again, "what the file has is of an attempt that was undone"
    assert answered_again.samples[0] == scored, "a lineage later"


def test_a_listed_sample_keeps_the_text_of_the_ledger_and_gets_the_rest_of_its_row(
    directory: RunDirectory,
) -> None:
    directory.write_samples(batch(2), ["exact", "mine.py:shape"])
    spans = [VersionSpan(version=Version(0, 2).to_proto(), end=1)]
    kept = pb.Sample(
        sample_id="run/0/0/0", step=2, state=pb.SAMPLE_STATE_CONSUMED, response="elf", version_spans=spans
    )
    page = pb.ListSamplesResponse(samples=[kept])
    complete(page, directory)
    (sample,) = page.samples
    assert (sample.response, [span.end for span in sample.version_spans]) == ("elf", [1])
    assert (sample.answer, json.loads(sample.info_json)) == ("12", {"level": [1, "two"]})
    parts = [(part.reward, part.value) for part in sample.reward_parts.parts]
    assert parts == [("exact", 1.0), ("mine.py:shape", 0.0)]


def test_what_a_function_returned_beside_its_value_is_kept_in_every_form(directory: RunDirectory) -> None:
    parts = (("verl.py:judge", 0.5), ("verl.py:judge[acc]", 1.0))
    verdict = TermVerdict("verl.py:judge", value=0.5, parts={"acc": 1.0}, version="sha256:0", seconds=0.25)
    scored = batch(2)
    for sample in scored.groups[0].samples:
        sample.take_outcome(Outcome(0.5, terms=(0.5,), verdicts=(verdict,)))
    directory.write_samples(scored, ["verl.py:judge"])
    page = pb.ListSamplesResponse(samples=[pb.Sample(sample_id="run/0/0/0", step=2)])
    complete(page, directory)
    assert tuple((part.reward, part.value) for part in page.samples[0].reward_parts.parts) == parts
    (path,) = [path for path in export_parquet(directory.path) if path.name == "samples.parquet"]
    table = pq.read_table(path)
    assert tuple((part["reward"], part["value"]) for part in table["reward_parts"].to_pylist()[0]) == parts
    (told,) = table["verdicts"].to_pylist()[0]
    assert told["parts"] == [{"name": "acc", "value": 1.0}]
    assert (told["version"], told["seconds"], told["file"]) == ("sha256:0", 0.25, None)


def test_an_earlier_attempt_is_never_overwritten(directory: RunDirectory) -> None:
    directory.write_configuration("steps: 1\n", {})
    directory.write_configuration("steps: 2\n", {})
    directory.write_samples(batch(1, samples=1))
    directory.write_samples(batch(1, samples=3))
    assert (directory.path / "run.yaml").read_text("utf-8") == "steps: 1\n"
    assert (directory.path / "run-2.yaml").read_text() == "steps: 2\n"
    assert sorted(path.name for path in (directory.path / "samples").iterdir()) == [
        "step-000001-2.jsonl.zst",
        "step-000001.jsonl.zst",
    ]
    assert len(list(directory.read_samples())) == 3


def test_a_run_keeps_what_logs_say_since_it_began_and_no_more_than_its_bound(directory: RunDirectory) -> None:
    logs = directory.path.parent.parent / "logs"
    logs.mkdir()
    run = run_pb2.Run(run_id="count-1", state=run_pb2.RUN_STATE_SUCCEEDED)
    run.created_at.FromJsonString("2030-01-02T00:00:00Z")
    old, new = ({"time": f"2030-01-0{day}T00:00:01.5Z", "event": f"of day {day}"} for day in (1, 2))
    (logs / "trainer.log").write_text(f"{json.dumps(old)}\nof day 1\n{json.dumps(new)}\nof day 2\n")
    (logs / "reward-0.log").write_bytes(b"x" * 9 * MOST_LOG_BYTES)
    directory.keep_logs(run)
    kept = directory.path / "logs"
    assert (kept / "trainer.log").read_text() == f"{json.dumps(new)}\nof day 2\n"
    assert 0 < (kept / "reward-0.log").stat().st_size <= MOST_LOG_BYTES
    (logs / "trainer.log").write_text("cut\n")
    assert "of day 2" in (kept / "trainer.log").read_text()


def test_half_a_line_is_removed_however_long_the_lines_are(directory: RunDirectory) -> None:
    directory.write_metrics(0, {"loss": 0.1})
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "x": "' + b"x" * 300_000)
    directory.write_metrics(1, {"loss": 0.2})
    assert list(directory.read_metrics()) == [(0, {"loss": 0.1}), (1, {"loss": 0.2})]


def test_a_finished_run_has_outcome_logs_and_plots(directory: RunDirectory) -> None:
    logs = directory.path.parent.parent / "logs"
    logs.mkdir()
    (logs / "trainer-0.log").write_text("ready\n")
    for step in range(3):
        directory.write_metrics(
            step, {"reward/mean": step / 3, "loss": 0.1, "time/step_s": 1.0, "canary/max": 1e-6}
        )
    directory.write_evaluation(0, "0.0", 0.5)
    directory.write_evaluation(3, "0.3", 0.9)
    run = run_pb2.Run(run_id="count-1", state=run_pb2.RUN_STATE_SUCCEEDED, step=3)
    assert conclude(directory, run) == ""
    assert (directory.path / "logs" / "trainer-0.log").read_text() == "ready\n"
    assert json.loads((directory.path / "outcome.json").read_text())["state"] == "RUN_STATE_SUCCEEDED"
    plots = sorted(path.name for path in (directory.path / "plots").iterdir())
    assert plots == ["agreement.png", "reward.png", "time.png", "training.png"]
    assert all((directory.path / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in plots)


def test_an_outcome_is_whole_or_not_there(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Path) -> None:
        raise OSError("cut off before the file has its name")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="cut off"):
        patched.setattr(os, "replace", killed)
        directory.finish(run_pb2.Run(run_id="count-1"))
    assert directory.read_outcome() is None and not (directory.path / "outcome.json").exists()


def test_events_are_kept_as_they_were_sent(directory: RunDirectory) -> None:
    notice = run_pb2.Notice(level=run_pb2.NOTICE_LEVEL_WARNING, text="generator-0 left")
    directory.write_event(run_pb2.RunEvent(sequence=7, notice=notice))
    (event,) = directory.read_events()
    assert event["sequence"] == "7"
    assert event["notice"] == {"level": "NOTICE_LEVEL_WARNING", "text": "generator-0 left"}


def test_a_run_without_a_step_has_no_plots_and_starts_no_process(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert write_plots(directory.path) == []
    assert export_parquet(directory.path) == []


def test_parquet_has_every_sample_and_null_for_a_missing_metric(directory: RunDirectory) -> None:
    directory.write_metrics(0, {"reward/mean": 0.5})
    directory.write_metrics(1, {"eval/accuracy": 0.25})
    for step in range(2):
        directory.write_samples(batch(step))
    metrics, samples = export_parquet(directory.path)
    assert pq.read_table(metrics).to_pylist() == [
        {"step": 0, "eval/accuracy": None, "reward/mean": 0.5},
        {"step": 1, "eval/accuracy": 0.25, "reward/mean": None},
    ]
    rows = pq.read_table(samples).to_pylist()
    assert [row["step"] for row in rows] == [0, 0, 1, 1]
    assert rows[2]["policy_versions"] == [{"version": "0.1", "start": 0, "end": 2}]


def in_a_process_of_its_own(script: str, run_dir: Path, **environment: str) -> str:
    """Return what a script prints that knows the `path` of a run directory."""
    command = [
        sys.executable,
        "-c",
        f"import sys; from pathlib import Path; path = Path(sys.argv[1])\n{script}",
    ]
    done = subprocess.run(
        [*command, str(run_dir)], env=os.environ | environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_without_the_extra_the_run_ends_well_and_says_what_to_install(
    directory: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('gone', name='matplotlib')")
    directory.write_metrics(0, {"reward/mean": 0.5})
    said = in_a_process_of_its_own(
        "from flotilla.coordinator.v1.run_pb2 import Run\n"
        "from flotilla_coordinator.records.directory import RunDirectory\n"
        "from flotilla_coordinator.records.report import conclude\n"
        "print(conclude(RunDirectory(path), Run()))\n",
        directory.path,
        PYTHONPATH=str(tmp_path),
    )
    assert "pip install 'flotilla-coordinator[report]'" in said


def test_plots_are_drawn_outside_of_the_service_by_one_process_for_runs_that_end_together(
    directory: RunDirectory,
) -> None:
    directory.write_metrics(0, {"reward/mean": 0.5, "time/step_s": 1.0})
    said = in_a_process_of_its_own(
        "from flotilla_coordinator.records.report import write_plots\n"
        "from flotilla_testing.children import children_that_run\n"
        "for _ in range(2):\n"
        "    print(len(write_plots(path)), *(child.pid for child in children_that_run('report:draw')))\n"
        "sys.exit('matplotlib' in sys.modules or 'pyarrow' in sys.modules)\n",
        directory.path,
    )
    first, second = said.splitlines()
    assert first == second and first.startswith("2 ")


def test_what_a_fall_back_undid_is_kept_and_not_read(directory: RunDirectory) -> None:
    for step in range(4):
        directory.write_metrics(step, {"loss": float(step)})
        directory.write_evaluation(step + 1, f"0.{step + 1}", 0.1)
    for step in (2, 3):
        directory.write_metrics(step, {"loss": 10.0 + step}, lineage=1)
    directory.write_evaluation(3, "1.3", 0.2)
    assert list(directory.read_metrics()) == [
        (0, {"loss": 0.0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 12.0}),
        (3, {"loss": 13.0}),
    ]
    versions = [(line["step"], line["policy_version"]) for line in directory.read_evaluations()]
    assert versions == [(1, "0.1"), (2, "0.2"), (3, "1.3")]
    lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lineage"]) for line in lines] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (2, 1),
        (3, 1),
    ]


def test_a_run_that_goes_on_keeps_its_earlier_end_aside(directory: RunDirectory) -> None:
    directory.write_configuration("steps: 1\n", {"trainer": {"torch": "1"}})
    directory.finish(run_pb2.Run(run_id="run", reason="the first end"))
    directory.reopen({"trainer": {"torch": "2"}})
    assert directory.read_outcome() is None
    assert "the first end" in (directory.path / "outcome-2.json").read_text()
    assert json.loads((directory.path / "versions-2.json").read_text()) == {"trainer": {"torch": "2"}}


def test_lines_that_a_full_disk_does_not_take_come_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_metrics(0, {"loss": 1.0})
    whole = (directory.path / "metrics.jsonl").read_bytes()

    class Half:
        """A file whose disk takes half of what it is given."""

        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *raised: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> int:
            return self.file.write(content[: len(content) // 2])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def half(path: Path, *arguments: Any, **options: Any) -> Half:
        return Half(path_open(path, *arguments, **options))

    path_open = Path.open
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", half)
        directory.write_metrics(1, {"loss": 0.5})
        directory.write_metrics(2, {"loss": 0.25})
    assert (directory.path / "metrics.jsonl").read_bytes() == whole
    directory.write_metrics(3, {"loss": 0.125})
    assert [step for step, _ in directory.read_metrics()] == [0, 1, 2, 3]


def test_samples_that_a_full_disk_does_not_take_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory = RunDirectory.create(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(DiskFull, match="the samples cannot be written"):
            directory.write_samples(batch(0))
    assert list((directory.path / "samples").iterdir()) == []
    assert directory.write_samples(batch(0)).name == "step-000000.jsonl.zst"
