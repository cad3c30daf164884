"""Shows an episode as a conversation: who said what, what a turn earned, and where its history was rewritten.

Invariant: all text is printed by `print_line`, which shows what a terminal would obey.
"""

from __future__ import annotations

from typing import Any

from flotilla_cli.output import print_line
from flotilla_core.terminal import visible_json


def print_episode(episode: dict[str, Any]) -> None:
    """Print one episode."""
    sequences = f", trained as {episode['branches']} sequences" if episode["branches"] > 1 else ""
    print_line(f"ended  {episode['ending']} after {episode['turns']} turns{sequences}")
    for entry in episode["messages"]:
        print_line("\n".join(_lines(entry, episode["turn_rewards"])))


def _lines(entry: dict[str, Any], turn_rewards: list[float]) -> list[str]:
    """Return one entry of the record: a message, or what happened between messages."""
    of = f" of {entry['thread']}" if entry.get("thread") else ""
    if "branch" in entry:
        return [f"--- the history{of} goes on otherwise ({entry['branch']}); {entry['kept']} messages stay"]
    if "tools" in entry:
        return [f"--- tools{of}: {', '.join(entry['tools'])}"]
    if "ended" in entry:
        rewards = ", ".join(f"{name} {value:.4g}" for name, value in entry.get("rewards", {}).items())
        failure = f": {entry['failure']}" if entry.get("failure") else ""
        return [f"--- ended {entry['ended']}{failure}", *([f"rewards {rewards}"] if rewards else [])]
    lines = [f"--- {entry['role']}{of}{_of_turn(entry, turn_rewards)}"]
    if entry.get("content"):
        lines.append(entry["content"])
    for call in entry.get("tool_calls", ()):
        lines.append(f"call {call['function']['name']} {visible_json(call['function']['arguments'])}")
    if entry.get("unparsed"):
        lines.append(f"unread {entry['unparsed']}")
    return lines


def _of_turn(entry: dict[str, Any], turn_rewards: list[float]) -> str:
    """Return the facts of a turn of the policy; nothing for what others said."""
    if "turn" not in entry:
        return ""
    facts = [f"turn {entry['turn']}", f"{entry['tokens']} tokens", *entry["versions"]]
    if entry.get("cut_off"):
        facts.append("cut off")
    if len(turn_rewards) >= entry["turn"]:
        facts.append(f"reward {turn_rewards[entry['turn'] - 1]:.4g}")
    return f" ({', '.join(facts)})"
