"""Judges behind an endpoint: what is asked, what is repeated, what is a value and what never is; and where keys go."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flotilla.common.v1.chat_pb2 import Message
from flotilla.common.v1.finding_pb2 import SEVERITY_INFO, SEVERITY_WARNING
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import JudgeConfig, StackConfig, dump_yaml
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig, Unavailable
from flotilla_core.findings import text_of
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.judges import endpoint
from flotilla_reward.judges.judge import Judges, Verdicts
from flotilla_testing.scripted_judge import Request, Said, ScriptedJudge, always, scripted_judge
from flotilla_workers.jail.jail import no_jail

KEY = "sk-Qz7-veryNearlySecret-000"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT_S", 0.01)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(0, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


def config(judge: ScriptedJudge, **keys: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"url": judge.url, "model": "m", "timeout_s": 10, **keys})


def spec(**parameters: Any) -> pb.RewardSpec:
    found = pb.RewardSpec(reward="judge:j")
    found.parameters.update({"rubric": "Is it polite?", **(parameters or {"scale": [1, 10]})})
    return found


def items(*responses: str, answer: str = "") -> list[pb.ScoreItem]:
    return [
        pb.ScoreItem(sample_id=f"s{number}", prompt="2+2=", response=response, answer=answer)
        for number, response in enumerate(responses)
    ]


async def score(
    judges: Judges, pool: Workers, specs: list[pb.RewardSpec], samples: list[pb.ScoreItem]
) -> dict[str, pb.ScoreOutcome]:
    """The outcomes; where the call fails, its error has those that came before in `outcomes`."""
    found: dict[str, pb.ScoreOutcome] = {}
    try:
        async with asyncio.timeout(LIMIT_S):
            terms = scoring.resolve(specs, judges=judges)
            assert not [sign async for sign in scoring.load(terms, pool) if sign.outcomes]
            async for response in scoring.score_items(samples, terms, pool):
                found |= {outcome.sample_id: outcome for outcome in response.outcomes}
    except FlotillaError as error:
        error.outcomes = found  # type: ignore[attr-defined]
        raise
    finally:
        await judges.close()
    return found


def values(outcomes: dict[str, pb.ScoreOutcome]) -> dict[str, float]:
    return {name: one.value.components[0].value for name, one in outcomes.items()}


def parts(outcome: pb.ScoreOutcome) -> dict[str, float]:
    return {part.name: part.value for part in outcome.value.components[0].parts}


async def test_a_response_is_worth_its_place_on_the_scale_and_says_what_it_cost(pool: Workers) -> None:
    with scripted_judge(always('{"reason": "fine", "score": 4}')) as judge:
        judges = Judges({"j": config(judge, request={"temperature": 0, "seed": 3})})
        found = await score(judges, pool, [spec()], items("4", answer="four"))
    assert values(found) == {"s0": pytest.approx(1 / 3)}
    assert parts(found["s0"]) == {"score": 4.0, "tokens": 42.0, "kept": 0.0}
    (component,) = found["s0"].value.components
    assert component.version.startswith("m, sha256:") and component.elapsed.ToNanoseconds() > 0
    (request,) = judge.requests
    assert request.path == "/v1/chat/completions" and "Authorization" not in request.headers
    assert {name: request.body[name] for name in ("model", "temperature", "seed")} == {
        "model": "m",
        "temperature": 0,
        "seed": 3,
    }
    assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
    assert request.body["response_format"]["json_schema"]["name"] == "verdict"
    assert all(f"\n{text}\n" in request.user for text in ("Is it polite?", "2+2=", "4", "four"))


async def test_a_chat_is_shown_as_turns_and_not_as_its_template(pool: Workers) -> None:
    item = pb.ScoreItem(sample_id="a", prompt="<|im_start|>user\nHi<|im_end|>", response="Hello")
    item.chat.extend([Message(role="system", content="Be kind."), Message(role="user", content="Hi")])
    with scripted_judge(always('{"verdict": "yes"}')) as judge:
        await score(Judges({"j": config(judge)}), pool, [spec(verdicts={"yes": 1, "no": 0})], [item])
    assert "\nsystem: Be kind.\n\nuser: Hi\n" in judge.requests[0].user
    assert "im_start" not in judge.requests[0].user


@pytest.mark.parametrize(("said", "value"), [("yes", 1.0), ("NO", 0.0), ("partly", 0.25)])
async def test_a_word_has_the_value_that_the_run_gives_it(pool: Workers, said: str, value: float) -> None:
    with scripted_judge(always(json.dumps({"verdict": said}))) as judge:
        verdicts = spec(verdicts={"yes": 1, "no": 0, "partly": 0.25})
        assert values(await score(Judges({"j": config(judge)}), pool, [verdicts], items("4"))) == {
            "s0": value
        }


async def test_a_judge_without_a_verdict_is_asked_once_more_and_then_has_failed(pool: Workers) -> None:
    with scripted_judge(always("I would rather not say.")) as judge:
        (outcome,) = (await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))).values()
    assert len(judge.requests) == 2
    assert outcome.WhichOneof("outcome") == "error"
    assert "gave no verdict, 2 times; it ended with: I would rather not say." in outcome.error.message
    with scripted_judge(lambda _: Said("hm" if len(judge.requests) == 1 else '{"score": 10}')) as judge:
        found = await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))
    assert values(found) == {"s0": 1.0} and parts(found["s0"])["tokens"] == 84.0


@pytest.mark.parametrize("trouble", [429, 500, 502, 503, 529])
async def test_load_and_failures_of_the_server_are_waited_out(pool: Workers, trouble: int) -> None:
    def script(request: Request) -> Said:
        if len(judge.requests) < 4:
            return Said(status=trouble, headers={"Retry-After": "1"})
        return Said('{"score": 10}')

    with scripted_judge(script) as judge:
        assert values(await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))) == {"s0": 1.0}
    assert len(judge.requests) == 4


@pytest.mark.parametrize("refusal", [401, 403, 413, 301])
async def test_what_the_server_refuses_is_an_error_and_not_repeated(pool: Workers, refusal: int) -> None:
    body = json.dumps({"error": {"message": "no such thing"}})
    with scripted_judge(lambda _: Said(status=refusal, body=body)) as judge:
        (outcome,) = (await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))).values()
    assert len(judge.requests) == 1
    assert f"gave no verdict: status {refusal}: no such thing" in outcome.error.message


@pytest.mark.parametrize(
    "body", ["", "no JSON", "[]", '{"choices": []}', '{"choices": [{"message": 3}]}', "[" * 9999]
)
async def test_what_is_no_completion_is_an_error(pool: Workers, body: str) -> None:
    with scripted_judge(lambda _: Said(body=body)) as judge:
        (outcome,) = (await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))).values()
    assert "the answer is no chat completion" in outcome.error.message


async def test_an_answer_without_an_end_is_cut_off(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_BYTES", 1000)
    with scripted_judge(lambda _: Said(body="x" * 5000)) as judge:
        (outcome,) = (await score(Judges({"j": config(judge)}), pool, [spec()], items("4"))).values()
    assert "longer than 1000 bytes" in outcome.error.message


async def test_a_judge_that_is_away_gives_no_outcome_and_the_others_keep_theirs(pool: Workers) -> None:
    def script(request: Request) -> Said:
        return Said(status=503) if "\nbad\n" in request.user else Said('{"score": 10}')

    with scripted_judge(script) as judge:
        judges = Judges({"j": config(judge, retries=2)})
        with pytest.raises(Unavailable, match=r"judge j is away .*status 503 \(asked 3 times\)") as raised:
            await score(judges, pool, [spec()], items("good", "bad", "fine"))
    assert values(raised.value.outcomes) == {"s0": 1.0, "s2": 1.0}  # type: ignore[attr-defined]
    assert sum("\nbad\n" in request.user for request in judge.requests) == 3


async def test_a_group_that_is_compared_waits_whole_for_a_judge_that_is_away(tmp_path: Path) -> None:
    """Else a response would be ranked among others than the second time."""
    file = tmp_path / "ranks.py"
    file.write_text("def rank(prompt, responses, answer, info): return [len(responses)] * len(responses)\n")
    ranked = pb.RewardSpec(reward=f"{file}:rank")

    def script(request: Request) -> Said:
        return Said(status=503) if "\nbad\n" in request.user else Said('{"score": 10}')

    asked = items("good", "bad", "fine", "well")
    for item, group in zip(asked, "aabb", strict=True):
        item.group = group
    workers = Workers(1, no_jail)
    await workers.start()
    try:
        with scripted_judge(script) as judge:
            with pytest.raises(Unavailable, match="judge j is away") as raised:
                await score(Judges({"j": config(judge, retries=0)}), workers, [ranked, spec()], asked)
            judge.script = always('{"score": 10}')
            found = await score(Judges({"j": config(judge)}), workers, [ranked, spec()], asked[:2])
    finally:
        await workers.stop()
    assert values(raised.value.outcomes) == {"s2": 2.0, "s3": 2.0}  # type: ignore[attr-defined]
    assert values(found) == {"s0": 2.0, "s1": 2.0}


async def test_nobody_waits_in_vain_behind_a_request_that_found_the_judge_away(pool: Workers) -> None:
    with scripted_judge(lambda _: Said(status=500)) as judge:
        judges = Judges({"j": config(judge, retries=1, concurrency=1)})
        with pytest.raises(Unavailable, match=r"status 500 \(asked 2 times\)"):
            await score(judges, pool, [spec()], items(*"abcdefgh"))
    assert len(judge.requests) == 2


async def test_a_judge_that_nobody_serves_is_away(pool: Workers) -> None:
    with scripted_judge(always("")) as judge:
        pass
    with pytest.raises(Unavailable, match=r"judge j is away .*Connect.* \(asked 2 times\)"):
        await score(Judges({"j": config(judge, retries=1)}), pool, [spec()], items("4"))


async def test_a_slow_answer_is_given_up_and_asked_for_again(pool: Workers) -> None:
    let_go = threading.Event()

    def script(request: Request) -> Said:
        if len(judge.requests) == 1:
            let_go.wait(LIMIT_S)
        return Said('{"score": 10}')

    with scripted_judge(script) as judge:
        try:
            found = await score(Judges({"j": config(judge, timeout_s=0.3)}), pool, [spec()], items("4"))
        finally:
            let_go.set()
    assert values(found) == {"s0": 1.0} and len(judge.requests) == 2


async def test_a_server_that_knows_no_form_is_asked_without_from_then_on(pool: Workers) -> None:
    def script(request: Request) -> Said:
        if "response_format" in request.body:
            return Said(status=400, body='{"error": {"message": "unknown field"}}')
        return Said('Fine.\n{"score": 10}')

    with scripted_judge(script) as judge:
        judges = Judges({"j": config(judge)})
        for response in ("4", "5"):
            assert values(await score(judges, pool, [spec()], items(response))) == {"s0": 1.0}
    assert ["response_format" in request.body for request in judge.requests] == [True, False, False]


def prefers(better: str | None) -> Callable[[Request], Said]:
    """A judge of pairs: it prefers a response wherever it stands, or with None whatever stands first."""

    def script(request: Request) -> Said:
        first = request.user.partition("<<<second response")[0]
        chosen = "first" if better is None or f"\n{better}\n" in first else "second"
        return Said(json.dumps({"better": "tie" if better == "tie" else chosen}))

    return script


@pytest.mark.parametrize(("better", "value"), [("mine", 1.0), ("theirs", 0.0), (None, 0.5), ("tie", 0.5)])
async def test_a_pair_is_asked_in_both_orders_and_a_verdict_that_flips_is_a_tie(
    pool: Workers, better: str | None, value: float
) -> None:
    with scripted_judge(prefers(better)) as judge:
        found = await score(
            Judges({"j": config(judge)}), pool, [spec(pairs=True)], items("mine", answer="theirs")
        )
    assert values(found) == {"s0": value} and parts(found["s0"])["tokens"] == 84.0
    firsts = {
        request.user.partition("<<<second response")[0].rpartition("\n<<<end")[0][-6:]
        for request in judge.requests
    }
    assert len(judge.requests) == len(firsts) == 2


async def test_a_pair_without_an_answer_is_an_error(pool: Workers) -> None:
    with scripted_judge(prefers("mine")) as judge:
        (outcome,) = (
            await score(Judges({"j": config(judge)}), pool, [spec(pairs=True)], items("mine"))
        ).values()
    assert "no answer to compare" in outcome.error.message and judge.requests == []


async def test_a_verdict_is_kept_for_the_same_question_alone(pool: Workers) -> None:
    with scripted_judge(always('{"score": 10}')) as judge:
        judges = Judges({"j": config(judge, retries=0)})
        first = await score(judges, pool, [spec()], items("4"))
    assert parts(first["s0"])["kept"] == 0.0
    # The endpoint is gone: what is kept needs none.
    kept = await score(judges, pool, [spec()], items("4"))
    assert values(kept) == {"s0": 1.0} and parts(kept["s0"]) == {"score": 10.0, "tokens": 0.0, "kept": 1.0}
    assert len(judge.requests) == 1
    for other in (spec(scale=[0, 10]), spec(rubric="Is it rude?", scale=[1, 10])):
        with pytest.raises(Unavailable):
            await score(judges, pool, [other], items("4"))


async def test_equal_questions_at_the_same_time_are_asked_once(pool: Workers) -> None:
    with scripted_judge(always('{"score": 10}')) as judge:
        found = await score(Judges({"j": config(judge)}), pool, [spec()], items(*"4445"))
    assert set(values(found).values()) == {1.0} and len(judge.requests) == 2
    assert sum(parts(outcome)["kept"] for outcome in found.values()) == 2


async def test_who_waits_for_the_verdict_of_another_asks_where_that_one_failed(pool: Workers) -> None:
    with scripted_judge(lambda _: Said("hm" if len(judge.requests) < 3 else '{"score": 10}')) as judge:
        found = await score(Judges({"j": config(judge)}), pool, [spec()], items("4", "4"))
    assert sorted(one.WhichOneof("outcome") for one in found.values()) == ["error", "value"]


def test_no_more_verdicts_are_kept_than_the_bound_and_the_unused_go_first() -> None:
    verdicts = Verdicts(most=2)
    for key, verdict in ((b"a", 1.0), (b"b", 2.0)):
        verdicts.keep(key, verdict)
    assert verdicts.find(b"a") == 1.0
    verdicts.keep(b"c", 3.0)
    assert [verdicts.find(key) for key in (b"a", b"b", b"c")] == [1.0, None, 3.0]


async def test_requests_at_one_address_share_the_smallest_limit(pool: Workers) -> None:
    changed, under_way, arrived, most = threading.Condition(), 0, 0, 0

    def script(request: Request) -> Said:
        nonlocal under_way, arrived, most
        with changed:
            under_way, arrived = under_way + 1, arrived + 1
            most = max(most, under_way)
            mine = -(-arrived // 3) * 3
            changed.notify_all()
            assert changed.wait_for(lambda: arrived >= mine, LIMIT_S)
            under_way -= 1
        return Said('{"score": 10}')

    with scripted_judge(script) as judge:
        judges = Judges({"j": config(judge, concurrency=5), "other": config(judge, concurrency=3, model="n")})
        found = await score(judges, pool, [spec()], items(*(str(number) for number in range(9))))
    assert len(values(found)) == 9 and most == 3


def echoes(status: int) -> Callable[[Request], Said]:
    def script(request: Request) -> Said:
        told = f"wrong key: {request.headers.get('Authorization', '')}, that is {KEY[:9]}..."
        return Said(
            told, status=status, body=None if status == 200 else json.dumps({"error": {"message": told}})
        )

    return script


@pytest.mark.parametrize("place", ["variable", "file"])
@pytest.mark.parametrize("status", [200, 401, 400, 500])
async def test_no_part_of_a_key_is_in_any_message_log_or_configuration(
    pool: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    status: int,
    place: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    keys = {"api_key_file": str(file)} if place == "file" else {"api_key_env": "JUDGE_KEY"}
    said: list[str] = []
    with scripted_judge(echoes(status)) as judge:
        one = config(judge, retries=1, **keys)
        judges = Judges({"j": one})
        try:
            found = await score(judges, pool, [spec()], items("4"))
            said += [str(outcome) for outcome in found.values()]
        except Unavailable as error:
            said += [str(error), repr(error), repr(error.__cause__), repr(error.__context__)]
        assert judge.requests and all(
            request.headers["Authorization"] == f"Bearer {KEY}" for request in judge.requests
        )
    said += [text_of(finding) for finding in judges.findings()]
    said += [str(judges.infos()), dump_yaml(StackConfig(judges={"j": one})), repr(one)]
    said += [caplog.text, *capfd.readouterr()]
    assert any("not shown: it holds a part of the key" in text for text in said)
    assert not [text for text in said if any(KEY[at : at + 6] in text for at in range(len(KEY) - 5))]


@pytest.mark.parametrize("key", ["two\nlines", "n\u00f6", "tab\there"])
async def test_a_key_that_no_header_takes_is_refused_before_any_request(
    pool: Workers, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with scripted_judge(always("")) as judge:
        judges = Judges({"j": config(judge, api_key_env="JUDGE_KEY")})
        with pytest.raises(InvalidConfig) as raised:
            await score(judges, pool, [spec()], items("4"))
    assert key not in str(raised.value) and judge.requests == []


async def test_a_missing_key_fails_the_call_before_any_scoring_and_is_a_finding(pool: Workers) -> None:
    with scripted_judge(always("")) as judge:
        judges = Judges({"j": config(judge, api_key_env="NO_SUCH_KEY"), "free": config(judge)})
        with pytest.raises(FailedPrecondition, match="no variable NO_SUCH_KEY"):
            await score(judges, pool, [spec()], items("4"))
    assert [one.severity for one in judges.findings()] == [SEVERITY_WARNING, SEVERITY_INFO]
    assert [one.name for one in judges.infos()] == ["judge:j", "judge:free"]


async def test_a_judge_or_a_rubric_that_is_not_there_fails_the_call(pool: Workers) -> None:
    with pytest.raises(InvalidConfig, match=r"there is no judge j.*: none"):
        await score(Judges({}), pool, [spec()], items("4"))
    with scripted_judge(always("")) as judge:
        for wrong, why in (
            ({"scale": [10, 1]}, "the first number is the worst"),
            ({"rubric": "polite.md", "scale": [1, 10]}, "nobody read it"),
            ({"rubric": "r"}, "one of scale, verdicts and pairs"),
        ):
            with pytest.raises(InvalidConfig, match=why):
                await score(Judges({"j": config(judge)}), pool, [spec(**wrong)], items("4"))


async def test_a_call_that_is_given_up_ends_its_requests(pool: Workers) -> None:
    let_go, begun = threading.Event(), threading.Event()

    def script(request: Request) -> Said:
        begun.set()
        let_go.wait(LIMIT_S)
        return Said('{"score": 10}')

    with scripted_judge(script) as judge:
        judges = Judges({"j": config(judge, concurrency=1)})
        call = asyncio.create_task(score(judges, pool, [spec()], items("4")))
        try:
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        finally:
            let_go.set()
    assert not judges._servers[0].places.locked()
