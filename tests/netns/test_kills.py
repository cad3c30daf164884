"""All processes of a host are killed, at random, ten times: the run ends by itself, and loses nothing."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from netns.network import Network, network, why_not

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.runs import small_run
from flotilla_testing.stack import wait_until

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(why := why_not()), reason=why or "network namespaces"),
]

logger = logging.getLogger(__name__)
KILLS = 10
SIMULATED = (
    "weights.canary.prompts=0",
    "algorithm.correction.warn_at=null",
    "algorithm.correction.fail_at=null",
)
WAIT_S = 600.0


def steps(made: Network, run: dict[str, str]) -> int:
    """Return how many lines of metrics the run has; they grow also when steps are made again."""
    return len(made.stack.metrics(run))


def state(made: Network, run: dict[str, str]) -> str:
    """Return the state of the run; empty while no coordinator answers."""
    shown = made.hosts["one"].flotilla("run", "show", run["run_id"], "--json")
    return str(shown.json["state"]) if shown.code == 0 else ""


def told_its_end(made: Network, run: dict[str, str]) -> bool:
    """Tell the run its last step; it goes on meanwhile, and refuses one that is behind it."""
    last = max(int(line["step"]) for line in made.stack.metrics(run)) + 5
    return made.hosts["one"].flotilla("run", "set", run["run_id"], f"steps={last}").code == 0


def test_ten_kills_of_whole_hosts_cost_nothing(arithmetic: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    choice = random.Random(seed)
    # Each host at least once, and the coordinator's as often as chance says.
    victims = [*("one", "two", "three"), *choice.choices(("one", "two", "three"), k=KILLS - 3)]
    choice.shuffle(victims)
    logger.warning(f"seed {seed}: {victims}")
    with network(tmp_path, arithmetic) as made:
        one = made.hosts["one"]
        file = small_run(one.home / "arithmetic", one.home / "run.yaml", steps=10_000)
        started = one.flotilla("run", "start", str(file), *SIMULATED, "checkpoint.every_steps=1", "--json")
        assert started.code == 0, started.err
        run = started.json
        for number, victim in enumerate(victims):
            before = steps(made, run)
            wait_until(
                f"two more steps before kill {number} ({victims}, seed {seed})",
                lambda before=before: steps(made, run) >= before + 2,  # type: ignore[misc]
                WAIT_S,
                every_s=0.2,
            )
            killed = made.hosts[victim].kill()
            logger.warning(
                f"kill {number}: {victim}, {killed} processes, after {steps(made, run)} lines of metrics"
            )
        before = steps(made, run)
        wait_until(
            "two steps after the last kill", lambda: steps(made, run) >= before + 2, WAIT_S, every_s=0.2
        )
        wait_until("an answer of the coordinator", lambda: state(made, run) == "running", WAIT_S, every_s=1)
        wait_until("a last step that is still ahead", lambda: told_its_end(made, run), WAIT_S, every_s=1)
        wait_until("the end of the run", lambda: state(made, run) not in ("", "running"), WAIT_S, every_s=1)
        assert state(made, run) == "succeeded", one.log("launcher").read_text()[-4000:]
        verdict = check(made.stack.directory / "ledger.sqlite", run["run_id"])
        assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)
        logger.warning(str(verdict))
