"""What clients send, retry and break off: each request is one turn, and a repetition is none."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from flotilla.common.v1.chat_pb2 import Message, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb

TOOL = {"type": "function", "function": {"name": "product", "parameters": {"type": "object"}}}


def counted() -> Any:
    """Return a policy that says how often it was asked."""
    count = iter(range(1, 100))
    return lambda _: f"turn {next(count)}"


async def test_each_dialect_has_the_same_episode(beside: Any) -> None:
    async def client(own: Any) -> None:
        assert await own.chat("One?") == "turn 1"
        said = await own.openai.responses.create(model="any", input="Two?")
        assert said.output_text == "turn 2"
        answer = await own.anthropic.messages.create(
            model="any", max_tokens=9, messages=[{"role": "user", "content": "Three?"}]
        )
        assert answer.content[0].text == "turn 3" and answer.usage.input_tokens == 7

    played = await beside.plays(counted(), client)
    assert (played.ending, played.said) == ("completed", [["One?"], ["Two?"], ["Three?"]])
    assert [one.max_tokens for one in played.asked] == [0, 0, 9]


async def test_streams_of_each_dialect_are_read_by_its_client(beside: Any) -> None:
    async def client(own: Any) -> None:
        chunks = await own.openai.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "One?"}], stream=True
        )
        assert "".join([one.choices[0].delta.content or "" async for one in chunks]) == "turn 1"
        async with own.openai.responses.stream(model="any", input="Two?") as events:
            assert (await events.get_final_response()).output_text == "turn 2"
        async with own.anthropic.messages.stream(
            model="any", max_tokens=9, messages=[{"role": "user", "content": "Three?"}]
        ) as stream:
            assert await stream.get_final_text() == "turn 3"

    played = await beside.plays(counted(), client)
    assert played.ending == "completed" and len(played.asked) == 3


async def test_a_history_goes_on_with_its_calls_and_their_results(beside: Any) -> None:
    call = ToolCall(id="000001000", name="product", arguments='{"a": 6, "b": 7}')
    says = iter(
        [
            pb.TurnWritten(message=Message(role="assistant", tool_calls=[call]), finish=pb.TURN_FINISH_STOP),
            "It is 42.",
        ]
    )

    async def client(own: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "What is 6 x 7?"}]
        first = await own.openai.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        said = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert json.loads(said.tool_calls[0].function.arguments) == {"a": 6, "b": 7}
        messages += [said, {"role": "tool", "content": "42", "tool_call_id": said.tool_calls[0].id}]
        second = await own.openai.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        assert second.choices[0].message.content == "It is 42."

    played = await beside.plays(lambda _: next(says), client)
    assert played.ending == "completed" and not played.asked[1].afresh
    (result,) = played.asked[1].messages
    assert (result.role, result.content, result.tool_call_id) == ("tool", "42", "000001000")
    assert json.loads(played.asked[0].tools[0].function)["name"] == "product"


async def test_a_rewritten_history_is_told_whole_and_a_sub_agent_has_a_thread(beside: Any) -> None:
    async def client(own: Any) -> None:
        first = await own.chat("One?")
        await own.chat("One?", first, "Two?")
        await own.chat("In short: one, two.", first, "Three?")
        await own.chat("A task of a sub-agent.")

    played = await beside.plays(counted(), client)
    assert [(one.thread, one.afresh, len(one.messages)) for one in played.asked] == [
        ("", False, 1),
        ("", False, 1),
        ("", True, 3),
        ("2", False, 1),
    ]


async def test_whoever_asks_for_log_probabilities_gets_each_token_with_its_bytes(beside: Any) -> None:
    async def client(own: Any) -> None:
        said = await own.openai.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "One?"}], logprobs=True
        )
        tokens = said.choices[0].logprobs.content
        assert "".join(one.token for one in tokens) == "turn 1"
        assert {one.logprob for one in tokens} == {-0.5} and bytes(tokens[0].bytes) == b"t"

    played = await beside.plays(counted(), client)
    assert [one.tokens for one in played.asked] == [True]


async def test_equal_requests_are_further_samples_and_repetitions_are_not(beside: Any) -> None:
    async def client(own: Any) -> None:
        assert await own.chat("One?") == "turn 1"
        assert await own.chat("One?") == "turn 2", "the first was delivered"
        both = await asyncio.gather(own.chat("Both?"), own.chat("Both?"))
        assert sorted(both) == ["turn 3", "turn 4"], "somebody waits for each"
        again = {"extra_headers": {"x-stainless-retry-count": "1"}}
        assert await own.chat("One?", **again) == "turn 2"
        marked = {"extra_headers": {"idempotency-key": "mine"}}
        assert [await own.chat("Marked?", **marked) for _ in range(2)] == ["turn 5", "turn 5"]
        with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
            await own.chat("Another?", **marked)

    played = await beside.plays(counted(), client)
    assert played.ending == "completed" and len(played.asked) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_gets_the_same_turn_when_it_comes_back(
    beside: Any, stream: bool
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def policy(_: Any) -> str:
        asked.set()
        await may_answer.wait()
        return "the one turn"

    async def client(own: Any) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "One?"}], "stream": stream}
        first = asyncio.create_task(_text(own, body))
        await asked.wait()
        first.cancel()
        await asyncio.wait((first,))
        second = asyncio.create_task(_text(own, body))
        may_answer.set()
        assert "the one turn" in await second

    assert len((await beside.plays(policy, client)).asked) == 1


async def _text(own: Any, body: Any) -> str:
    shown = {"authorization": f"Bearer {own.key}"}
    async with own.http.post(f"{own.url}/v1/chat/completions", json=body, headers=shown) as said:
        return str(await said.text())


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_delivered_in_part_is_delivered_again(beside: Any, stream: bool) -> None:
    said = pb.TurnWritten(
        message=Message(role="assistant", content="long " * 2_000_000), finish=pb.TURN_FINISH_STOP
    )

    async def client(own: Any) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "One?"}], "stream": stream}
        text, address = json.dumps(body).encode(), urlsplit(own.url)
        head = f"POST {address.path}/v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"authorization: Bearer {own.key}\r\ncontent-length: {len(text)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head.encode() + text)
        assert b"200 OK" in await reader.read(100)
        writer.transport.abort()
        whole = await _text(own, body)
        assert len(whole) > 10_000_000 and "long long" in whole

    assert len((await beside.plays(lambda _: said, client)).asked) == 1


async def test_a_request_that_nobody_waits_for_any_more_is_never_asked(beside: Any) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def policy(_: Any) -> str:
        asked.set()
        await may_answer.wait()
        return "yes"

    async def client(own: Any) -> None:
        first = asyncio.create_task(own.chat("One?"))
        await asked.wait()
        second = asyncio.create_task(own.raw({"messages": [{"role": "user", "content": "Two?"}]}))
        assert (await own.raw({"messages": 1}))[0] == 400, "it comes after the second"
        second.cancel()
        await asyncio.wait((second,))
        assert (await own.raw({"messages": 1}))[0] == 400
        may_answer.set()
        assert await first == "yes"

    played = await beside.plays(policy, client)
    assert played.said == [["One?"]]


async def test_a_key_that_is_no_text_is_a_wrong_key(beside: Any) -> None:
    async def client(own: Any) -> None:
        address = urlsplit(own.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"GET {address.path}/task HTTP/1.1\r\nhost: {address.netloc}\r\n".encode()
        writer.write(head + b"authorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()

    assert (await beside.plays(counted(), client)).asked == []


async def test_who_shows_another_key_or_names_no_session_gets_nothing(beside: Any) -> None:
    async def client(own: Any) -> None:
        body = {"messages": [{"role": "user", "content": "One?"}]}
        for key in ("", "wrong", own.key[:-1], "\u00e9"):
            status, said = await own.raw(body, authorization=f"Bearer {key}")
            assert status == 401 and own.key not in json.dumps(said)
        status, said = await own.raw(body, "/v1/messages", **{"authorization": "", "x-api-key": "wrong"})
        assert (status, said["error"]["type"]) == (401, "authentication_error")
        async with own.http.post(f"{own.url}x/v1/chat/completions", json=body) as response:
            assert response.status == 404
        async with own.http.get(own.url + "/task") as response:
            assert response.status == 401
        async with own.http.get(own.url.split("/sessions")[0] + "/tasks/next") as response:
            assert response.status == 401

    assert (await beside.plays(counted(), client)).asked == []


async def test_the_key_of_turns_asks_for_turns_alone(beside: Any) -> None:
    async def client(own: Any) -> None:
        shown = {"authorization": f"Bearer {own.turns_key}"}
        for path, body in (("/rewards", {"a": 1.0}), ("/end", {})):
            status, said = await own.raw(body, path, **shown)
            assert status == 401 and "FLOTILLA_SESSION_KEY" in said["error"]["message"]
        async with own.http.get(f"{own.url}/task", headers=shown) as response:
            assert response.status == 401
        assert (await own.openai.models.list()).data[0].id == "policy"
        assert await own.chat("One?") == "turn 1"

    played = await beside.plays(counted(), client)
    assert played.ending == "completed" and not played.ended.rewards


async def test_a_body_of_a_hundred_megabytes_is_refused_and_harms_nobody(beside: Any) -> None:
    async def client(own: Any) -> None:
        shown = {"authorization": f"Bearer {own.key}"}
        async with own.http.post(f"{own.url}/v1/messages", data=bytes(100_000_000), headers=shown) as said:
            assert (said.status, (await said.json())["type"]) == (413, "error")
        with pytest.raises(openai.APIStatusError) as caught:
            await own.chat("x" * 17_000_000)
        assert caught.value.status_code == 413 and "16,777,216 bytes" in str(caught.value)
        assert await own.chat("One?") == "turn 1"

    assert (await beside.plays(counted(), client)).said == [["One?"]]


async def test_bodies_that_arrive_in_part_take_neither_time_nor_room_from_others(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_environment.gateway.server.READ_LIMIT_S", 2.0)

    async def client(own: Any) -> None:
        address, path = urlsplit(own.url), urlsplit(own.url).path
        writers = []  # A connection ends with its writer.

        async def half(to: str, size: int) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            head = (
                f"POST {path}{to} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {own.key}\r\n"
            )
            writer.write(f"{head}content-length: {size}\r\n\r\n{{".encode())
            writers.append(writer)
            return reader

        waits = [await half("/v1/messages", 16 << 20) for _ in range(4)]
        while (await own.raw({}, "/v1/messages"))[0] != 429:
            pass
        other = beside.caller.stage.agents.gateway.sessions.open({})
        url, key = f"{own.url.rpartition('/')[0]}/{other.id}", {"authorization": f"Bearer {other.key}"}
        async with own.http.post(f"{url}/rewards", json={"a": 1.0}, headers=key) as said:
            assert said.status == 200, "another session has room"
        for reader in waits:
            assert b" 408 " in await reader.readline()
        assert b" 413 " in await (await half("/rewards", (1 << 20) + 1)).readline()
        assert await own.chat("One?") == "turn 1"

    assert (await beside.plays(counted(), client)).said == [["One?"]]


async def test_what_an_episode_may_not_say_is_refused_by_its_field_and_the_episode_goes_on(
    beside: Any,
) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"a": deep}
    named = {"name": "x" * 300, "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": named}]
    user = {"role": "user", "content": "One?"}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user], "stop": ["x" * 300]}, "stop"),
        ({"messages": [user], "stop": [str(number) for number in range(17)]}, "stop"),
        ({"messages": [user | {"content": "x" * 1_000_000}]}, "messages"),
        ({"messages": [user] * 1001}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": calls}]}, "messages[0]"),
        (
            {
                "messages": [user],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}],
            },
            "tools[0]",
        ),
        ({"messages": [user], "tools": [{"type": "function", "function": {"name": "f"}}] * 1001}, "tools"),
        ({"messages": [user], "n": 3}, "n"),
    ]

    async def client(own: Any) -> None:
        for body, field in wrong:
            status, said = await own.raw({"model": "any", **body})
            assert (status, said["error"]["param"]) == (400, field), said
        for text in (b"", b"[]", b"{", b"\xff", b'{"messages": ' + b"[" * 100_000):
            shown = {"authorization": f"Bearer {own.key}"}
            async with own.http.post(f"{own.url}/v1/chat/completions", data=text, headers=shown) as response:
                assert response.status == 400
        assert await own.chat("Well?") == "turn 1"

    assert (await beside.plays(counted(), client)).said == [["Well?"]]


async def test_a_limit_of_tokens_that_no_turn_reaches_is_asked_for_as_the_largest_one(beside: Any) -> None:
    user = {"role": "user", "content": "One?"}

    async def client(own: Any) -> None:
        for limit in (2**32 - 1, 2**32, 10**300):
            for path, field in (
                ("/v1/chat/completions", "max_completion_tokens"),
                ("/v1/messages", "max_tokens"),
            ):
                assert (await own.raw({"messages": [user], field: limit}, path))[0] == 200
            assert (await own.raw({"input": "One?", "max_output_tokens": limit}, "/v1/responses"))[0] == 200

    played = await beside.plays(counted(), client)
    assert [one.max_tokens for one in played.asked] == [2**32 - 1] * 9 and played.ending == "completed"


async def test_requests_that_wait_are_bounded(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_environment.gateway.session.MOST_WAITING", 2)
    may_answer = asyncio.Event()

    async def policy(_: Any) -> str:
        await may_answer.wait()
        return "yes"

    async def client(own: Any) -> None:
        asked = [asyncio.create_task(own.chat(str(number))) for number in range(3)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        assert isinstance(refused.exception(), openai.RateLimitError)
        may_answer.set()
        assert [await one for one in waiting] == ["yes"] * 2

    assert len((await beside.plays(policy, client)).asked) == 2


async def test_what_a_busy_gateway_refused_is_no_repetition_when_it_comes_again(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "One?"}]}
    monkeypatch.setattr("flotilla_environment.gateway.server.MOST_BODIES_BYTES", len(json.dumps(body)) + 10)
    asked, may_answer, count = asyncio.Event(), asyncio.Event(), iter(range(1, 100))

    async def policy(_: Any) -> str:
        asked.set()
        await may_answer.wait()
        return f"turn {next(count)}"

    async def client(own: Any) -> None:
        first = asyncio.create_task(own.raw(body))
        await asked.wait()
        assert (await own.raw(body))[0] == 429
        may_answer.set()
        again = {"x-stainless-retry-count": "1"}
        told = [await first, await own.raw(body, **again), await own.raw(body, **again)]
        assert [said["choices"][0]["message"]["content"] for _, said in told] == [
            "turn 1",
            "turn 2",
            "turn 2",
        ]

    assert len((await beside.plays(policy, client)).asked) == 2


async def test_without_further_turns_the_client_is_told_that_its_session_is_over(beside: Any) -> None:
    async def client(own: Any) -> None:
        await own.chat("One?")
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"session is over.*max_turns"):
                await own.chat("Two?")
        assert (await own.raw({"found": 0.5}, "/rewards"))[0] == 200, "rewards for what there is"

    played = await beside.plays(counted(), client, turns=1)
    assert (played.ending, dict(played.ended.rewards)) == ("max_turns", {"found": 0.5})


async def test_rewards_are_finite_numbers_by_name_that_the_run_does_not_give_itself(beside: Any) -> None:
    async def client(own: Any) -> None:
        await own.chat("One?")
        bad = [{"a": "1"}, {"a": None}, {"a": [1]}, {"a": 1e39}, {"turns": 1}, {"correct": 1}, {"a\n": 1}]
        bad += [{"": 1.0} | {str(number): 1.0 for number in range(100)}, {"x" * 201: 1}]
        for given in bad:
            assert (await own.raw(given, "/rewards"))[0] == 400, given
        assert (await own.raw({"a": 1, "b": -2.5}, "/rewards"))[0] == 200
        assert (await own.raw({"a": 0.5}, "/rewards"))[1] == {"rewards": {"a": 0.5, "b": -2.5}}

    played = await beside.plays(counted(), client, correct="contains", answer="turn 1")
    assert dict(played.ended.rewards) == {"a": 0.5, "b": -2.5, "correct": 1.0}


async def test_the_last_turn_that_the_agent_heard_is_judged_and_those_that_nobody_heard_are_counted(
    beside: Any,
) -> None:
    says = iter(["It is 42.\nObservation: 7", "It is 41."])
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def policy(turn: pb.TurnAsked) -> str:
        if not turn.stop:
            asked.set()
            await may_answer.wait()
        return next(says)

    async def client(own: Any) -> None:
        first = await own.chat("What is 6 x 7?", stop=["\nObservation:"])
        assert first == "It is 42."
        second = asyncio.create_task(own.chat("What is 6 x 7?", first, "Are you sure?"))
        await asked.wait()
        second.cancel()
        await asyncio.wait((second,))
        may_answer.set()

    played = await beside.plays(policy, client, correct="last_number")
    assert dict(played.ended.rewards) == {"correct": 1.0} and len(played.asked) == 2
    assert dict(played.ended.metrics) == {"unheard_turns": 1.0}


async def test_an_agent_from_outside_that_does_nothing_is_a_timeout_and_never_a_reward(beside: Any) -> None:
    async def client(own: Any) -> None:
        await own.raw({"a": 1.0}, "/rewards")
        with pytest.raises(openai.BadRequestError, match="session is over"):
            while True:
                await asyncio.sleep(0.1)
                await own.openai.models.list()

    played = await beside.plays(counted(), client, limit_s=0.3)
    assert played.ending == "timeout" and not played.ended.rewards
    assert "environment.call_timeout_s" in played.ended.failure.next_step


async def test_requests_that_are_refused_give_an_agent_no_further_time(beside: Any) -> None:
    async def client(own: Any) -> None:
        said: dict[str, Any] = {}
        while "session is over" not in str(said):
            _, said = await own.raw({"messages": [{"role": "user", "content": "x" * 1_000_000}]})

    played = await beside.plays(counted(), client, limit_s=0.5)
    assert played.ending == "timeout" and not played.asked


async def test_an_agent_that_ends_while_its_turn_is_written_ends_its_episode_with_its_rewards(
    beside: Any,
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def policy(_: Any) -> str:
        asked.set()
        await may_answer.wait()
        return "too late"

    async def client(own: Any) -> None:
        waits = asyncio.create_task(own.chat("One?"))
        await asked.wait()
        assert (await own.raw({"found": 0.5}, "/rewards"))[0] == 200
        assert (await own.raw({}, "/end"))[0] == 200
        with pytest.raises(openai.BadRequestError, match="session is over"):
            await waits
        may_answer.set()

    played = await beside.plays(policy, client)
    assert (played.ending, dict(played.ended.rewards)) == ("completed", {"found": 0.5})


async def test_a_caller_that_leaves_ends_the_session(beside: Any) -> None:
    asked = asyncio.Event()

    async def policy(_: Any) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    async def client(own: Any) -> None:
        waits = asyncio.create_task(own.chat("One?"))
        await asked.wait()
        beside.leaves()
        with pytest.raises(openai.BadRequestError, match="session is over"):
            await waits

    with pytest.raises(asyncio.CancelledError):
        await beside.plays(policy, client)
    assert len(beside.caller.stage.agents.gateway.sessions) == 0
