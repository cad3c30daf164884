"""`flotilla samples` and `flotilla run compare` on the files of runs whose fleet is down."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_cli.samples import _made, _told_apart
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.evaluation.evaluate import HeldOutAnswer
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, GroupIssue, RunRecord, RunState, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core.config import RunConfig, load_text
from flotilla_core.version import Version

Command = Callable[..., tuple[int, str, str]]
RUN = "count-1"
RESPONSES = ("twelve", "thirteen or so", "12")
REWARDS = (0.25, 0.0, 1.0)
FAILED = "a dozen"
RAISED = TermVerdict(
    "/work/mine.py:shape",
    Said.ERROR,
    message="/work/mine.py:3 in shape: KeyError",
    file="/work/mine.py",
    line=3,
)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run of one step with three samples, and a fourth one whose reward failed."""
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create(tmp_path / ".flotilla" / "local" / "runs" / RUN)
    ids = [f"{RUN}/0/0/{number}" for number in range(4)]
    prompt = np.array([3], np.int32)
    trained = [
        RolloutSample(
            sample_id,
            np.array([1, 2], np.int32),
            np.array([-1, -2], np.float32),
            text,
            (TokenSpan(Version(0, 0), 0, 2),),
            reward=reward,
            reward_terms=(reward, 0.5),
            verdicts=(
                TermVerdict("exact", value=reward, version="flotilla 0.3.0, rules 2", seconds=0.0015),
                TermVerdict("/work/mine.py:shape", value=0.5, parts={"acc": 1.0}, extracted=text),
            ),
        )
        for sample_id, text, reward in zip(ids, RESPONSES, REWARDS, strict=False)
    ]

    async def record() -> None:
        ledger = Ledger.open(tmp_path / ".flotilla" / "local" / "ledger.sqlite")
        await ledger.save_run(
            RunRecord(RUN, "count", RunState.RUNNING, "steps: 1\n", str(directory.path), time.time())
        )
        await ledger.group_issued(GroupIssue(RUN, f"{RUN}/0/0", tuple(ids), 0, 0, "6+6=", prompt))
        await ledger.group_scored(trained)
        failed = dataclasses.replace(trained[0], sample_id=ids[3], text=FAILED, verdicts=(RAISED,))
        await ledger.dropped(RUN, [ids[3]], DropReason.REWARD_ERROR, [failed])
        ledger.close()

    asyncio.run(record())
    group = RolloutGroup(f"{RUN}/0/0", "6+6=", prompt, trained, answer="12", info={"level": 1})
    directory.write_samples(Batch(0, [group], {}), ["exact", "/work/mine.py:shape"])
    answers = [
        HeldOutAnswer(
            held_out,
            Prompt(0, index, prompt_text, prompt, "2", {}),
            dataclasses.replace(trained[0], sample_id=f"{RUN}/held-out/{index}", text=text),
            Outcome(reward, verdicts=(TermVerdict("exact", value=reward, extracted=text),)),
        )
        for held_out, index, prompt_text, text, reward in (
            ("heldout", 4, "1+1=", "3", 0.0),
            ("other", 7, "2+2=", "4", 1.0),
        )
    ]
    directory.write_answers(0, [answer.record(0, Version(0, 0)) for answer in answers])
    yield directory.path


def shown(flotilla: Command, *arguments: str) -> list[str]:
    code, out, err = flotilla("samples", RUN, *arguments, "--json")
    assert code == 0, err
    return [sample["response"] for sample in json.loads(out)["samples"]]


@pytest.mark.parametrize(
    ("arguments", "responses"),
    [
        ((), [*RESPONSES, FAILED]),
        (("--state", "scored"), [*RESPONSES]),
        (("--reward-above", "0"), ["twelve", "12"]),
        (("--reward-below", "0.25"), ["thirteen or so"]),
        (("--contains", "THIRTEEN"), ["thirteen or so"]),
        (("--sort", "reward", "--reverse"), ["12", "twelve", "thirteen or so"]),
        (("--sort", "reward", "-n", "1"), ["thirteen or so"]),
        (("--step", "7"), []),
        (("--evaluation",), ["3", "4"]),
        (("--evaluation", "--set", "other"), ["4"]),
        (("--evaluation", "--reward-below", "1"), ["3"]),
    ],
)
def test_samples_are_filtered_and_sorted(
    flotilla: Command, run_dir: Path, arguments: tuple[str, ...], responses: list[str]
) -> None:
    assert shown(flotilla, *arguments) == responses


@pytest.mark.parametrize(
    ("algorithm", "evaluation", "told"),
    [
        ("sft", "{data: held.jsonl}", "learns from the answers of its data"),
        ("sft", "{data: held.jsonl}", "flotilla samples taught-1 --evaluation"),
        ("dpo", "null", "flotilla run show its metrics"),
        ("grpo", "null", "has no such sample"),
    ],
)
def test_a_run_that_draws_no_samples_says_so_and_what_to_look_at(
    flotilla: Command, run_dir: Path, algorithm: str, evaluation: str, told: str
) -> None:
    rewards = "[]" if algorithm == "dpo" else "[{reward: exact}]"
    config = (
        f"name: taught\nsteps: 1\ndata: {{train: a.jsonl}}\nrewards: {rewards}\n"
        f"algorithm: {{type: {algorithm}}}\nevaluation: {evaluation}\n"
    )

    async def record() -> None:
        ledger = Ledger.open(Path(".flotilla/local/ledger.sqlite"))
        await ledger.save_run(RunRecord("taught-1", "taught", RunState.SUCCEEDED, config, str(run_dir), 0.0))
        ledger.close()

    asyncio.run(record())
    code, out, err = flotilla("samples", "taught-1")
    assert (code, out) == (0, "") and told in " ".join(err.split())


def test_whole_sample_has_answer_columns_and_parts(flotilla: Command, run_dir: Path) -> None:
    code, out, _ = flotilla("samples", RUN, "--full", "--reward-above", "0.9")
    assert code == 0
    for text in (
        "reward 1  version 0.0  2 tokens",
        "parts  exact 1, mine.py:shape 0.5, mine.py:shape[acc] 1\n",
        "judged exact scored 1, by flotilla 0.3.0, rules 2, in 1.5 ms\n",
        "judged mine.py:shape scored 0.5, read '12'\n",
        '{"level": 1}',
        "--- answer\n12",
    ):
        assert text in out


TERMS = "[{reward: exact, weight: 0.5%s}, {reward: /work/mine.py:shape%s}]"


@pytest.mark.parametrize(
    ("mode", "terms", "reward", "made"),
    [
        ("weighted", TERMS % ("", ""), 1.0, "0.5 x 1 (exact) + 1 x 0.5 (mine.py:shape) = 1"),
        ("weighted", TERMS % ("", ", weight: 0"), 0.5, "0.5 x 1 (exact) = 0.5"),
        (
            "gated",
            TERMS % ("", ", gate_at: 0.75"),
            0.0,
            "gated: mine.py:shape 0.5 is below its gate_at 0.75, so 0",
        ),
        (
            "gated",
            TERMS % (", gate_at: 1", ""),
            1.0,
            "gated: every gate is open, 0.5 x 1 (exact) + 1 x 0.5 (mine.py:shape) = 1",
        ),
        ("max", TERMS % ("", ""), 0.5, "max: 0.5 x 1 (exact), 1 x 0.5 (mine.py:shape) = 0.5"),
        ("product", TERMS % ("", ""), 0.25, "product: 0.5 x 1 (exact) times 1 x 0.5 (mine.py:shape) = 0.25"),
        (
            "first",
            TERMS % ("", ""),
            0.5,
            "first: the first that is not 0 of 0.5 x 1 (exact), 1 x 0.5 (mine.py:shape) = 0.5",
        ),
        ("weighted", TERMS % ("", ""), 0.9, ""),  # The run had other weights then.
        ("weighted", "[{reward: exact}]", 1.0, ""),
    ],
)
def test_how_terms_made_a_reward_is_said(mode: str, terms: str, reward: float, made: str) -> None:
    text = f"name: r\nsteps: 1\ndata: {{train: a.jsonl}}\nreward_mode: {mode}\nrewards: {terms}\n"
    verdicts = [{"reward": "exact", "outcome": "scored", "value": 1.0}]
    verdicts.append({"reward": "/work/mine.py:shape", "outcome": "scored", "value": 0.5})
    config = load_text(RunConfig, text, source="test")
    assert _made({"reward": reward, "verdicts": verdicts}, config) == made
    verdicts[0] |= {"outcome": "unverifiable"}
    assert _made({"reward": reward, "verdicts": verdicts}, config) == made.replace(
        "(exact)", "(exact by on_unverifiable)"
    )
    assert _made({"reward": None, "verdicts": verdicts}, config) == ""


def test_a_sample_without_a_reward_says_why_and_where(flotilla: Command, run_dir: Path) -> None:
    code, out, _ = flotilla("samples", RUN, "--full", "--state", "dropped")
    assert code == 0 and "/work/mine.py:3 in shape: KeyError" in out
    code, out, _ = flotilla("samples", RUN, "--state", "dropped", "--json")
    (sample,) = json.loads(out)["samples"]
    assert sample["verdicts"] == [RAISED.record()]
    told = tuple(sample[name] for name in ("response", "answer", "info", "policy_versions", "reward"))
    assert told == (FAILED, "12", {"level": 1}, ["0.0"], None), "what a user needs to judge it again"


def test_whole_answer_of_an_evaluation_has_its_place_and_its_parts(flotilla: Command, run_dir: Path) -> None:
    code, out, err = flotilla("samples", RUN, "--evaluation", "--full", "--set", "other")
    assert code == 0, err
    assert (
        "=== evaluation other  step 0  row 7\nreward 1  version 0.0  2 tokens\nparts  exact 1\njudged exact scored 1"
        in out
    )
    assert out.endswith("--- prompt\n2+2=\n--- response\n4\n--- answer\n2\n")


def test_samples_that_fit_become_a_parquet_file(flotilla: Command, run_dir: Path) -> None:
    assert flotilla("samples", RUN, "--parquet", "all.parquet", "-n", "1")[0] == 0
    rows = pq.read_table("all.parquet").to_pylist()
    assert [row["response"] for row in rows] == [*RESPONSES, FAILED]
    assert (rows[0]["answer"], json.loads(rows[0]["info"])) == ("12", {"level": 1})
    assert rows[0]["reward_parts"][0] == {"reward": "exact", "value": 0.25}
    shape = rows[0]["verdicts"][1]
    assert (shape["value"], shape["parts"]) == (0.5, [{"name": "acc", "value": 1.0}])
    assert (rows[3]["reward"], rows[3]["reward_parts"]) == (None, None)
    assert flotilla("samples", RUN, "--evaluation", "--parquet", "a/new/held-out.parquet")[0] == 0
    assert pq.read_table("a/new/held-out.parquet").column("set").to_pylist() == ["heldout", "other"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--evaluation", "--state", "scored"), "have no state"),
        (("--set", "other"), "add --evaluation"),
        (("--evaluation", "--step", "3"), "no answers of an evaluation at this step"),
        (("--parquet", "file/all.parquet"), "the folder file cannot be made"),
    ],
)
def test_wrong_use_of_samples_says_so(
    flotilla: Command, run_dir: Path, arguments: tuple[str, ...], words: str
) -> None:
    Path("file").write_text("")
    code, _, err = flotilla("samples", RUN, *arguments)
    assert (code, words in err) == (2, True), err


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three steps; the second one has another seed and another loss, and is better."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / ".flotilla" / "local" / "runs"

    async def record() -> None:
        ledger = Ledger.open(tmp_path / ".flotilla" / "local" / "ledger.sqlite")
        for number, name in enumerate(("a-1", "b-1")):
            directory = RunDirectory.create(runs / name)
            config = f"name: {name[0]}\nsteps: 3\nseed: {number}\nrewards: [{{reward: exact}}]\n"
            await ledger.save_run(
                RunRecord(name, name[0], RunState.RUNNING, config, str(directory.path), time.time() + number)
            )
            for step in range(3):
                directory.write_metrics(
                    step, {"reward/mean": step / 4 + number / 8, "zebra": 1.0, "loss": 0.5}
                )
            directory.write_evaluation(0, "0.0", 0.5)
            directory.write_evaluation(3, "0.3", 0.25 + number / 2)
        ledger.close()

    asyncio.run(record())


def test_two_runs_are_compared_by_settings_metrics_and_curves(flotilla: Command, two_runs: None) -> None:
    code, out, err = flotilla("run", "compare", "a-1", "b-1", "-o", "curves.png")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert ["seed", "0", "1"] in lines and ["steps", "3", "3"] not in lines
    assert ["reward/mean", "0.5", "0.625", "0.5", "at", "3", "0.625", "at", "3"] in lines
    assert ["eval/accuracy", "0.25", "0.75", "0.5", "at", "0", "0.75", "at", "3"] in lines
    assert ["loss", "0.5", "0.5"] in lines, "less of it is not better for every loss"
    chart = out.partition("\neval/accuracy, a and b")[2]
    assert "0.75 |" in chart and "0.25 |" in chart and "*" in chart
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_as_json_has_null_for_what_a_run_lacks(flotilla: Command, two_runs: None) -> None:
    RunDirectory(Path(".flotilla/local/runs/b-1")).write_metrics(3, {"entropy": 2.0})
    code, out, _ = flotilla("run", "compare", "a-1", "b-1", "--json")
    compared = json.loads(out)
    assert code == 0 and {"key": "name", "a": "a", "b": "b"} in compared["settings"]
    figures = {one["name"]: one for one in compared["metrics"]}
    assert figures["entropy"]["a"] is None
    assert figures["entropy"]["b"] == {"last": 2.0, "best": None, "best_step": None}
    code, _, err = flotilla("run", "compare", "a-1", "b-1", "--metric", "nothing")
    assert (code, "neither run has the metric nothing" in err) == (2, True)


def test_run_is_shown_with_warnings_and_the_metrics_that_matter_first(
    flotilla: Command, two_runs: None
) -> None:
    notice = run_pb2.Notice(
        level=run_pb2.NOTICE_LEVEL_WARNING, text="1 of 6 samples could not be scored:\nline 7"
    )
    RunDirectory(Path(".flotilla/local/runs/b-1")).write_event(run_pb2.RunEvent(sequence=1, notice=notice))
    code, out, err = flotilla("run", "show", "b-1")
    assert code == 0, err
    assert "warning         1 of 6 samples could not be scored:\n                line 7\n" in out
    order = [
        out.index(word) for word in ("learning\n", "reward/mean", "update\n", "loss", "the rest\n", "zebra")
    ]
    assert order == sorted(order)


def test_a_table_shows_what_tells_prompts_apart_and_not_what_all_of_them_begin_with() -> None:
    system = "<|im_start|>system\nYou are a helpful assistant who answers with one number.<|im_end|>\n"
    turns = "<|im_start|>user\nHello, my name is {name}.<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
    asked = "<|im_start|>user\nWhat is {sum}?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [(system + turns + asked).format(name=n, sum=s) for n, s in (("Ann", "1+2"), ("Bob", "40+2"))]
    shown = [one["prompt"] for one in _told_apart([{"prompt": prompt} for prompt in prompts])]
    assert all(len(prompt) <= 50 for prompt in shown)
    assert "What is 1+2?" in shown[0] and "What is 40+2?" in shown[1]
    assert not any("helpful" in prompt or "Hello" in prompt for prompt in shown)


@pytest.mark.parametrize("prompts", [["10+11=", "10+12="], ["one " * 40], ["a" * 80, "b" * 80], []])
def test_prompts_that_share_no_beginning_or_fit_are_shown_as_they_are(prompts: list[str]) -> None:
    found = [{"prompt": prompt} for prompt in prompts]
    assert _told_apart(found) == found
