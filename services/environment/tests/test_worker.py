"""What an environment returns becomes plain data, or is refused with the line of its method."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flotilla_environment import Begun, Environment, Reply, Task, Turn
from flotilla_environment.catalog import list_environments, problem
from flotilla_environment.waits import Waits
from flotilla_environment.worker import MOST_BYTES, WorkerEpisodes, load
from flotilla_workers.frames import MOST_ANSWER_BYTES, SECRET_BYTES, encode
from flotilla_workers.functions import Refusal, Target

TASK = {"messages": [], "answer": "", "info": {}, "seed": 7, "attempt": 1}


def begin(episode: int = 0) -> dict[str, Any]:
    return {"do": "begin", "episode": episode, "task": TASK}


def reply(content: str = "", episode: int = 0, **turn: Any) -> dict[str, Any]:
    whole = {
        "content": content,
        "calls": [],
        "unparsed": "",
        "cut": False,
        "tokens": 1,
        "tokens_left": 2,
    } | turn
    return {"do": "reply", "episode": episode, "turn": whole}


class Echo(Environment):
    """Says what it hears."""

    def __init__(self) -> None:
        self.closed = 0

    def begin(self, task: Task) -> Begun:
        return Begun(str(task.seed), [{"name": "f", "parameters": {}}])

    async def reply(self, turn: Turn) -> Reply:  # type: ignore[override]
        await asyncio.sleep(0)
        if turn.content == "raise":
            raise KeyError(turn.content)
        if turn.content == "end":
            return Reply(done=True, rewards={"calls": len(turn.calls)})
        return Reply([{"role": "tool", "content": f"{turn.calls} {turn.unparsed}", "tool_call_id": "1"}])

    def close(self) -> None:
        self.closed += 1


def test_episodes_of_one_worker_are_apart_and_each_is_closed_once() -> None:
    episodes = WorkerEpisodes(Echo, {})
    for number in range(4):
        said = episodes.answered(begin(number))
        assert (said["messages"], said["tools"]) == (
            [{"role": "user", "content": "7"}],
            ['{"name": "f", "parameters": {}}'],
        )
    playing = [*episodes._playing.values()]
    assert episodes.answered(reply("end", 1))["rewards"] == {"calls": 0.0}
    with pytest.raises(KeyError):
        episodes.answered(reply("raise", 2))
    episodes.answered({"do": "close", "episode": 3})
    episodes.answered({"do": "close", "episode": 3})
    assert [one.closed for one in playing if isinstance(one, Echo)] == [0, 1, 1, 1]
    assert [*episodes._playing] == [0] == [*episodes._tools]
    assert episodes.answered({"do": "stop", "episode": 0, "ending": "no_room"})["done"]
    assert not episodes._playing


LOOPS = """
import asyncio
from flotilla_environment import Begun, Environment, Reply

class Loops(Environment):
    def __init__(self):
        asyncio.run(asyncio.sleep(0))

    def begin(self, task):
        return asyncio.run(asyncio.sleep(0, Begun("begin")))

    async def reply(self, turn):
        return await asyncio.sleep(0, Reply("on"))

    def stop(self, ending):
        return asyncio.run(asyncio.sleep(0, Reply(done=True, rewards={"one": 1.0})))

    def close(self):
        asyncio.run(asyncio.sleep(0))
        print("closed")
"""


def test_a_method_that_is_not_async_may_run_an_event_loop_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    answer = load(Target("file", str(tmp_path / "loops.py"), "Loops"))
    assert answer(begin())["messages"] == [{"role": "user", "content": "begin"}]
    assert answer(reply())["messages"] == [{"role": "user", "content": "on"}]
    assert answer({"do": "stop", "episode": 0, "ending": "max_turns"})["rewards"] == {"one": 1.0}
    assert capsys.readouterr().out == "closed\n"


@pytest.mark.parametrize(
    ("arguments", "heard"),
    [
        ('{"a": 1}', "(Call(id='1', name='f', arguments={'a': 1}),) "),
        ("", "(Call(id='1', name='f', arguments={}),) "),
        ("[1]", "() arguments of f are no JSON object"),
        ("{", "() arguments of f are not JSON: "),
        ('{"a": 1e999}', "() arguments of f hold what JSON does not have"),
        ('{"a":' * (sys.getrecursionlimit() * 100), "() arguments of f are not JSON: "),
    ],
    ids=["object", "none", "list", "broken", "endless", "deep"],
)
def test_arguments_of_a_call_are_an_object_or_a_reason(arguments: str, heard: str) -> None:
    episodes = WorkerEpisodes(Echo, {})
    episodes.answered(begin())
    calls = [{"id": "1", "name": "f", "arguments": arguments}]
    (message,) = episodes.answered(reply(calls=calls))["messages"]
    assert message["content"].startswith(heard)


def test_what_a_method_returns_wrongly_is_told_with_its_line() -> None:
    class Wrong(Environment):
        def begin(self, task: Task) -> Begun:
            return Reply("no")  # type: ignore[return-value]

    line = inspect.getsourcelines(Wrong.begin)[1]
    with pytest.raises(Exception, match=rf"{__file__}:{line} in begin: returned Reply.* expected a Begun"):
        WorkerEpisodes(Wrong, {}).answered(begin())


DEEP = '{"a":' * 33 + "1" + "}" * 33


def calls(*given: Any) -> Reply:
    return Reply([{"role": "assistant", "tool_calls": list(given)}])


CALLS = [{"id": "i" * 200, "name": "\U0001f600" * 200, "arguments": "{}"}] * 999


class Says(Environment):
    """Says what a test wants, as a reply to a turn or to a stop."""

    def __init__(self, *, what: Reply) -> None:
        self._what = what

    def begin(self, task: Task) -> Begun:
        return Begun("begin")

    def reply(self, turn: Turn) -> Reply:
        return self._what

    def stop(self, ending: str) -> Reply:
        return self._what


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (Reply("on", rewards={"a": 1.0, "b": 0.0}), "gives rewards and is not done: a, b would be lost"),
        (Reply("on", metrics={"a": 1.0}), "gives metrics and is not done: a would be lost"),
        (Reply(done=True, rewards={"turns": 1.0}), "names a reward turns, which is the sum of the rewards"),
        (Reply("on", state=3), "returned 3 as state, expected text"),  # type: ignore[arg-type]
        (Reply([{"role": "assistant", "tool_calls": CALLS}]), "says 2,6.* bytes as JSON, of 983,040 at most"),
        (Reply("\U0001f600" * 90_000), "says 1,080,.* bytes as JSON"),
        (Reply(done=True, rewards={"a": 1e39}), "returned 1e.39 as rewards a, expected a finite number"),
        (Reply("on", reward=-1e300), "returned -1e.300 as reward, expected a finite number of at most 1e.38"),
        (Reply(done=True, metrics={"a\nb": 1.0}), "named something 'a.*b', expected one line of at most 200"),
        (calls({"name": ""}), "returned a call without a name: {'name': ''}"),
        (calls("f"), "returned a call without a name: 'f'"),
        (calls(*[{"name": "f"}] * 1_001), "returned a message with 1,001 calls, of 1,000 at most"),
        (
            calls({"name": "f", "arguments": '{"a": 1e999}'}),
            "returned a call whose arguments hold what JSON does not have",
        ),
        (
            calls({"name": "f", "arguments": {"a": float("nan")}}),
            "returned a call whose arguments hold what JSON does not have",
        ),
        (calls({"name": "f", "arguments": "[1]"}), "returned a call whose arguments are no JSON object"),
        (calls({"name": "f", "arguments": DEEP}), "returned a call whose arguments have more than 32 levels"),
    ],
    ids=[
        *("rewards", "metrics", "turns", "state", "names of calls", "text beyond 16 bits"),
        "reward beyond float32",
        *(
            "reward of a turn beyond float32",
            "metric of two lines",
            "call without a name",
            "no call",
            "many calls",
        ),
        *("endless number", "no number", "list", "deep"),
    ],
)
def test_a_reply_that_would_lose_something_is_refused(what: Reply, why: str) -> None:
    episodes = WorkerEpisodes(Says, {"what": what})
    episodes.answered(begin())
    with pytest.raises(Refusal, match=f"{__file__}:\\d+ in reply: {why}"):
        episodes.answered(reply())


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ({"description": "f"}, "returned a tool without a name"),
        ({"name": 1}, "returned a tool without a name"),
        (
            {"name": "f", "parameters": {"maximum": float("inf")}},
            "a tool 'f' whose parts hold what JSON does not",
        ),
        (
            {"name": "f", "parameters": {"default": {1, 2}}},
            "a tool 'f' whose parts hold what JSON does not have",
        ),
    ],
)
def test_a_tool_that_cannot_be_sent_is_refused(tool: dict[str, Any], why: str) -> None:
    class Tools(Environment):
        def begin(self, task: Task) -> Begun:
            return Begun("begin", [tool])

    with pytest.raises(
        Refusal, match=f"{__file__}:\\d+ in begin: returned .*{why.removeprefix('returned ')}"
    ):
        WorkerEpisodes(Tools, {}).answered(begin())


@pytest.mark.parametrize("name", ["خانه\u200cها", "\U0001f469\u200d\U0001f680", "a\u00a0b"])
def test_names_in_every_script_are_taken(name: str) -> None:
    said = _said(Reply(done=True, rewards={name: 1.0}, metrics={name: 2.0}))
    assert said["rewards"] == {name: 1.0} and said["metrics"] == {name: 2.0}


def test_the_longest_reply_fits_into_the_answer_of_a_worker() -> None:
    empty = len(json.dumps(_said(Reply("x")))) - 1
    said = _said(Reply("x" * (MOST_BYTES - empty)))
    assert len(encode(b"s" * SECRET_BYTES, {"value": said})) <= MOST_ANSWER_BYTES
    with pytest.raises(Refusal, match="says 983,041 bytes"):
        _said(Reply("x" * (MOST_BYTES - empty + 1)))


def _said(what: Reply) -> dict[str, Any]:
    episodes = WorkerEpisodes(Says, {"what": what})
    episodes.answered(begin())
    return episodes.answered(reply())


def test_the_state_of_the_next_turn_is_told_and_an_end_has_none() -> None:
    assert _said(Reply("x", state="at 3"))["state"] == "at 3" and _said(Reply("x"))["state"] == ""
    assert _said(Reply(done=True, state="at 3"))["state"] == ""


def test_a_stop_has_no_reward_of_a_turn() -> None:
    episodes = WorkerEpisodes(Says, {"what": Reply(done=True, reward=1.0)})
    episodes.answered(begin())
    with pytest.raises(Refusal, match="in stop: gives the reward of a turn, and a stop is none"):
        episodes.answered({"do": "stop", "episode": 0, "ending": "max_turns"})


def test_a_plan_says_why_an_environment_does_not_load() -> None:
    assert problem("frozen_lake", {"size": 5}) == ""
    assert "unexpected keyword argument 'siz'" in problem("frozen_lake", {"siz": 5})
    assert "did you mean frozen_lake" in problem("frozen_lak", {})


def test_parameters_are_listed_with_their_defaults() -> None:
    listed = {info.name: info for info in list_environments()}
    assert listed["search"].parameters["corpus"] is None and listed["search"].parameters["hits"] == 3
    assert listed["frozen_lake"].description.startswith("A walk over a frozen lake")


def test_all_the_time_in_which_turns_are_played_again_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = Waits()
    with waits.once_more():
        for _ in range(3):
            waits.begin()
            now += 1.0
            waits.end()
            now += 2.0
    now += 4.0
    assert waits.total_s == 9.0
