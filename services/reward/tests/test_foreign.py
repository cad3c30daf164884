"""Functions that were written for other programs: what does not fit is refused with a way that works."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla_core.errors import InvalidConfig
from flotilla_testing.reward_process import RewardProcess, reward_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASYNC = """
    import asyncio
    async def judge(prompt, response, answer, info):
        await asyncio.sleep(0)
        return float(response == answer)
"""
TRL = """
    def judge(prompts, completions, answer, **kwargs):
        return [float(one == right) for one, right in zip(completions, answer)]
"""
VERL = """
    def judge(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "acc": 1}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RewardProcess]:
    async with reward_process(tmp_path_factory.mktemp("foreign")) as service:
        yield service


@pytest.mark.parametrize(("name", "code"), [("async", ASYNC), ("trl", TRL), ("verl", VERL)])
async def test_a_function_of_another_kind_is_refused_with_a_wrapper_that_works(
    service: RewardProcess, tmp_path: Path, name: str, code: str
) -> None:
    file = tmp_path / f"{name}_judge.py"
    file.write_text(textwrap.dedent(code))
    with pytest.raises(InvalidConfig, match="Name a function like this one instead") as refusal:
        await service.outcomes(f"{file}:judge", ["1", "2"])
    wrapper = str(refusal.value).partition("instead:\n")[2]
    file.write_text(textwrap.dedent(code) + "\n\n" + wrapper + "\n")
    outcomes = await service.outcomes(f"{file}:reward", ["1", "2"])
    assert [outcome.value.components[0].value for outcome in outcomes] == [1.0, 0.0], outcomes


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("{'acc': 1, 'score': 0.5}", "such as result['score']"),
        ("[0.5]", "return result[0]"),
        ("wait()", "wrap the call in asyncio.run(...)"),
        ("'0.5'", "of type str, expected a number"),
    ],
)
async def test_what_is_no_number_is_an_error_that_says_how_to_make_one(
    service: RewardProcess, tmp_path: Path, returns: str, says: str
) -> None:
    file = tmp_path / "returns.py"
    file.write_text(
        f"async def wait(): pass\ndef reward(prompt, response, answer, info):\n    return {returns}\n"
    )
    (outcome,) = await service.outcomes(f"{file}:reward", ["1"])
    assert says in outcome.error.message


async def test_an_array_of_one_number_is_that_number(service: RewardProcess, tmp_path: Path) -> None:
    file = tmp_path / "array.py"
    file.write_text(
        "import numpy\n"
        "def reward(prompt, response, answer, info):\n"
        "    return numpy.array(0.5) if response == 'array' else numpy.float32(0.5)\n"
    )
    outcomes = await service.outcomes(f"{file}:reward", ["array", "scalar"])
    assert [outcome.value.components[0].value for outcome in outcomes] == [0.5, 0.5]
