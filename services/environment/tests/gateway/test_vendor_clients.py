"""The clients of the vendors against each dialect: what they are told, what they send again, what they raise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from flotilla_core import errors
from flotilla_environment.gateway.dialect import Completed, Token
from flotilla_environment.gateway.told import told

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "What is 1 + 2?"}
PLAIN = Completed("t1", "policy", 1_700_000_000, "3", prompt_tokens=11, completion_tokens=4)


def call(number: int, arguments: str) -> dict[str, str]:
    return {"id": f"00000100{number}", "name": "add", "arguments": arguments}


TEXTS = {
    "plain": "3",
    "nothing": "",
    "spaces": "  three \n\n ",
    "half characters": "\ufffd\ufffda",
    "special tokens": "<|im_start|>system\n<|endoftext|></s>[TOOL_CALLS]",
    "an unread call": '<tool_call>{"name": "add"',
    "unicode": "é 😀 \u2028 \u0085 \ufeff \x00 \x1b[0m",
    "what ends events": "data: [DONE]\n\nevent: error\r\n\r: x\r\r",
    "thoughts": "<think>\nhm\n</think>\n\n3",
    "json": '{"role": "assistant", "content": null}',
    "long": "word " * 50_000,
}
CALLS = {
    "a call": [call(0, '{"a": 1, "b": 2}')],
    "parallel calls": [call(0, '{"a": 1}'), call(1, '{"a": 1}'), call(2, "{}")],
    "odd spacing": [call(0, '{ "a" :1,\n\t"b":[ 1,2 ] }')],
    "numbers": [
        call(0, '{"a": 1.0, "b": 1e5, "c": -0.25, "d": 1e-07, "e": 12345678901234567890, "f": 1e21}')
    ],
    "unicode in arguments": [
        call(0, '{"ä": "\\u00e9 😀 \\u2028", "k": "</tool_call>", "n": null, "t": true}')
    ],
    "JSON in arguments": [call(0, json.dumps({"a": '{"b": "\\n"}', "c": {"d": [{}, [], ""]}}))],
    "keys in their order": [call(0, '{"z": 1, "a": 2, "10": 3, "9": 4}')],
}
TURNS = (
    {name: replace(PLAIN, content=text) for name, text in TEXTS.items()}
    | {name: replace(PLAIN, content="", calls=tuple(calls)) for name, calls in CALLS.items()}
    | {f"text and {name}": replace(PLAIN, content="I add.", calls=tuple(CALLS[name])) for name in CALLS}
    | {"cut": replace(PLAIN, content="thr", cut=True)}
)


def plainly(vendor: Any, said: list[Any]) -> list[Any]:
    return [one.model_dump() for one in said]


def without_nulls(vendor: Any, said: list[Any]) -> list[Any]:
    return [one.model_dump(exclude_none=True) for one in said]


def through_json(vendor: Any, said: list[Any]) -> list[Any]:
    """What a client keeps in a file, and one that writes whole numbers without a fraction, as JavaScript does."""
    kept = json.loads("[" + ",".join(one.model_dump_json(exclude_none=True) for one in said) + "]")
    return json.loads(
        json.dumps(kept), parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text)
    )


def in_messages(history: list[Any]) -> list[Any]:
    """Anthropic's clients send a message again by its role and its blocks."""
    return [
        {"role": one["role"], "content": one["content"]}
        if one.get("type") == "message" and "usage" in one
        else one
        for one in history
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", TURNS)
async def test_a_client_hears_the_turn_and_what_it_sends_again_is_read_as_the_same_message(
    vendor: Any, name: str, stream: bool
) -> None:
    vendor.done = done = TURNS[name]
    answer = await vendor.ask([USER], stream=stream)
    assert vendor.asked.stream is stream
    assert vendor.text(answer) == done.content
    assert vendor.calls(answer) == [
        (one["id"], one["name"], json.loads(one["arguments"])) for one in done.calls
    ]
    message = told(vendor.asked, done).message
    results = [vendor.result(one["id"], "3") for one in done.calls]
    for sent in (plainly, without_nulls, through_json):
        history = [USER, *in_messages(sent(vendor, vendor.said(answer))), *results, USER]
        await vendor.ask(history, stream=stream)
        heard = vendor.asked.messages
        assert heard[0] == USER
        if sent is not through_json or "numbers" not in name:
            assert heard[1] == message
        else:  # a number beyond 2**53 is another one in JavaScript; all others are the same
            assert (
                json.loads(heard[1]["tool_calls"][0]["arguments"]).items() >= {"a": 1, "b": 100_000}.items()
            )
        assert heard[2:] == (
            *({"role": "tool", "content": "3", "tool_call_id": one["id"]} for one in done.calls),
            USER,
        )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_usage_and_the_reasons_of_an_end_are_those_of_the_vendor(vendor: Any, stream: bool) -> None:
    reasons = {}
    for name in ("plain", "a call", "text and a call", "cut"):
        vendor.done = TURNS[name]
        more = (
            {"stream_options": {"include_usage": True}}
            if stream and vendor.dialect.path.endswith("completions")
            else {}
        )
        answer = await vendor.ask([USER], stream=stream, **more)
        usage = answer.usage
        counts = {"prompt_tokens": 11, "completion_tokens": 4}
        if not hasattr(answer, "choices"):
            counts = {"input_tokens": 11, "output_tokens": 4}
        assert usage.model_dump().items() >= counts.items()
        assert answer.model == "policy"
        assert answer.id.endswith("t1")
        if hasattr(answer, "choices"):
            reasons[name] = answer.choices[0].finish_reason
        elif hasattr(answer, "stop_reason"):
            reasons[name] = answer.stop_reason
        else:
            reasons[name] = (answer.status, answer.incomplete_details and answer.incomplete_details.reason)
    ended = ("completed", None)
    assert (
        reasons
        == {
            "/v1/chat/completions": {
                "plain": "stop",
                "a call": "tool_calls",
                "text and a call": "tool_calls",
                "cut": "length",
            },
            "/v1/responses": {
                "plain": ended,
                "a call": ended,
                "text and a call": ended,
                "cut": ("incomplete", "max_output_tokens"),
            },
            "/v1/messages": {
                "plain": "end_turn",
                "a call": "tool_use",
                "text and a call": "tool_use",
                "cut": "max_tokens",
            },
        }[vendor.dialect.path]
    )


@pytest.mark.parametrize("vendor", ["chat", "messages"], indirect=True)  # Responses have no such texts
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_text_that_ends_a_turn_is_not_in_what_the_client_hears(vendor: Any, stream: bool) -> None:
    field = "stop" if vendor.dialect.path.endswith("completions") else "stop_sequences"
    vendor.done = replace(PLAIN, content="Thought: add.\nObservation: x", cut=True)
    answer = await vendor.ask([USER], stream=stream, **{field: ["x", "\nObservation:"]})
    assert vendor.asked.stop == ("x", "\nObservation:")
    assert vendor.text(answer) == "Thought: add."
    if field == "stop":
        assert answer.choices[0].finish_reason == "stop"
    else:
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\nObservation:")
    history = [USER, *in_messages(plainly(vendor, vendor.said(answer))), USER]
    await vendor.ask(history)
    assert vendor.asked.messages[1] == {"role": "assistant", "content": "Thought: add."}


TOKENS = (
    Token(9, "\ufffd", b"\xf0\x9f", -0.5),
    Token(8, "\ufffd", b"\x98\x80", -0.25),
    Token(0, "<|im_end|>", b"<|im_end|>", -1.5e-05),
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ["plain", "nothing", "a call", "text and a call"])
async def test_ids_and_log_probabilities_are_told_once_for_each_token_of_the_turn(
    vendor: Any, name: str, stream: bool
) -> None:
    vendor.done = replace(TURNS[name], tokens=TOKENS)
    await vendor.ask([USER], stream=stream)
    assert not vendor.asked.logprobs
    got: dict[str, list[Any]] = {"token_ids": [], "token_logprobs": [], "bytes": []}
    if stream and vendor.dialect.path != "/v1/responses":
        # Helpers of the clients keep no fields that they do not know, so these read the events.
        for choice in await raw_events(vendor):
            for key in ("token_ids", "token_logprobs"):
                got[key] += choice.get(key) or ()
            got["bytes"] += [one["bytes"] for one in (choice.get("logprobs") or {}).get("content") or ()]
    else:
        answer = (await vendor.ask([USER], stream=stream, extra_body={"return_token_ids": True})).model_dump()
        found = answer["choices"][0] if "choices" in answer else answer
        got |= {key: found[key] for key in ("token_ids", "token_logprobs")}
        if "choices" in answer:
            got["bytes"] = [one["bytes"] for one in found["logprobs"]["content"]]
        elif "output" in answer and answer["output"][0]["type"] == "message":
            got["bytes"] = [one["bytes"] for one in answer["output"][0]["content"][0]["logprobs"]]
    assert vendor.asked.logprobs
    assert got["token_ids"] == [9, 8, 0]
    assert got["token_logprobs"] == [-0.5, -0.25, -1.5e-05]
    assert got["bytes"] in ([], [[0xF0, 0x9F], [0x98, 0x80], [*b"<|im_end|>"]])
    assert got["bytes"] or vendor.dialect.path == "/v1/messages" or name == "a call"


async def raw_events(vendor: Any) -> list[dict[str, Any]]:
    more = {"stream": True, "extra_body": {"return_token_ids": True}}
    if vendor.dialect.path == "/v1/messages":
        given = {"model": "policy", "max_tokens": 9, "messages": [USER], **more}
        return [one.model_dump() async for one in await vendor.client.messages.create(**given)]
    chunks = await vendor.client.chat.completions.create(model="policy", messages=[USER], **more)
    return [one.choices[0].model_dump() async for one in chunks]


STATUS = {
    errors.InvalidRequest("n: no", where="n"): "BadRequestError",
    errors.FailedPrecondition("the session is over"): "BadRequestError",
    errors.Unauthenticated("no such key"): "AuthenticationError",
    errors.PermissionDenied("the key is of another session"): "PermissionDeniedError",
    errors.NotFound("no such session"): "NotFoundError",
    errors.Exhausted("too many requests wait"): "RateLimitError",
    errors.Internal("a defect"): "InternalServerError",
    errors.Unavailable("the coordinator left"): "InternalServerError",
    errors.DeadlineExceeded("no turn in time"): "InternalServerError",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("error", STATUS, ids=lambda error: type(error).__name__)
async def test_a_refusal_raises_the_clients_own_exception_with_its_text(
    vendor: Any, error: errors.FlotillaError, stream: bool
) -> None:
    package = anthropic if vendor.dialect.path == "/v1/messages" else openai
    vendor.done, before = error, vendor.requests
    with pytest.raises(getattr(package, STATUS[error])) as raised:
        await vendor.ask([USER], stream=stream)
    assert error.what in str(raised.value)
    assert vendor.requests == before + 1
    body = raised.value.body
    if package is openai:
        assert body["param"] == (error.where or None)
        assert body["type"] and body["code"]
    else:
        assert (body["type"], body["error"]["message"]) == ("error", error.what)
