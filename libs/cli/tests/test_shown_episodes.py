"""An episode is shown as a conversation, and nothing in it can command the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_cli.samples import print_episode

CALL = {
    "id": "000001000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": "\x1b[2J"}},
}


def shown(capsys: pytest.CaptureFixture[str], *messages: dict[str, Any], **episode: Any) -> list[str]:
    given = {"ending": "completed", "turns": 1, "turn_rewards": [], "branches": 1, "messages": messages}
    print_episode(given | episode)
    return capsys.readouterr().out.splitlines()


def test_turns_say_who_wrote_them_and_what_they_earned(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(
        capsys,
        {"tools": ["old", {"type": "function", "function": {"name": "add"}}]},
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL],
            "turn": 1,
            "tokens": 9,
            "versions": ["0.3"],
            "state": "3f2a91c0",
        },
        {"role": "tool", "content": "3"},
        {
            "role": "assistant",
            "content": "<tool_call>{",
            "turn": 2,
            "tokens": 4,
            "versions": ["0.3", "0.4"],
            "cut_off": True,
            "unparsed": "a call is not ended",
        },
        {"ended": "max_turns", "rewards": {"solved": 1.0}},
        turns=2,
        turn_rewards=[0.5, -1.0],
    )
    assert lines == [
        "ended  completed after 2 turns",
        "--- tools: old, add",
        "--- user",
        "1 + 2?",
        "--- assistant (turn 1, 9 tokens, 0.3, state 3f2a91c0, reward 0.5)",
        'call add {"a": 1, "b": "\\u001b[2J"}',
        "--- tool",
        "3",
        "--- assistant (turn 2, 4 tokens, 0.3, 0.4, cut off, reward -1)",
        "<tool_call>{",
        "unread a call is not ended",
        "--- ended max_turns",
        "rewards solved 1",
    ]


def test_rewritten_histories_threads_and_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(
        capsys,
        {"branch": "history", "kept": 2, "thread": "searcher"},
        {"role": "user", "content": "In short.", "thread": "searcher"},
        {"resumed": 2},
        {"ended": "error", "failure": "/env.py:3: division by zero"},
        branches=2,
    )
    assert lines == [
        "ended  completed after 1 turns, trained as 2 sequences",
        "--- the history of searcher goes on otherwise (history); 2 messages stay",
        "--- user of searcher",
        "In short.",
        "--- a service was lost: the 2 turns so far were played again",
        "--- ended error: /env.py:3: division by zero",
    ]


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x9b31m", "\u202egnp", "\r--- user"])
def test_nothing_that_was_said_commands_the_terminal(
    capsys: pytest.CaptureFixture[str], hostile: str
) -> None:
    messages = [
        {"role": f"user{hostile}", "content": hostile},
        {"role": "assistant", "content": hostile, "thread": hostile, "unparsed": hostile},
        {"tools": [{"type": "function", "function": {"name": hostile}}]},
        {"ended": "error", "failure": hostile, "rewards": {hostile: 1.0}},
    ]
    print_episode({"ending": hostile, "turns": 1, "turn_rewards": [], "branches": 1, "messages": messages})
    printed = capsys.readouterr().out
    assert not any(sign in printed for sign in "\x1b\x9b\u202e\r")
