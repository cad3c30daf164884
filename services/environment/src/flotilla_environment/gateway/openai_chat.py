"""The dialect of OpenAI's Chat Completions.

What it does beyond the vendor's: `return_token_ids` asks for `token_ids` in the choice, as vLLM has it, and for
`token_logprobs`; `logprobs` asks for them, too. All of a turn's tokens are there.

Ignored, for the run decides or nothing depends on it: the fields of sampling (`fields.SAMPLING`), those of serving
(`fields.OF_SERVING`), and IGNORED: hints for models of the vendor. `strict` of a function is a hint, too.
`tool_choice: none` hides the tools from the policy; what would force a call, or forbid a second one, is refused, and
so are all other fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flotilla_core.errors import FlotillaError
from flotilla_environment.gateway import fields, refusals
from flotilla_environment.gateway.dialect import Completed, Completion
from flotilla_environment.gateway.told import Told, event, logprobs, tokens, told

READ = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "response_format",
        "return_token_ids",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
IGNORED = fields.SAMPLING | fields.OF_SERVING | {"prediction", "reasoning_effort", "verbosity"}
ROLES = {"system": "system", "developer": "system", "user": "user"}


class OpenAIChat:
    """Chat Completions."""

    path = "/v1/chat/completions"

    def read(self, body: dict[str, Any]) -> Completion:
        """Return what a request asks for."""
        fields.check_names(body, read=READ, ignored=IGNORED)
        fields.check_value(body, "n", 1)
        fields.check_value(body, "top_logprobs", 0)
        fields.check_value(body, "response_format", {"type": "text"})
        fields.check_value(body, "modalities", ["text"])
        given = fields.a_list(body.get("messages"), "messages")
        if not given:
            raise fields.refused("messages", "it must not be empty")
        options = fields.an_object(body.get("stream_options") or {}, "stream_options")
        fields.check_names(
            options, read=("include_usage",), ignored=("include_obfuscation",), before="stream_options."
        )
        asked = body.get("tools") or []
        tools = tuple(_tool(one, f"tools[{at}]") for at, one in enumerate(fields.a_list(asked, "tools")))
        return Completion(
            messages=tuple(_message(one, f"messages[{at}]") for at, one in enumerate(given)),
            tools=fields.may_call(body, tools),
            max_tokens=fields.a_limit(body, "max_completion_tokens") or fields.a_limit(body, "max_tokens"),
            stop=fields.stops(body.get("stop"), "stop"),
            stream=fields.a_switch(body, "stream"),
            stream_usage=fields.a_switch(options, "include_usage"),
            logprobs=fields.a_switch(body, "logprobs") or fields.a_switch(body, "return_token_ids"),
        )

    def answer(self, asked: Completion, done: Completed) -> dict[str, Any]:
        """Return the body of an answer."""
        said = told(asked, done)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.calls:
            # A turn of calls alone has no text, as the vendor writes it.
            message |= {"content": said.content or None, "tool_calls": [_call(one) for one in said.calls]}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(asked, done),
            "finish_reason": _reason(said, done),
        }
        head = _head(done, "chat.completion")
        return {**head, "choices": [choice | tokens(asked, done)], "usage": _usage(done)}

    def events(self, asked: Completion, done: Completed) -> Iterator[bytes]:
        """Yield the chunks of a streamed answer: the role, the text, each call with its name before its arguments."""
        said = told(asked, done)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if said.calls else ""}]
        if said.content:
            deltas.append({"content": said.content})
        for place, one in enumerate(said.calls):
            named = {"index": place, **_call(one | {"arguments": ""})}
            written = {"index": place, "function": {"arguments": one["arguments"]}}
            deltas += [{"tool_calls": [named]}, {"tool_calls": [written]}]
        head = _head(done, "chat.completion.chunk")
        if asked.stream_usage:
            head["usage"] = None
        for place, delta in enumerate([*deltas, {}]):
            last = place == len(deltas)
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": _reason(said, done) if last else None,
            }
            if place == 1:  # the first with a part of the turn, or the last of a turn that says nothing
                choice |= {"logprobs": _logprobs(asked, done), **tokens(asked, done)}
            yield event({**head, "choices": [choice]})
        if asked.stream_usage:
            yield event({**head, "choices": [], "usage": _usage(done)})
        yield event("[DONE]")

    def refusal(self, error: FlotillaError) -> dict[str, Any]:
        """Return the body of an error."""
        return refusals.openai(error)


def _message(given: Any, field: str) -> dict[str, Any]:
    message = fields.an_object(given, field)
    role, content = fields.a_text(message.get("role"), f"{field}.role"), message.get("content")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise fields.refused(f"{field}.{name}", "the policy neither reads nor writes it")
    if role == "tool":
        return fields.result(
            message.get("tool_call_id"),
            fields.text_of(content, f"{field}.content"),
            f"{field}.tool_call_id",
        )
    if role == "assistant":
        calls = fields.a_list(message.get("tool_calls") or [], f"{field}.tool_calls")
        read = [_read_call(one, f"{field}.tool_calls[{at}]") for at, one in enumerate(calls)]
        return fields.assistant(fields.text_of(content, f"{field}.content"), read)
    if role not in ROLES:
        can = ", ".join((*ROLES, "assistant", "tool"))
        raise fields.refused(f"{field}.role", f"{role!r:.80} is none of {can}")
    return {"role": ROLES[role], "content": fields.text_of(content, f"{field}.content")}


def _read_call(given: Any, field: str) -> dict[str, str]:
    one = fields.an_object(given, field)
    fields.check_value(one, "type", "function", field=f"{field}.type")
    called = fields.an_object(one.get("function"), f"{field}.function")
    where = (f"{field}.id", f"{field}.function.name", f"{field}.function.arguments")
    return fields.call(one.get("id"), called.get("name"), called.get("arguments") or "", where)


def _tool(given: Any, field: str) -> dict[str, Any]:
    one = fields.an_object(given, field)
    fields.check_value(one, "type", "function", field=f"{field}.type")
    where = f"{field}.function"
    return fields.function(fields.an_object(one.get("function"), where), where)


def _head(done: Completed, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{done.id}", "object": kind, "created": done.created, "model": done.model}


def _call(one: dict[str, str]) -> dict[str, Any]:
    called = {"name": one["name"], "arguments": one["arguments"]}
    return {"id": one["id"], "type": "function", "function": called}


def _reason(said: Told, done: Completed) -> str:
    if done.cut and not said.stop:
        return "length"
    return "tool_calls" if said.calls else "stop"


def _logprobs(asked: Completion, done: Completed) -> dict[str, Any] | None:
    return {"content": logprobs(done), "refusal": None} if asked.logprobs else None


def _usage(done: Completed) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
