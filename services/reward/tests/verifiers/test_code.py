"""Programs of responses, judged through a real pool in the jail of this host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.errors import InvalidConfig
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_workers.jail.jail import Jail, find
from flotilla_workers.jail.level import Level

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES = yaml.safe_load((Path(__file__).parents[1] / "golden" / "code.yaml").read_text())["cases"]
REASONS = {"no_program", "wrong_answer", "failed", "timed_out", "too_much_output"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    if not find().level:
        pytest.skip(f"this host has no jail: {find().why_not_higher}")
    pool = Workers(2, find)
    await pool.start()
    yield pool
    await pool.stop()


async def judged(
    pool: Workers, response: str, tests: Any, timeout_s: float = 120, info: Any = None, **parameters: Any
) -> pb.ScoreOutcome:
    given, row = Struct(), Struct()
    given.update(parameters)
    row.update({"tests": tests} | (info or {}))
    limit = Duration(nanos=round(timeout_s % 1 * 1e9), seconds=int(timeout_s))
    terms = scoring.resolve([pb.RewardSpec(reward="code", parameters=given, timeout=limit)])
    assert [sign async for sign in scoring.load(terms, pool) if sign.outcomes] == []
    item = pb.ScoreItem(sample_id="s", response=response, info=row)
    found = [one async for said in scoring.score_items([item], terms, pool) for one in said.outcomes]
    assert len(found) == 1
    return found[0]


def parts_of(outcome: pb.ScoreOutcome) -> dict[str, float]:
    return {part.name: part.value for part in outcome.value.components[0].parts}


def block(code: str) -> str:
    return f"```python\n{code}\n```"


async def test_there_are_a_hundred_cases_with_names_of_their_own() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_code_judges_as_a_careful_human_does(pool: Workers, case: dict[str, Any]) -> None:
    response = case["response"] if "response" in case else block(case["code"])
    # Other suites may keep this host busy: only where a limit is what is tested, it is short.
    parameters = {"test_timeout_s": 60} | case.get("parameters", {})
    outcome = await judged(pool, response, case["tests"], info=case.get("info"), **parameters)
    if case["score"] == "error":
        assert outcome.HasField("error")
        return
    assert outcome.HasField("value"), outcome
    parts = parts_of(outcome)
    assert outcome.value.components[0].value == case["score"], parts
    assert parts["passed"] <= parts["total"]
    if "reason" in case:
        assert {case["reason"]} == REASONS & {*parts}


SUM = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}, {"input": "3 -4", "output": "-1"}]
GOOD = block("print(sum(map(int, input().split())))")


async def test_parts_say_how_many_passed_and_which_test_failed_first_and_why(pool: Workers) -> None:
    only_small = block("a, b = map(int, input().split())\nprint(3 if a == 1 else 1 / (a - 2) * 0 - 1)")
    found = parts_of(await judged(pool, only_small, SUM, all=False))
    assert found == {"passed": 1, "total": 3, "first_failed": 2, "failed": 1}
    assert parts_of(await judged(pool, GOOD, SUM)) == {"passed": 3, "total": 3, "first_failed": 0}


async def test_a_program_without_time_for_all_its_tests_is_worth_0_and_no_error(pool: Workers) -> None:
    slow = block(
        "import time\na, b = map(int, input().split())\ntime.sleep(0 if a == 1 else 100)\nprint(a + b)"
    )
    outcome = await judged(pool, slow, SUM, timeout_s=5, test_timeout_s=100)
    assert outcome.value.components[0].value == 0
    assert parts_of(outcome) == {"passed": 1, "total": 3, "first_failed": 2, "timed_out": 1}


async def test_a_jail_that_does_not_start_is_an_error_and_no_score(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "jail", Jail(Level.NAMESPACES, bwrap="/nowhere/bwrap"))
    outcome = await judged(pool, GOOD, SUM)
    assert "a worker did not start" in outcome.error.message


async def test_a_host_without_the_jail_that_its_stack_asks_for_runs_no_program(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "jail", Jail(Level.NONE, refusal="this host has no jail of level landlock"))
    with pytest.raises(InvalidConfig, match="reward code cannot run code"):
        await judged(pool, GOOD, SUM)


async def test_a_program_sees_neither_the_host_nor_another_program(pool: Workers) -> None:
    looks = block(
        "import os\nfound = os.listdir('/tmp')\nprint(os.path.exists('/etc/passwd'), len(found), os.getcwd() != '/')"
    )
    for _ in range(2):
        found = await judged(pool, looks, [{"input": "", "output": "False 1 True"}])
        assert found.value.components[0].value == 1


EVIL = """
class Evil:
    def __getattr__(self, name):
        if name.startswith("__array"):
            raise AttributeError(name)
        return Evil()
    def __call__(self, *arguments, **keywords):
        return True
    def __sub__(self, other):
        return 0
    def __lt__(self, other):
        return True
    def __float__(self):
        return 0.0
    def __iter__(self):
        return iter([Evil()])
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return True
    __rsub__ = __sub__
    __gt__ = __le__ = __ge__ = __eq__ = __contains__ = __lt__
    def __ne__(self, other):
        return False
    def __hash__(self):
        return hash(3.5)

def f(*arguments):
    return Evil()

np = all = abs = len = isinstance = round = set = pytest = approx = Evil()
def test_of_the_program():
    pass
"""


@pytest.mark.parametrize(
    "tests",
    [
        ["assert f(1) == 3.5"],
        ["assert 3.5 == f(1)"],
        ["assert not f(1) != 3.5"],
        ["assert abs(f(1) - 3.5) < 1e-6"],
        ["assert 3.4 < f(1) < 3.6"],
        ["import math\nassert math.isclose(f(1), 3.5)"],
        ["assert round(f(1), 1) == 3.5"],
        ["assert 3.5 in f(1)"],
        ["assert f(1) in {3.5}"],
        ["assert f(1) in (3.5, 4.5)"],
        ["assert set(f(1)) == {3.5}"],
        ["assert [f(1)] == [3.5]"],
        ["assert {'a': f(1)} == {'a': 3.5}"],
        ["assert all(one == 3.5 for one in f(1))"],
        ["assert isinstance(f(1), float)"],
        ["assert np.allclose(f(1), 3.5)"],
        ["import numpy as np\nassert np.allclose(np.asarray(f(1), dtype=float), 3.5)"],
        "import pytest\nfrom solution import *\n\ndef test_f():\n    assert f(1) == pytest.approx(3.5)\n",
        "from solution import *\nimport pytest\n\ndef test_f():\n    with pytest.raises(ValueError):\n        f(1)\n",
        "import unittest\nfrom solution import *\n\nclass T(unittest.TestCase):\n    def test_f(self):\n"
        "        self.assertAlmostEqual(f(1), 3.5)\n",
        "def check(candidate):\n    assert abs(candidate(1) - 3.5) < 1e-6\n",
    ],
)
async def test_no_object_of_a_program_passes_for_a_value(pool: Workers, tests: Any) -> None:
    info = {"entry_point": "f"}
    outcome = await judged(pool, block(EVIL), tests, info=info, all=False)
    assert outcome.value.components[0].value == 0, parts_of(outcome)
    assert parts_of(outcome)["passed"] == 0


@pytest.mark.parametrize(
    "code",
    [
        "seen.gi_frame.f_back.f_globals",
        "seen.gi_frame.f_builtins",
        "setattr(seen, 'send', None)",
    ],
)
async def test_a_program_looks_into_nothing_that_tests_give_it(pool: Workers, code: str) -> None:
    looks = block(
        f"def f(seen):\n    next(seen)\n    try:\n        {code}\n    except AttributeError:\n        return 'no'"
    )
    tests = ["expected = 'no'\nassert f(one for one in [1, 2, 3]) == expected"]
    assert (await judged(pool, looks, tests)).value.components[0].value == 1


async def test_a_program_uses_objects_of_its_tests(pool: Workers) -> None:
    code = block(
        "def total(node):\n    found = 0\n    while node is not None:\n        found += node.value\n"
        "        node.seen = True\n        node = node.next\n    return found"
    )
    tests = (
        "class Node:\n    def __init__(self, value, next):\n        self.value, self.next = value, next\n"
        "last = Node(2, None)\nassert total(Node(1, last)) == 3 and last.seen is True"
    )
    assert (await judged(pool, code, tests)).value.components[0].value == 1


async def test_objects_of_a_program_behave_as_its_tests_expect(pool: Workers) -> None:
    code = block(
        "from collections import deque\nfrom dataclasses import dataclass\nfrom fractions import Fraction\n\n"
        "class Missing(Exception):\n    pass\n\n"
        "@dataclass(frozen=True)\nclass Point:\n    x: int\n    def __add__(self, other):\n"
        "        return Point(self.x + other.x)\n\n"
        "def half():\n    return Fraction(1, 2)\n\ndef line():\n    return deque([1, 2])\n\n"
        "def numbers(n):\n    yield from range(n)\n\ndef sort(items):\n    items.sort()\n\n"
        "def find(key):\n    raise Missing(key)\n\ndef twice(call, one):\n    return call(call(one))\n"
    )
    tests = (
        "from collections import deque\nfrom fractions import Fraction\nimport pytest\n"
        "from solution import *\nfrom solution import Missing, Point\n\n"
        "def test_values():\n    assert half() == Fraction(1, 2) and line() == deque([1, 2])\n\n"
        "def test_objects():\n    assert Point(1) + Point(2) == Point(3) != Point(4)\n"
        "    assert Point(5).x == 5 and isinstance(Point(1), Point)\n\n"
        "def test_iterators():\n    assert list(numbers(3)) == [0, 1, 2]\n\n"
        "def test_in_place():\n    items = [3, 1, 2]\n    sort(items)\n    assert items == [1, 2, 3]\n\n"
        "def test_exceptions():\n    with pytest.raises(Missing, match='a'):\n        find('a')\n\n"
        "def test_calls_back():\n    assert twice(lambda one: one + 1, 3) == 5\n"
    )
    outcome = await judged(pool, code, tests, all=False)
    assert parts_of(outcome) == {"passed": 6, "total": 6, "first_failed": 0}
