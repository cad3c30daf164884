"""Score calls over a real worker pool, without the network."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.errors import InvalidConfig, InvalidRequest
from flotilla_reward import catalog, scoring
from flotilla_reward.answers import Workers
from flotilla_reward.catalog import Term
from flotilla_workers.jail.jail import no_jail

HERE = Path(__file__).parent
USER_FILE = HERE / "rewards_fixture.py"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(2, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


def spec(reward: str, timeout_s: float = 10.0, **parameters: Any) -> pb.RewardSpec:
    struct = Struct()
    struct.update(parameters)
    limit = Duration(seconds=int(timeout_s), nanos=round(timeout_s % 1 * 1e9))
    return pb.RewardSpec(reward=reward, parameters=struct, timeout=limit)


def user(function: str) -> str:
    return f"{USER_FILE}:{function}"


def items(*responses: str, answer: str = "4", **info: Any) -> list[pb.ScoreItem]:
    struct = Struct()
    struct.update(info)
    return [
        pb.ScoreItem(sample_id=f"s{index}", prompt="2+2=", response=response, answer=answer, info=struct)
        for index, response in enumerate(responses)
    ]


async def loaded(pool: Workers, specs: list[pb.RewardSpec]) -> list[Term]:
    terms = scoring.resolve(specs)
    assert not [sign async for sign in scoring.load(terms, pool) if sign.outcomes]
    return terms


async def score(
    pool: Workers, specs: list[pb.RewardSpec], samples: list[pb.ScoreItem]
) -> dict[str, pb.ScoreOutcome]:
    terms = await loaded(pool, specs)
    responses = [response async for response in scoring.score_items(samples, terms, pool)]
    outcomes = [outcome for response in responses for outcome in response.outcomes]
    assert len(outcomes) == len(samples)
    return {outcome.sample_id: outcome for outcome in outcomes}


def value(outcome: pb.ScoreOutcome) -> float:
    return sum(component.value for component in outcome.value.components)


async def every_place_filled(pool: Workers) -> set[int]:
    """Both workers of the file run at once, so both are alive; their process ids are returned."""
    await score(pool, [spec(user("slow"))], items("x", "x"))
    pids = {pid for worker, pid in pool.pids.items() if str(USER_FILE) in worker}
    assert len(pids) == 2
    return pids


async def test_each_term_has_a_value(pool: Workers) -> None:
    specs = [spec("exact"), spec(user("length"), scale=2), spec("math")]
    outcomes = await score(pool, specs, items("4", "5"))
    assert [(c.reward, c.value) for c in outcomes["s0"].value.components] == [
        ("exact", 1.0),
        (user("length"), 2.0),
        ("math", 1.0),
    ]
    assert [c.value for c in outcomes["s1"].value.components] == [0.0, 2.0, 0.0]


async def test_user_code_sees_whole_numbers_as_integers_and_modules_beside_it(pool: Workers) -> None:
    outcomes = await score(pool, [spec(user("from_info")), spec(user("beside"))], items("4", points=[3, 1]))
    assert value(outcomes["s0"]) == 3 + 4 + 0.5


async def test_prints_of_user_code_harm_nothing(pool: Workers) -> None:
    outcomes = await score(pool, [spec(user("prints"))], items("4"))
    assert value(outcomes["s0"]) == 1.0


async def test_a_raise_is_an_error_with_its_traceback(pool: Workers) -> None:
    error = (await score(pool, [spec("exact"), spec(user("raises"))], items("4")))["s0"].error
    assert error.reward == user("raises")
    line = USER_FILE.read_text().partition("raise RuntimeError")[0].count("\n") + 1
    assert error.message == (
        f"reward {user('raises')}: {USER_FILE}:{line} in raises: RuntimeError: the judge is at lunch"
    )
    assert 'raise RuntimeError("the judge is at lunch")' in error.traceback


async def test_what_a_library_raised_on_the_way_is_told_by_the_line_where_it_did(
    pool: Workers, tmp_path: Path
) -> None:
    path = tmp_path / "calls.py"
    path.write_text(
        "from urllib.request import urlopen\n"
        "def reward(prompt, response, answer, info):\n    return urlopen('http://localhost:9', timeout=1)\n"
    )
    told = (await score(pool, [spec(f"{path}:reward")], items("4")))["s0"].error.traceback
    assert "line 3, in reward" in told and "ConnectionRefusedError" in told
    assert told.count("  File ") == 2, "one of the library, and one of the user"


async def test_an_exit_is_an_error_like_any_other(pool: Workers) -> None:
    error = (await score(pool, [spec(user("exits"))], items("4")))["s0"].error
    assert error.message.endswith(" in exits: SystemExit: 3")


async def test_a_raise_within_a_library_names_the_line_of_the_user_that_called_it(
    pool: Workers, tmp_path: Path
) -> None:
    path = tmp_path / "calls.py"
    path.write_text(
        "import json\n"
        "def read(text):\n    return json.loads(text)\n"
        "def reward(prompt, response, answer, info):\n    return read(response)['score']\n"
    )
    outcomes = await score(pool, [spec(f"{path}:reward")], items("{}", "no json"))
    missing, unreadable = outcomes["s0"].error, outcomes["s1"].error
    assert missing.message == f"reward {path}:reward: {path}:5 in reward: KeyError: 'score'"
    assert f"{path}:3 in read: JSONDecodeError: " in unreadable.message
    assert "line 5, in reward" in unreadable.traceback and "line 3, in read" in unreadable.traceback
    assert "decoder.py" not in unreadable.traceback and "worker.py" not in unreadable.traceback


@pytest.mark.parametrize(
    ("function", "response", "says"),
    [
        ("not_a_number", "nan", "returned nan, expected a finite number"),
        ("not_a_number", "-inf", "returned -inf, expected a finite number"),
        ("not_a_number", "-1e200", "returned -1e+200, expected at most 1e+38 either way"),
        ("nothing", "4", "returned None of type NoneType, expected a number"),
        ("dies", "exit", "the worker exited with status 7 while it answered"),
        ("dies", "crash", "the worker was ended by SIGSEGV while it answered"),
    ],
)
async def test_what_is_not_a_finite_number_is_an_error_that_names_the_function(
    pool: Workers, function: str, response: str, says: str
) -> None:
    error = (await score(pool, [spec(user(function))], items(response)))["s0"].error
    assert error.message == f"reward {user(function)}: {says}"
    outcomes = await score(pool, [spec(user("length"))], items("abc", "de"))
    assert [value(outcomes[f"s{index}"]) for index in range(2)] == [3.0, 2.0]


async def test_a_function_that_never_returns_times_out_alone_and_its_worker_is_replaced(
    pool: Workers,
) -> None:
    before = await every_place_filled(pool)
    replaced = pool.replaced
    outcomes = await score(pool, [spec(user("hangs"), timeout_s=0.2)], items("hang", *["fine"] * 8))
    assert outcomes["s0"].WhichOneof("outcome") == "timeout"
    assert outcomes["s0"].timeout.reward == user("hangs")
    assert outcomes["s0"].timeout.limit.ToTimedelta().total_seconds() == pytest.approx(0.2)
    assert all(value(outcomes[f"s{index}"]) == 1.0 for index in range(1, 9))
    after = await every_place_filled(pool)
    assert len(before & after) == 1
    assert pool.replaced == replaced + 1


async def test_a_response_that_a_pattern_backtracks_over_for_ever_is_worth_nothing(pool: Workers) -> None:
    outcomes = await score(
        pool, [spec("regex", timeout_s=0.2, pattern="(a+)+$")], items("a" * 60 + "b", "aa")
    )
    assert value(outcomes["s0"]) == 0.0 and outcomes["s0"].value.components[0].unreadable
    assert value(outcomes["s1"]) == 1.0


async def test_a_bounded_reward_says_which_response_broke_it(pool: Workers) -> None:
    outcomes = await score(
        pool, [spec("instructions", instructions=[{"kind": "json_only"}])], items("[" * 100_000, "[]")
    )
    assert value(outcomes["s0"]) == 0.0 and outcomes["s0"].value.components[0].unreadable
    assert value(outcomes["s1"]) == 1.0 and not outcomes["s1"].value.components[0].unreadable


async def test_a_caller_that_goes_away_stops_the_work(pool: Workers) -> None:
    before = await every_place_filled(pool)
    terms = await loaded(pool, [spec(user("hangs"), timeout_s=600)])
    stream = scoring.score_items(items("hang", "fine", "hang", "hang", "hang"), terms, pool)
    first = await anext(stream)
    assert [outcome.sample_id for outcome in first.outcomes] == ["s1"]
    await stream.aclose()
    assert not before & set(pool.pids.values())
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]


async def test_samples_that_wait_for_a_worker_are_not_timed(pool: Workers) -> None:
    # Two workers, sixteen samples of a tenth of a second each: the last waits far longer than its limit.
    path = user("slow")
    outcomes = await score(pool, [spec(path, timeout_s=0.5)], items(*["x"] * 16))
    assert {outcome.WhichOneof("outcome") for outcome in outcomes.values()} == {"value"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (spec("exakt"), "there is no reward 'exakt' (did you mean exact?)"),
        (spec("exact", ignorecase=True), "unknown parameter ignorecase (did you mean ignore_case?)"),
        (spec("exact", after=""), "after: String should have at least 1 character"),
        (spec("regex", pattern="(a"), "is not a regular expression: missing )"),
        (spec("regex", pattern="a", group=1), "pattern 'a' has no group 1"),
        (spec("length"), "at_least or at_most is needed"),
        (spec("instructions", instructions=[{"kind": "wrods"}]), "(did you mean words?)"),
        (spec("format", sections=["<think>"]), "is not a tag name"),
        (
            spec("numeric", absolute_tolerance=-1),
            "absolute_tolerance: Input should be greater than or equal to 0",
        ),
        (spec("/no/such/file.py:reward"), "(/no/such/file.py): No such file or directory"),
        (spec(str(USER_FILE)), f"Write it as {USER_FILE}:function."),
        (spec(user("missing")), "has no missing; it has beside, dies, exits, from_info, hangs, length, "),
        (spec(user("NO_FUNCTION")), "NO_FUNCTION is not a function but int"),
        (spec(user("length"), size=3), "takes no parameter size"),
    ],
)
async def test_a_wrong_spec_fails_the_call_before_any_scoring(
    pool: Workers, wrong: pb.RewardSpec, says: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        await score(pool, [spec("exact"), wrong], items("4"))
    assert says in str(caught.value)
    assert wrong.reward in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "samples", "says"),
    [
        ([], items("4"), "no rewards"),
        ([spec("exact", timeout_s=0)], items("4"), "timeout of reward exact is 0 s"),
        ([spec("exact")], items("4") + items("5"), "sample_id s0 is twice"),
        ([spec("exact")], [pb.ScoreItem(response="4")], "no sample_id"),
    ],
)
async def test_a_wrong_request_says_what_is_wrong(
    pool: Workers, specs: list[pb.RewardSpec], samples: list[pb.ScoreItem], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await score(pool, specs, samples)


async def test_a_file_that_does_not_import_fails_the_call_with_its_traceback(
    pool: Workers, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(InvalidConfig) as caught:
        await score(pool, [spec(f"{tmp_path}/broken.py:reward")], items("4"))
    assert "No module named 'nowhere_to_be_found'" in str(caught.value)
    assert "line 1" in str(caught.value)


async def test_an_edited_file_is_loaded_again(pool: Workers, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("def reward(prompt, response, answer, info): return 1\n")
    assert value((await score(pool, [spec(f"{path}:reward")], items("4")))["s0"]) == 1
    path.write_text("def reward(prompt, response, answer, info): return 22\n")
    assert value((await score(pool, [spec(f"{path}:reward")], items("4")))["s0"]) == 22


async def test_an_installed_entry_point_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(USER_FILE, tmp_path)
    shutil.copy(HERE / "rewards_fixture_helper.py", tmp_path)
    information = tmp_path / "judges-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: judges\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[flotilla.rewards]\nlen = rewards_fixture:length\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = Workers(1, no_jail)
    await pool.start()
    try:
        assert value((await score(pool, [spec("len")], items("four")))["s0"]) == 4
        descriptions = {reward.name: reward.description for reward in catalog.list_rewards()}
        assert descriptions["len"] == "Entry point rewards_fixture:length of judges 1.0."
    finally:
        await pool.stop()


async def test_list_rewards_shows_every_builtin_with_its_parameters() -> None:
    rewards = {reward.name: reward for reward in catalog.list_rewards()}
    assert {"exact", "numeric", "regex", "format", "math"} <= set(rewards)
    for reward in rewards.values():
        assert reward.description
    tolerance = rewards["numeric"].parameters["properties"]["absolute_tolerance"]
    assert tolerance["description"].startswith("Allowed difference.")


@pytest.mark.parametrize(
    ("response", "timeout_s"),
    [("9" * 5000, 30), (r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", 1)],
    ids=["breaks", "hangs"],
)
async def test_a_response_that_breaks_a_checker_or_keeps_it_busy_is_worth_nothing_and_counted(
    pool: Workers, response: str, timeout_s: float
) -> None:
    outcomes = await score(pool, [spec("math", timeout_s=timeout_s)], items("4", response))
    assert [(c.value, c.unreadable) for c in outcomes["s0"].value.components] == [(1.0, False)]
    assert [(c.value, c.unreadable) for c in outcomes["s1"].value.components] == [(0.0, True)]
