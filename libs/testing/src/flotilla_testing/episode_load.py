"""A fleet with thousands of episodes in flight, as in production but for the two models.

Generators simulate the time that decoding takes; the trainer accepts. Everything else is real and on: environments over
gRPC, the chat template, a tokenizer, spans, weight syncs and the durable ledger.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.fleet_load import LOOP_S, WARM_UP_LIMIT_S, crowds, loop_s
from flotilla_testing.runs import endless_run
from flotilla_testing.stack import Stack, StackProcesses, light_stack, wait_until

LOOK_EVERY_S = 1.0
MOST_TOKENS = 1024
"""Of an episode: those of the model; four turns of 64 tokens have room."""
TURNS = 4
ENVIRONMENT = f"""
import os
import time
from pathlib import Path

from flotilla_environment import Begun, Environment, Reply


class FourTurns(Environment):
    def __init__(self, folder, token_s):
        self.token_s = token_s
        self.file = Path(folder) / f"turns-{{os.getpid()}}.txt"
        self.took = []

    def begin(self, task):
        self.asked_at = time.monotonic()
        return Begun(task.messages)

    def reply(self, turn):
        now = time.monotonic()
        self.took.append((now - self.asked_at, (turn.tokens - 1) * self.token_s))
        self.asked_at = now
        if len(self.took) < {TURNS}:
            return Reply(f"That is answer {{len(self.took)}} of {TURNS}; go on with the next one.")
        with self.file.open("a") as file:
            file.write("".join(f"{{now:.6f}} {{took:.6f}} {{decoded:.6f}}\\n" for took, decoded in self.took))
        return Reply(done=True, rewards={{"length": float(len(turn.content) % 7)}})
"""
"""Says a short text after each turn; at the end of an episode the file of its worker gets how long each turn took, and
how long of it the generator decoded."""


@dataclass(frozen=True)
class EpisodeLoad:
    """The load that a fleet has to carry."""

    replicas: int = 8
    """Generators."""
    processes: int = 2
    """Processes that they share."""
    episodes: int = 4096
    """Episodes that the run admits at once, by its staleness."""
    episodes_per_step: int = 512
    samples: int = 8
    """Samples of a group."""
    turn_tokens: int = 64
    """Of a turn, on average."""
    shortest_turn: int = 64
    """Turns are drawn from here up to as much above the average. Equal ones that begin together end together."""
    token_s: float = 3 / 64
    """The time that a token takes to decode: no fleet writes more than `episodes` turns in the time of a turn."""
    update_s: float = 0.5
    """The time that an update takes, and a snapshot."""
    warm_up_steps: int = 16
    """The steps until what was admitted together at the start is gone: twice as many as are admitted at once."""
    seconds: float = 60.0
    """The time that is measured."""

    @property
    def sim(self) -> dict[str, float]:
        """The settings of the stack's simulated engine."""
        return {"seconds_per_token": self.token_s}

    @property
    def longest_turn(self) -> int:
        return 2 * self.turn_tokens - self.shortest_turn

    @property
    def section(self) -> dict[str, Any]:
        """The section of the stack about environments."""
        return {"replicas": 1, "workers": 1, "isolation": {"unsafe": True}}

    def run_file(self, stack: Stack) -> Path:
        """Write the file of a run that asks for this load."""
        file = stack.directory / "four_turns.py"
        file.write_text(ENVIRONMENT)
        environment = {
            "name": f"{file}:FourTurns",
            "parameters": {"folder": str(stack.directory), "token_s": self.token_s},
            "max_turns": TURNS,
            "episode_tokens": MOST_TOKENS,
            "trusted": True,
        }
        return self.endless(stack, environment)

    def endless(self, stack: Stack, environment: dict[str, Any]) -> Path:
        """Write the file of a run with this environment."""
        return endless_run(
            stack,
            prompts=self.episodes_per_step // self.samples,
            samples=self.samples,
            max_staleness=self.episodes // self.episodes_per_step - 1,
            longest_response=self.longest_turn,
            shortest_response=self.shortest_turn,
            environment=environment,
            rewards=[],
        )


@dataclass(frozen=True)
class EpisodeFigures:
    """The measured cost, from the end of the warm-up on."""

    rate: float
    """Turns a second."""
    playing: float
    """Episodes in flight on average: the turns a second times the time of a turn, of episodes that ended."""
    coordinator_mib: float
    """The most memory that the coordinator held."""
    environment_mib: float
    """The most memory that the environment service held, with its workers or agents."""
    cpu_seconds: dict[str, float]
    """CPU seconds for 1,000 turns, by kind of process."""
    beside_decoding_p50_s: float
    beside_decoding_p99_s: float
    """The time from the reply of an environment to the next turn that it gets, without the time of decoding: work and
    waits of the coordinator, and of the wire, the generator and the environment service as well."""
    coordinator_p50_s: float
    coordinator_p99_s: float
    coordinator_worst_p99_s: float
    """The time of a turn that neither the environment nor the generator had. Medians over the steps of their medians
    and of their 99th percentiles, and the largest of the latter."""
    lag_p99_s: float
    """The delay of a turn of the coordinator's event loop: the median over the steps of their 99th percentiles."""
    again: int
    """Episodes that began again, and turns that were generated again."""
    branches: int
    """Histories that did not go on from what was sampled: none here."""
    slower: float
    """How many times `LOOP_S` a fixed loop took meanwhile: more than once where two busy processors are one core."""


def measure(load: EpisodeLoad, directory: Path) -> EpisodeFigures:
    """Boot such a fleet in `directory`, let a run use it, and take it down."""
    model = make_chat_model(directory / "model")
    generator: dict[str, Any] = {"sim": load.sim, "max_running_samples": load.episodes, "replicas": 0}
    fleet = light_stack(model, directory, trainer_s=load.update_s, environment=load.section, **generator)
    with fleet as stack, crowds(stack, load.replicas, load.processes):
        run = stack.ok("run", "start", str(load.run_file(stack)))
        wait_until("the warm-up steps", lambda: len(stack.metrics(run)) > load.warm_up_steps, WARM_UP_LIMIT_S)
        figures = _measured(stack, run, load)
        stack.ok("run", "stop", run["run_id"])
    return figures


def _measured(stack: Stack, run: dict[str, Any], load: EpisodeLoad) -> EpisodeFigures:
    processes = StackProcesses(stack.directory)
    first = len(stack.metrics(run))
    began, before, turns_before = time.monotonic(), processes.cpu_seconds(), len(_turns(stack))
    resident, of_environment, loops_s = [], [], []
    while time.monotonic() < began + load.seconds:
        resident.append(processes.resident_mib("coordinator"))
        of_environment.append(processes.resident_mib("environment"))
        loops_s.append(loop_s())
        time.sleep(LOOK_EVERY_S)
    after, ended = processes.cpu_seconds(), time.monotonic()
    turns = _turns(stack)[turns_before:]
    steps = stack.metrics(run)[first:]
    # Steps may follow each other faster than episodes end.
    with_turns = [step for step in steps if "turns/coordinator_s_p99" in step]
    assert turns and with_turns, f"no step ended within {load.seconds:g} s: measure for longer"
    beside = sorted(took - decoded for took, decoded in turns)
    rate = len(turns) / (ended - began)
    return EpisodeFigures(
        rate=rate,
        # Little's law. An episode that waits to begin is not counted.
        playing=rate * statistics.mean(took for took, _ in turns),
        coordinator_mib=max(resident),
        environment_mib=max(of_environment),
        cpu_seconds={kind: 1000 * (after[kind] - before[kind]) / len(turns) for kind in after},
        beside_decoding_p50_s=beside[len(beside) // 2],
        beside_decoding_p99_s=beside[len(beside) * 99 // 100],
        coordinator_p50_s=statistics.median(step["turns/coordinator_s_p50"] for step in with_turns),
        coordinator_p99_s=statistics.median(step["turns/coordinator_s_p99"] for step in with_turns),
        coordinator_worst_p99_s=max(step["turns/coordinator_s_p99"] for step in with_turns),
        lag_p99_s=statistics.median(step["coordinator/loop_lag_p99_s"] for step in steps),
        again=int(sum(step["samples/retried"] + step.get("episodes/repeated", 0) for step in steps)),
        branches=int(sum(sum(n for key, n in step.items() if "branches_" in key) for step in steps)),
        slower=statistics.median(loops_s) / LOOP_S,
    )


def _turns(stack: Stack) -> list[tuple[float, float]]:
    """Return how long each turn of an episode that ended took, and was decoded, in the order of these ends."""
    lines = (
        tuple(map(float, line.split()))
        for path in stack.directory.glob("turns-*.txt")
        for line in path.read_text().splitlines()
    )
    return [(took, decoded) for _, took, decoded in sorted(lines)]
