"""Functions as people have them: ours, verl's and TRL's, also async, and all that they return."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flotilla.common.v1.chat_pb2 import Message
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.errors import InvalidConfig
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.worker import Facts, Function
from flotilla_workers.functions import Refusal, Target
from flotilla_workers.jail.jail import no_jail

ROW: dict[str, Any] = {
    "prompt": "<user>2+2=",
    "responses": ["4"],
    "answer": "4",
    "info": {"data_source": "sums", "extra_info": {"index": 3}, "level": 2},
    "chat": [],
    "answer_column": {"solution": 4},
}
CHAT = [{"role": "user", "content": "2+2="}]


def function(tmp_path: Path, code: str, **parameters: Any) -> Function:
    file = tmp_path / "judges.py"
    file.write_text(textwrap.dedent(code))
    return Function(Target("file", str(file), "judge", parameters))


def score_of_one(judge: Function, question: dict[str, Any]) -> Any:
    """Return what is told of a single response, also by a function that gets whole groups."""
    said = judge(question)
    return said["each"][0] if judge.facts.whole_groups else said


@pytest.mark.parametrize(
    ("signature", "row", "sees"),
    [
        (
            "prompt, response, answer, info, weight=1",
            {},
            {
                "prompt": "<user>2+2=",
                "response": "4",
                "answer": "4",
                "info": ROW["info"],
                "weight": 7,
            },
        ),
        (
            "data_source, solution_str, ground_truth, extra_info=None, weight=1",
            {},
            {
                "data_source": "sums",
                "solution_str": "4",
                "ground_truth": 4,
                "extra_info": {"index": 3},
                "weight": 7,
            },
        ),
        ("solution_str, ground_truth, weight", {}, {"solution_str": "4", "ground_truth": 4, "weight": 7}),
        (
            "data_sources, solution_strs, ground_truths, extra_infos, weight",
            {},
            {
                "data_sources": ["sums"],
                "solution_strs": ["4"],
                "ground_truths": [4],
                "extra_infos": [{"index": 3}],
                "weight": 7,
            },
        ),
        (
            "data_source, solution_str, ground_truth, extra_info, weight",
            {"info": {}, "answer_column": {}},
            {
                "data_source": "",
                "solution_str": "4",
                "ground_truth": "4",
                "extra_info": {},
                "weight": 7,
            },
        ),
        (
            "completions, level, weight",
            {},
            {"completions": ["4"], "level": [2], "weight": 7},
        ),
        (
            "prompts, completions, solution, trainer_state=None, **columns",
            {},
            {
                "prompts": ["<user>2+2="],
                "completions": ["4"],
                "solution": [4],
                "trainer_state": None,
                "columns": {
                    "answer": ["4"],
                    "data_source": ["sums"],
                    "extra_info": [{"index": 3}],
                    "level": [2],
                    "weight": 7,
                },
            },
        ),
        (
            "prompts, completions, answer, weight",
            {"chat": CHAT, "answer_column": {}},
            {
                "prompts": [CHAT],
                "completions": [[{"role": "assistant", "content": "4"}]],
                "answer": ["4"],
                "weight": 7,
            },
        ),
    ],
)
def test_a_function_gets_what_its_form_says_and_no_more_than_it_takes(
    tmp_path: Path, signature: str, row: dict[str, Any], sees: dict[str, Any]
) -> None:
    for begin in ("def", "async def"):
        code = f"seen = []\n{begin} judge({signature}):\n    seen.append(dict(locals()))\n    return 1\n"
        judge = function(tmp_path, code, weight=7)
        assert score_of_one(judge, {**ROW, **row}) == 1.0
        assert judge._call.__globals__["seen"] == [sees]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("def judge(prompt, response, answer, info)", ""),
        ("async def judge(prompt, response, answer, info)", "awaited"),
        (
            "def judge(data_source, solution_str, ground_truth, extra_info=None)",
            "called as verl's compute_score",
        ),
        (
            "async def judge(completions, **columns)",
            "called as TRL's reward function, with whole groups, awaited",
        ),
        ("def judge(prompt, responses, answer, info)", "called as a reward of whole groups"),
        ("def judge(prompt, response, answer, info, completions=None)", ""),
    ],
)
def test_a_form_that_is_not_ours_is_told(tmp_path: Path, head: str, told: str) -> None:
    assert function(tmp_path, f"{head}: return 1").facts.form == told


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            "def judge(question, response)",
            r"with \(prompt=, response=, answer=, info=\): missing .*'question'",
        ),
        ("def judge(solution_str, tokenizer)", r"as verl's compute_score with .*missing .*'tokenizer'"),
        (
            "def judge(completions, log_extra)",
            r"as TRL's reward function with .*missing .*'log_extra'",
        ),
        ("def judge(completions, /)", r"'completions' parameter is positional only"),
    ],
)
def test_a_signature_that_fits_no_form_is_refused_with_what_was_expected(
    tmp_path: Path, head: str, says: str
) -> None:
    with pytest.raises(Refusal, match=says):
        function(tmp_path, f"{head}: return 1")


def test_a_column_that_a_row_lacks_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"takes the column truth, and the row has answer, .* solution"):
        function(tmp_path, "def judge(completions, truth): return [1]")(ROW)


@pytest.mark.parametrize(
    ("returns", "score"),
    [
        ("1", 1.0),
        ("True", 1.0),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.bool_(True)", 1.0),
        ("numpy.array(0.5)", 0.5),
        ("numpy.array([0.5])", 0.5),
        ("[0.5]", 0.5),
        ("(numpy.int64(2),)", 2.0),
        ("{'score': 0.5}", 0.5),
        ("{'reward': 0.5, 'note': 'four', 3: 4}", 0.5),
        ("{'score': 0.5, 'pred': 'four'}", [0.5, {}, "four"]),
        ("{'score': 0.5, 'extracted': 4, 'pred': 5}", [0.5, {"extracted": 4.0, "pred": 5.0}, "4"]),
        ("{'score': 0.5, 'acc': True, 'reward': 2}", [0.5, {"acc": 1.0, "reward": 2.0}]),
        ("[{'score': numpy.float32(0.5), 'length': numpy.array(3)}]", [0.5, {"length": 3.0}]),
        ("later(0.5)", 0.5),
    ],
)
def test_a_number_is_taken_as_it_comes(tmp_path: Path, returns: str, score: Any) -> None:
    code = "import numpy\nasync def later(value): return value\n"
    for signature in ("completions", "solution_str"):
        judge = function(tmp_path, f"{code}def judge({signature}): return {returns}")
        assert score_of_one(judge, ROW) == score


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("None", "returned None of type NoneType, expected a number"),
        ("[1.0, 0.5]", "of type list, expected a number"),
        ("'0.5'", "of type str, expected a number"),
        ("{'acc': 1, 3: 4}", "returned a dict of acc, expected score or reward in it"),
        ("{}", "returned a dict of no names, expected score or reward in it"),
        ("{'score': 1, 'acc': float('nan')}", "returned nan for acc, expected a finite number"),
        ("{'score': float('inf')}", "returned inf, expected a finite number"),
        ("{'score': 1, **{f'p{n}': n for n in range(65)}}", "more than 64 numbers beside score"),
    ],
)
def test_what_is_no_finite_number_is_refused(tmp_path: Path, returns: str, says: str) -> None:
    with pytest.raises(Refusal, match=says.replace("(", r"\(").replace("[", r"\[")):
        function(tmp_path, f"def judge(solution_str): return {returns}")(ROW)


def test_calls_share_an_event_loop_until_one_of_them_breaks_it(tmp_path: Path) -> None:
    judge = function(
        tmp_path,
        """
        import asyncio
        async def judge(prompt, response, answer, info):
            if response == "stop":
                asyncio.get_running_loop().stop()
                await asyncio.sleep(3600)
            if response == "exit":
                raise SystemExit(3)
            return id(asyncio.get_running_loop()) % 1_000_003
        """,
    )
    first = judge(ROW)
    assert judge(ROW) == first
    with pytest.raises(SystemExit):
        judge(ROW | {"responses": ["exit"]})
    assert judge(ROW) == first
    with pytest.raises(RuntimeError, match="loop stopped"):
        judge(ROW | {"responses": ["stop"]})
    second = judge(ROW)
    assert judge(ROW) == second


def test_a_worker_of_a_function_imports_asyncio_where_it_awaits_and_nothing_heavy_ever(
    tmp_path: Path,
) -> None:
    script = (
        "import sys; from flotilla_workers.functions import Target; from flotilla_reward.worker import load\n"
        "load(Target('file', sys.argv[1], 'judge'))\n"
        "print(sorted({'asyncio', 'google', 'grpc', 'pydantic', 'numpy'} & {*sys.modules}))"
    )
    for begin, imported in (("def", "[]"), ("async def", "['asyncio']")):
        file = tmp_path / "light.py"
        file.write_text(f"{begin} judge(completions): return [1]")
        command = [sys.executable, "-P", "-c", script, str(file)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == imported


HOSTILE = """
    import asyncio

    class Key(str):
        def __str__(self): raise RuntimeError("no name")

    class Other:
        def __str__(self): raise RuntimeError("no name")
        __repr__ = __str__

    class Raises(int):
        def __float__(self): raise RuntimeError("no float")

    class Infinite(int):
        def __float__(self): return float("inf")

    class Endless(dict):
        def items(self):
            while True: yield "a", None

    async def stays():
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:
                pass

    async def swallows():
        task = asyncio.create_task(stays())
        await asyncio.sleep(0)
        task.cancel()
        asyncio.current_task().cancel()
        await stays()

    KINDS = {
        "key": lambda: {"score": 1, Key("a"): 1},
        "other": lambda: Other(),
        "other_key": lambda: {"score": 1, Other(): 1},
        "raises": lambda: Raises(1),
        "part_raises": lambda: {"score": 1, "a": Raises(1)},
        "infinite": lambda: Infinite(1),
        "endless": lambda: Endless(score=1),
        "half": lambda: {"score": 1, "\\ud800": 1},
        "swallows": swallows,
        "good": lambda: 1,
    }

    def judge(solution_str):
        return KINDS[solution_str]()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(1, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


async def score(
    pool: Workers, reward: str, items: list[pb.ScoreItem], limit_s: int = 10
) -> list[pb.ScoreOutcome]:
    spec = pb.RewardSpec(reward=reward)
    spec.timeout.FromSeconds(limit_s)
    terms = scoring.resolve([spec])
    assert not [sign async for sign in scoring.load(terms, pool) if sign.outcomes]
    responses = [response async for response in scoring.score_items(items, terms, pool)]
    found = {outcome.sample_id: outcome for response in responses for outcome in response.outcomes}
    return [found[item.sample_id] for item in items]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hostile_function_costs_its_own_answers_alone(pool: Workers, tmp_path: Path) -> None:
    file = tmp_path / "hostile.py"
    file.write_text(textwrap.dedent(HOSTILE))
    ends = {
        "key": "no name",
        "other": "no name",
        "other_key": 1.0,
        "raises": "no float",
        "part_raises": "no float",
        "infinite": "returned inf, expected a finite number",
        "endless": "timeout",
        "half": 1.0,
        "swallows": "timeout",
    }
    names = [name for kind in ends for name in (kind, "good")]
    items = [pb.ScoreItem(sample_id=str(number), response=name) for number, name in enumerate(names)]
    outcomes = await score(pool, f"{file}:judge", items, limit_s=1)
    for name, outcome in zip(names, outcomes, strict=True):
        end = ends.get(name, 1.0)
        if isinstance(end, float):
            assert [part.value for part in outcome.value.components] == [end], (name, outcome)
        elif end == "timeout":
            assert outcome.WhichOneof("outcome") == "timeout", (name, outcome)
        else:
            assert end in outcome.error.message, (name, outcome)
    (half,) = outcomes[names.index("half")].value.components
    assert [(part.name, part.value) for part in half.parts] == [("\\ud800", 1.0)]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_reach_functions_of_others_and_their_parts_come_back(
    pool: Workers, tmp_path: Path
) -> None:
    file = tmp_path / "both.py"
    file.write_text(
        "async def trl(prompts, completions, solution, level, **columns):\n"
        "    said = completions[0][0]['content'] if isinstance(completions[0], list) else completions[0]\n"
        "    return [float(int(said) == solution[0]) + level[0]]\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = int(solution_str) == ground_truth\n"
        "    return {'score': right / 2, 'acc': right, 'index': extra_info['index'], 'pred': solution_str}\n"
    )
    plain = pb.ScoreItem(sample_id="plain", prompt="2+2=", response="4", answer="4")
    plain.info.update({"level": 2, "data_source": "sums", "extra_info": {"index": 3}})
    plain.answer_column.update({"solution": 4})
    chat = pb.ScoreItem(sample_id="chat", response="5", chat=[Message(role="user", content="2+2=")])
    chat.MergeFrom(
        pb.ScoreItem(prompt="2+2=", answer="4", info=plain.info, answer_column=plain.answer_column)
    )
    assert [one.value.components[0].value for one in await score(pool, f"{file}:trl", [plain, chat])] == [
        3,
        2,
    ]
    verl, _ = await score(pool, f"{file}:verl", [plain, chat])
    (component,) = verl.value.components
    assert component.value == 0.5
    assert [(part.name, part.value) for part in component.parts] == [("acc", 1.0), ("index", 3.0)]
    assert {Facts.of(told).form for told in pool.told.values()} >= {
        "called as TRL's reward function, with whole groups, awaited",
        "called as verl's compute_score",
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_a_function_that_fits_no_form_fails_the_call_before_any_scoring(
    pool: Workers, tmp_path: Path
) -> None:
    file = tmp_path / "unfit.py"
    file.write_text("def judge(completions, log_metric): return [1]\n")
    with pytest.raises(InvalidConfig, match=r"cannot be called as TRL's reward function"):
        await score(pool, f"{file}:judge", [pb.ScoreItem(sample_id="a")])
