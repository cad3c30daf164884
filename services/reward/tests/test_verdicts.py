"""What each term says of its verdict: by which verifier, what it read, why there is none, and who is to blame."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import flotilla_reward
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.table import BUILTIN
from flotilla_workers.jail.jail import no_jail

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = Path(__file__).parent / "golden" / "rules.json"
"""The number of the rules of each built-in reward, and the digest of the code that has them."""

JUDGES = """
import os, time

class Unverifiable(ValueError):
    pass

def judge(prompt, response, answer, info):
    if response == "hangs":
        time.sleep(600)
    if response == "dies":
        os._exit(7)
    if response == "refuses":
        raise Unverifiable("a tower of powers")
    return {"score": 0.5, "acc": 1, "extracted": response}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(1, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


@pytest.fixture
def judge(tmp_path: Path) -> str:
    (tmp_path / "judges.py").write_text(JUDGES)
    return f"{tmp_path}/judges.py:judge"


def spec(reward: str, *, limit_ms: int = 20_000, blames: bool = False) -> pb.RewardSpec:
    made = pb.RewardSpec(reward=reward, blames_response=blames)
    made.timeout.FromMilliseconds(limit_ms)
    return made


async def score(
    pool: Workers, specs: Sequence[pb.RewardSpec], *responses: str, answer: str = "4"
) -> list[pb.ScoreOutcome]:
    terms = scoring.resolve(specs)
    async for _ in scoring.load(terms, pool):
        pass
    items = [
        pb.ScoreItem(sample_id=str(place), response=response, answer=answer)
        for place, response in enumerate(responses)
    ]
    responses_of = [response async for response in scoring.score_items(items, terms, pool)]
    found = {outcome.sample_id: outcome for response in responses_of for outcome in response.outcomes}
    return [found[item.sample_id] for item in items]


async def test_each_verdict_names_its_verifier_its_time_and_what_was_read(pool: Workers, judge: str) -> None:
    (outcome,) = await score(pool, [spec("numeric"), spec("math"), spec(judge)], "so 2+2 is 4.0")
    numeric, math, function = outcome.value.components
    release = metadata.version("flotilla-reward")
    assert numeric.version == f"flotilla {release}, rules {BUILTIN['numeric'].rules}"
    assert f"math-verify {metadata.version('math-verify')}" in math.version
    assert function.version == f"sha256:{hashlib.sha256(JUDGES.encode()).hexdigest()[:16]}"
    assert (numeric.extracted, math.extracted, function.extracted) == ("4", "4", "so 2+2 is 4.0")
    assert [(part.name, part.value) for part in function.parts] == [("acc", 1.0)]
    assert all(component.elapsed.ToNanoseconds() > 0 for component in outcome.value.components)
    parts = sum(component.elapsed.ToNanoseconds() for component in outcome.value.components)
    assert outcome.elapsed.ToNanoseconds() == pytest.approx(parts, abs=10)


async def test_what_was_read_is_cut_wherever_it_was_read(pool: Workers, judge: str) -> None:
    (outcome,) = await score(pool, [spec("exact"), spec(judge)], "x" * 5000)
    assert [len(component.extracted) for component in outcome.value.components] == [2000, 2000]


async def test_a_file_that_changed_is_another_version(pool: Workers, judge: str) -> None:
    (first,) = await score(pool, [spec(judge)], "4")
    Path(judge.partition(":")[0]).write_text(JUDGES + "# the same, and a comment more\n")
    (second,) = await score(pool, [spec(judge)], "4")
    versions = [one.value.components[0].version for one in (first, second)]
    assert len(set(versions)) == 2 and all(version.startswith("sha256:") for version in versions)


@pytest.mark.parametrize("broken", ["hangs", "dies"])
async def test_of_a_function_a_limit_and_a_death_are_errors_unless_the_term_blames_responses(
    pool: Workers, judge: str, broken: str
) -> None:
    limit_ms = 300 if broken == "hangs" else 20_000
    (error,) = await score(pool, [spec("exact"), spec(judge, limit_ms=limit_ms)], broken)
    assert error.WhichOneof("outcome") == ("timeout" if broken == "hangs" else "error")
    failed = error.timeout if broken == "hangs" else error.error
    assert (failed.file, failed.line) == (judge.rpartition(":")[0], 7), "where the function begins"
    assert [component.reward for component in error.before] == ["exact"]
    (blamed,) = await score(pool, [spec(judge, limit_ms=limit_ms, blames=True)], broken)
    (component,) = blamed.value.components
    assert (component.value, component.unreadable) == (0.0, True)
    assert component.why == (
        f"it kept {judge} busy until the limit of 0.3 s"
        if broken == "hangs"
        else "the worker exited with status 7 while it answered, twice"
    )


async def test_text_that_looks_like_a_place_harms_nothing(pool: Workers, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text("def judge(solution_str): return 'f.py:99999999999999999999 in g: h'\n")
    (outcome,) = await score(pool, [spec(f"{path}:judge")], "4")
    assert (outcome.error.file, outcome.error.line) == (str(path), 1), "the function's own place"


async def test_what_returns_no_number_is_told_with_the_place_of_its_function(
    pool: Workers, tmp_path: Path
) -> None:
    path = tmp_path / "none.py"
    path.write_text("import math\n\ndef judge(solution_str): return None if solution_str else math.nan\n")
    for response in ("", "4"):
        (outcome,) = await score(pool, [spec(f"{path}:judge")], response)
        assert (outcome.error.file, outcome.error.line) == (str(path), 3), outcome


async def test_a_function_blames_a_response_by_the_name_of_its_exception(pool: Workers, judge: str) -> None:
    (outcome,) = await score(pool, [spec(judge)], "refuses")
    (component,) = outcome.value.components
    assert (component.value, component.unreadable, component.why) == (0.0, True, "a tower of powers")


@pytest.mark.parametrize(
    ("response", "limit_ms"),
    [("9" * 5000, 20_000), (r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", 1_000)],
    ids=["breaks", "hangs"],
)
async def test_what_a_response_does_to_a_verifier_of_ours_is_told_and_worth_0(
    pool: Workers, response: str, limit_ms: int
) -> None:
    (outcome,) = await score(pool, [spec("math", limit_ms=limit_ms)], response)
    (component,) = outcome.value.components
    assert (component.value, component.unreadable) == (0.0, True) and component.why


class Watched(Workers):
    """Tells when a worker has a question."""

    def __init__(self) -> None:
        super().__init__(1, no_jail)
        self.begun = asyncio.Event()

    async def ask(self, *arguments: Any, **named: Any) -> Any:
        self.begun.set()
        return await super().ask(*arguments, **named)


@pytest_asyncio.fixture(loop_scope="module")
async def watched() -> AsyncIterator[Watched]:
    pool = Watched()
    await pool.start()
    yield pool
    await pool.stop()


async def test_what_ends_a_worker_once_is_not_blamed_on_the_response_it_had(watched: Watched) -> None:
    (loaded,) = await score(watched, [spec("math")], "4")
    watched.begun.clear()
    (pid,) = watched.pids.values()
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(score(watched, [spec("math")], "4"))
    await watched.begun.wait()
    os.kill(pid, signal.SIGKILL)
    (once,) = await asked
    assert [one.value.components[0].value for one in (loaded, once)] == [1.0, 1.0]
    assert pid not in watched.pids.values()


async def test_what_ends_this_service_is_not_blamed_on_the_response_it_had(watched: Watched) -> None:
    hangs = r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}"
    asked = asyncio.create_task(score(watched, [spec("math", limit_ms=600_000)], hangs))
    await watched.begun.wait()
    await watched.stop()
    (outcome,) = await asked
    assert outcome.WhichOneof("outcome") == "error"


def digest_of_rules(module: str) -> str:
    """Return the digest of the files that judge: of a module, and of ours that it imports."""
    package = Path(flotilla_reward.__file__).parents[1]
    todo, seen = [module], dict[str, str]()
    while todo:
        name = todo.pop()
        file = package / f"{name.replace('.', '/')}.py"
        if name in seen or not name.startswith("flotilla_reward.") or not file.is_file():
            continue
        seen[name] = file.read_text("utf-8")
        for node in ast.walk(ast.parse(seen[name])):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


async def test_the_number_of_the_rules_is_looked_at_whenever_their_code_changes() -> None:
    """Raise `rules` of the reward where a response may be judged differently now; then write the file anew."""
    digests = {module: digest_of_rules(module) for module in {one.__module__ for one in BUILTIN.values()}}
    found = {name: [reward.rules, digests[reward.__module__]] for name, reward in BUILTIN.items()}
    known = json.loads(RULES.read_text())
    changed = [name for name in found if found[name] != known.get(name)]
    assert not changed, f"look at `rules` of {changed}, then write {RULES.name} as {json.dumps(found)}"
    assert found.keys() == known.keys()
