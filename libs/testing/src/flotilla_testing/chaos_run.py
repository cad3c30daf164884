"""A fleet in which anything may die, and a run on it that continues until it is told its last step.

Engines are simulated, or real with their canary. Trainer ranks, weight group, digests, rewards, ledger, launcher and
NATS are the real ones.
Invariants: what is seen of a run comes from its own files and from the calls that operators have; every wait is bounded
and named.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla_core.config import StackConfig, load
from flotilla_core.errors import FlotillaError
from flotilla_core.version import Version
from flotilla_testing.fault_victims import guardian_of, launcher_of, lives, nats_of
from flotilla_testing.runs import LEARNS, MADE_UP, any_reward, example_rows, run_on, written
from flotilla_testing.stack import BOOTED_WITHIN_S, Stack, running_stack, wait_until

TURNS = 3
HEARS, JUDGES = "hears-a-turn", "gives-a-reward"
"""Files that an environment makes in the folder of its run while it does this."""
ENVIRONMENT = f'''
import time
from pathlib import Path

from flotilla_environment import Begun, Environment, Reply, Task, Turn


class Sums(Environment):
    """Asks for three turns, and gives rewards by which all episodes differ."""

    def __init__(self, *, folder: str) -> None:
        self.folder, self.said = Path(folder), []

    def begin(self, task: Task) -> Begun:
        return Begun(task.messages)

    def reply(self, turn: Turn) -> Reply:
        self.said.append(turn.content)
        done = len(self.said) == {TURNS}
        mark = self.folder / ("{JUDGES}" if done else "{HEARS}")
        mark.touch()
        time.sleep(0.01)
        mark.unlink(missing_ok=True)
        if not done:
            return Reply("2+3=")
        return Reply(done=True, rewards={{"said": float(sum(map(ord, "".join(self.said))) % 7)}})
'''
LAST_STEPS = 3
LIMIT_S = 180.0


@dataclass(frozen=True)
class Engine:
    """Generators of one kind, and how long is waited for what they take part in."""

    generator: dict[str, Any]
    """The section `generator` of the stack; its generators take some time, so that each moment can be met."""
    serving: int
    """The number of them that serve the run when one is struck."""
    sample_timeout_s: float
    sync_timeout_s: float
    rank_timeout_s: float
    limit_s: float
    """The longest wait for anything."""
    issued_again_within_s: float
    """The longest time from the loss of a generator to the first sample that another one gave in its place."""


SIM = Engine(
    generator={"engine": "sim", "replicas": 3, "sim": {"seconds_per_token": 0.02, "commit_s": 0.1}},
    serving=2,
    # Limits are short, so that silence is noticed soon.
    sample_timeout_s=3.0,
    sync_timeout_s=4.0,
    rank_timeout_s=5.0,
    limit_s=LIMIT_S,
    issued_again_within_s=2.0,
)
# A sample that is held back for a second leaves the cores to the generator that boots beside it. What is only slow
# because of that boot must not be taken for silent.
VLLM = Engine(
    generator={
        "engine": "vllm",
        "replicas": 2,
        "max_model_tokens": 64,
        "slowed_by": {"time_to_first_token_s": 1.0},
    },
    serving=2,
    sample_timeout_s=20.0,
    sync_timeout_s=20.0,
    rank_timeout_s=60.0,
    limit_s=BOOTED_WITHIN_S,
    issued_again_within_s=10.0,
)
ENGINES = {"sim": SIM, "vllm": VLLM}


@contextlib.contextmanager
def chaos_fleet(model: Path, directory: Path, engine: Engine = SIM) -> Iterator[Stack]:
    """Generators of this kind, two replicas each of rewards and environments, a trainer of two ranks, and the rest."""
    description = {
        "name": "chaos",
        "model": str(model),
        "generator": engine.generator,
        "trainer": {"nproc": 2, "rank_timeout_s": engine.rank_timeout_s},
        "reward": {"replicas": 2, "workers": 1},
        "environment": {"replicas": 2, "workers": 1, "isolation": {"unsafe": True}},
        "ready_timeout_s": engine.limit_s,
        "restart_budget": 1000,
    }
    with running_stack(description, directory) as stack:
        yield stack


class ChaosRun:
    """One run under observation."""

    def __init__(self, stack: Stack, arithmetic: Path, folder: Path, *, episodes: bool = False) -> None:
        """Start it. With `episodes` its samples have several turns, and their environment marks what it does."""
        self.stack = stack
        self.folder = folder
        self.engine = ENGINES[load(StackConfig, [stack.file]).generator.engine]
        file = _run_file(arithmetic, folder, self.engine, episodes=episodes)
        self.started: dict[str, Any] = stack.ok("run", "start", str(file))
        self.run_id: str = self.started["run_id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """A run whose test failed leaves the fleet to the next one."""
        if not self._has_ended():
            self.stack.ok("run", "stop", self.run_id)
            self.wait_until("the end of a run that was stopped", self._has_ended)

    @property
    def lines(self) -> int:
        """Steps that have ended so far, also those that were undone."""
        return len(self.stack.metrics(self.started))

    @property
    def lineage(self) -> int:
        """The number of its fall-backs to a checkpoint."""
        return int(self.stack.metrics(self.started)[-1]["lineage"])

    def ask_ledger(self, question: str, *values: int) -> list[Any]:
        """Return the rows of a query whose first parameter is the run's id."""
        file = self.stack.directory / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as ledger:
            return ledger.execute(question, (self.run_id, *values)).fetchall()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for as long as anything on this fleet is waited for."""
        wait_until(what, condition, self.engine.limit_s)

    def wait_for_steps(self, count: int, since: int, what: str) -> None:
        """Wait until `count` more steps have ended than `since`."""
        self.wait_until(f"{count} more steps {what}", lambda: self.lines >= since + count)

    def ends_by_itself(self) -> run_pb2.Run:
        """Tell it which step is its last one, and wait for its end."""
        with self.stack.client() as client:
            step = client.get_run(self.run_id).step
            client.set_run(self.run_id, [f"steps={step + LAST_STEPS}"])
        self.wait_until("the end of the run", self._has_ended)
        return self.now()

    def now(self) -> run_pb2.Run:
        """Return the run as its coordinator sees it."""
        with self.stack.client() as client:
            return client.get_run(self.run_id)

    def _has_ended(self) -> bool:
        return self.now().state != run_pb2.RUN_STATE_RUNNING

    def serving(self) -> list[str]:
        """Generators that serve the run, by name; those with the same version hold the same weights."""
        try:
            with self.stack.client() as client:
                held = client.show_weights().generators
        except FlotillaError:
            return []  # the coordinator is on its way back
        digests: dict[Version, str] = {}
        for one in held:
            version = Version.from_proto(one.version)
            known = digests.setdefault(version, one.digest)
            assert known == one.digest, f"{one.name} holds {one.digest} as {version}, others hold {known}"
        return [one.name for one in held]

    def when_whole(self) -> list[str]:
        """Wait until the fleet can lose one of anything; return the generators that serve then.

        The run also goes on while NATS, the launcher or the guardian is still being started again.
        """
        serving: list[str] = []

        def is_whole() -> bool:
            pairs = all(len(self.working(kind)) == 2 for kind in ("reward", "environment"))
            serving[:] = self.serving()
            keepers = all(find(self.stack) is not None for find in (nats_of, launcher_of, guardian_of))
            return pairs and keepers and len(serving) >= self.engine.serving

        self.wait_until("a fleet that can lose one", is_whole)
        return serving

    def working(self, kind: str) -> list[str]:
        """Replicas of a kind that may get work and live, by name."""
        try:
            with self.stack.client() as client:
                services = client.list_services()
        except FlotillaError:
            return []
        ready = [one.registration for one in services if one.work_state == pb.WORK_STATE_READY]
        return [one.name for one in ready if one.name.startswith(f"{kind}-") and lives(self.stack, one)]


def _run_file(arithmetic: Path, folder: Path, engine: Engine, *, episodes: bool) -> Path:
    run = run_on(
        example_rows(arithmetic),
        "chaos",
        100_000,
        (4, 4, 8),
        rollout={"max_staleness": 1, "sample_timeout_s": engine.sample_timeout_s},
        rewards=any_reward(folder),
        optimizer=LEARNS,
        weights={"timeout_s": engine.sync_timeout_s},
        checkpoint={"every_steps": 1},
        export_final=False,
    )
    if episodes:
        file = folder / "sums.py"
        file.write_text(ENVIRONMENT)
        run["environment"] = {
            "name": f"{file}:Sums",
            "parameters": {"folder": str(folder)},
            "max_turns": TURNS + 1,
            "episode_tokens": 60,
        }
        # The tokens of trained samples go with the last checkpoint from before them, and tests look at them.
        run["checkpoint"]["keep"] = 8
        del run["rewards"]
    if engine is SIM:
        run["algorithm"] = MADE_UP
        run["weights"]["canary"] = {"prompts": 0}
    return written(folder, run)
