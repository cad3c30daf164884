"""Run suites one after the other and write what ran where: suite, commit, seconds, result, what skipped and why.

A suite is a target of the Makefile. What pytest says in its last lines is counted, so a target may run it
several times. With --skips a test that skips for a reason which that file lacks makes its suite fail.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"test-py312": ("python3.12", "--version")}
"""Commands that must run, or the suite is not started."""
LAST_LINE = re.compile(r"=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s(?: \([\d:]+\))?\s*=*")
SKIPPED = re.compile(r"SKIPPED \[(\d+)\] (\S+?)(?::\d+)?: (.+)")
WORDS = {"error": "errors", "warning": "warnings"}


@dataclass
class Outcome:
    """One suite: what ran, and what did not."""

    suite: str
    started: datetime
    seconds: float = 0.0
    code: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Of tests, by pytest's words."""
    skips: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of tests, by file and reason."""
    not_run: str = ""
    """Why the suite was not started."""
    unlisted: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.code and not self.unlisted

    @property
    def result(self) -> str:
        if self.not_run:
            return "not run"
        counted = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        verdict = "passed" if not self.code else f"**failed** (exit {self.code})"
        if not self.code and self.unlisted:
            verdict = "**failed** (a skip that is not listed)"
        return f"{verdict}: {counted}" if counted else verdict

    @property
    def left_out(self) -> str:
        if self.not_run:
            return self.not_run
        return "; ".join(
            f"{count} of {file}: {reason}" for (file, reason), count in sorted(self.skips.items())
        )


def read(lines: Iterable[str], outcome: Outcome) -> None:
    """Pass the lines of a suite on, and count what pytest says in them."""
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()
        text = line.strip()
        if skipped := SKIPPED.fullmatch(text):
            outcome.skips[skipped[2], skipped[3]] += int(skipped[1])
        elif last := LAST_LINE.fullmatch(text):
            for part in last[1].split(", "):
                count, word = part.split()
                outcome.counts[WORDS.get(word, word)] += int(count)


def lacking(suite: str) -> str:
    """Return why this machine cannot start a suite; empty where it can."""
    command = NEEDS.get(suite)
    if command is None:
        return ""
    found = shutil.which(command[0])
    if found and subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return ""
    return f"{command[0]} does not run here"


def run(suite: str, folder: Path) -> Outcome:
    """Run one suite to its end."""
    outcome = Outcome(suite, datetime.now(UTC), not_run=lacking(suite))
    if outcome.not_run:
        return outcome
    print(f"==> make {suite}", flush=True)
    began = time.monotonic()
    command = ["make", "--no-print-directory", suite]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        read(process.stdout, outcome)
    outcome.seconds = time.monotonic() - began
    outcome.code = process.returncode
    return outcome


def unlisted(outcome: Outcome, listed: dict[str, str]) -> list[str]:
    """Return the skips whose reason begins like none of the listed ones."""
    return [
        f"{file}: {reason}"
        for file, reason in outcome.skips
        if not reason.startswith(tuple(listed) or ("\0",))
    ]


def said(command: list[str], folder: Path) -> str:
    """Return what a command prints; empty where it does not run."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine(folder: Path) -> str:
    """Say on what the suites ran, in a sentence."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    gpus = said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], folder).splitlines()
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return (
        f"{os.cpu_count()} cores, {memory} GiB, {', '.join(gpus) or 'no GPU'}; {system}, "
        f"Python {platform.python_version()}."
    )


def table(outcomes: list[Outcome], commit: str, where: str) -> str:
    """Return the page: a row a suite."""
    head = ("suite", "commit", "started (UTC)", "seconds", "result", "what skipped, and why")
    rows = [
        (
            f"`make {one.suite}`",
            commit,
            f"{one.started:%Y-%m-%d %H:%M}",
            f"{one.seconds:.0f}",
            one.result,
            one.left_out,
        )
        for one in outcomes
    ]
    lines = [" | ".join(cells) for cells in (head, ("---",) * len(head), *rows)]
    return "\n".join(["# What ran where", "", where, "", *(f"| {line} |" for line in lines), ""])


def total(outcomes: list[Outcome]) -> str:
    """Return the last line of all suites together, as pytest would say it."""
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts += one.counts
    seconds = sum(one.seconds for one in outcomes)
    return f"{', '.join(f'{count} {word}' for word, count in counts.items())} in {seconds:.2f}s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run suites one after the other, and write what ran where.")
    parser.add_argument("suites", nargs="+", metavar="TARGET", help="targets of the Makefile")
    parser.add_argument("--skips", type=Path, help="TOML file with the reasons for which a test may skip")
    parser.add_argument("--out", type=Path, default=Path("build/what-ran.md"))
    parser.add_argument("--directory", type=Path, default=ROOT, help="folder of the Makefile")
    arguments = parser.parse_args()
    folder = arguments.directory
    commit = said(["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"], folder)
    where = machine(folder)
    listed = tomllib.loads(arguments.skips.read_text("utf-8"))["skips"] if arguments.skips else None
    out = folder / arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for suite in arguments.suites:
        outcome = run(suite, folder)
        if listed is not None:
            outcome.unlisted = unlisted(outcome, listed)
        outcomes.append(outcome)
        # After each one: what was learned is not lost with the suite that follows.
        out.write_text(table(outcomes, commit, where), "utf-8")
    print(table(outcomes, commit, where))
    for one in outcomes:
        for skip in one.unlisted:
            print(f"{one.suite} skipped for a reason that {arguments.skips} does not list: {skip}")
    print(f"==> {out}")
    print(total(outcomes))
    return int(not all(one.passed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
