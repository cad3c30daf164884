"""All processes of a host are killed, at random, ten times: the run ends by itself, and loses nothing.

The generator is the real engine. Its canary compares every version that it takes with the trainer, to the end.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from accounts import assert_accounted_for
from netns.network import HOSTS, Network, network, why_not

from flotilla_testing.runs import REWARD, live_checks, small_run
from flotilla_testing.stack import BOOTED_WITHIN_S, wait_until

KILLS = 10
STEPS_WITHIN_S = BOOTED_WITHIN_S + 300.0
"""A host that was killed boots, the trainer goes back to its checkpoint, and the run makes two steps."""
ANSWERS_WITHIN_S = 300.0
ENDS_WITHIN_S = 600.0
ALL_WITHIN_S = 3600.0
"""Ten kills beside other suites; an idle machine needs four minutes."""

pytestmark = [
    pytest.mark.timeout(ALL_WITHIN_S),
    pytest.mark.skipif(bool(why := why_not()), reason=why or "network namespaces"),
]


class Observed:
    """A run on the hosts, seen from its files and from the coordinator's host."""

    def __init__(self, made: Network, run: dict[str, str]) -> None:
        self.made = made
        self.run = run

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Its lines, which grow also when steps are made again."""
        return self.made.stack.metrics(self.run)

    def makes_two_steps(self, what: str) -> float:
        """Wait for two more steps; the seconds that they took."""
        began, done = time.monotonic(), len(self.metrics)
        wait(f"two more steps {what}", lambda: len(self.metrics) >= done + 2, STEPS_WITHIN_S)
        return time.monotonic() - began

    @property
    def state(self) -> str:
        """Empty while no coordinator answers."""
        shown = self.made.hosts["one"].flotilla("run", "show", self.run["run_id"], "--json")
        return str(shown.json["state"]) if shown.code == 0 else ""

    def told_its_end(self) -> bool:
        """Tell the run its last step; it goes on meanwhile, and refuses one that is behind it."""
        last = max(int(line["step"]) for line in self.metrics) + 5
        told = self.made.hosts["one"].flotilla("run", "set", self.run["run_id"], f"steps={last}")
        return told.code == 0


def wait(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll at the pace of commands."""
    wait_until(what, condition, timeout_s, every_s=0.5)


def started(made: Network) -> Observed:
    """Start a run whose rewards differ, so that each step makes other weights."""
    one = made.hosts["one"]
    reward = one.home / "reward.py"
    reward.write_text(REWARD)
    file = small_run(one.home / "arithmetic", one.home / "run.yaml", steps=10_000, reward=f"{reward}:reward")
    outcome = one.flotilla("run", "start", str(file), "checkpoint.every_steps=1", "--json")
    assert outcome.code == 0, outcome.err
    return Observed(made, outcome.json)


def test_ten_kills_of_whole_hosts_cost_nothing(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    choice = random.Random(seed)
    # Each host at least once, and the coordinator's as often as chance says.
    victims = [*HOSTS, *choice.choices([*HOSTS], k=KILLS - len(HOSTS))]
    choice.shuffle(victims)
    began = time.monotonic()
    with network(tmp_path, arithmetic) as made:
        run = started(made)
        first_s = run.makes_two_steps("before the first kill")
        tell(capsys, f"seed {seed}: two steps after {first_s:.0f} s")
        for number, victim in enumerate(victims, 1):
            struck = len(run.metrics)
            killed = made.hosts[victim].kill()
            back_s = run.makes_two_steps(f"after kill {number} of {victims}, seed {seed}")
            tell(
                capsys,
                f"kill {number:2} {victim:6}{killed:3} processes, two more steps after {back_s:4.0f} s",
            )
        wait("an answer of the coordinator", lambda: run.state == "running", ANSWERS_WITHIN_S)
        wait("a last step that is still ahead", run.told_its_end, ANSWERS_WITHIN_S)
        wait("the end of the run", lambda: run.state not in ("", "running"), ENDS_WITHIN_S)
        assert run.state == "succeeded", made.hosts["one"].log("launcher").read_text()[-4000:]
        verdict = assert_accounted_for(made.stack, run.run["run_id"])
        found = live_checks(run.metrics[struck + 1 :])
        assert len(found) > 1, "each version is compared, also after the last kill"
    tell(capsys, f"canary after the last kill: {len(found)} checks, differences up to {max(found):.1e}")
    tell(capsys, f"{time.monotonic() - began:.0f} s in all: {verdict}")


def tell(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {line}")
