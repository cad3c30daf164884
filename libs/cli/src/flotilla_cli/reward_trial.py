"""Scores responses without a fleet, by the reward service's own code in a process that ends with the command.

Invariant: no code of a user runs in this process. What asks a judge of the fleet is scored by a replica of the fleet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from select import select
from subprocess import Popen

from pydantic import TypeAdapter

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_cli.judge_trial import asks_fleet, scored_by_fleet
from flotilla_cli.options import wait
from flotilla_cli.output import say
from flotilla_core.config import JudgeConfig, RewardTermConfig, RunConfig, StackConfig, load, load_text
from flotilla_core.config.rewards import judge_of
from flotilla_core.errors import FailedPrecondition, Internal, InvalidRequest
from flotilla_core.log_files import LONGEST_LINE_BYTES, line_text
from flotilla_core.rpc.status import from_status
from flotilla_launch.environment import resolved

TRIAL = "flotilla_reward.trial"
REFUSED = 3
"""The exit code of a trial that printed the status of an error."""
SHOWN_BYTES = 2 << 10
"""The bytes that are shown of what rewards print."""
BLOCK_BYTES = 1 << 16
LOOK_S = 0.1


def is_installed() -> bool:
    return importlib.util.find_spec(TRIAL.partition(".")[0]) is not None


def rewards_and_data(arguments: list[str], data: Path | None) -> RunConfig:
    """Return the run of the files with the rewards that are named, or one of these rewards and the data alone."""
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    others = [text for text in arguments if text not in overrides]
    files = [text for text in others if text.endswith((".yaml", ".yml")) or os.path.isfile(text)]
    names = [text for text in others if text not in files]
    if data is not None:
        overrides = [f"data.train={json.dumps(str(data))}", *overrides]
    if not files and data is None:
        raise InvalidRequest(
            "there are no rows to score",
            where=" ".join(arguments),
            next_step="name a run file, or a data file by --data FILE",
        )
    if not files:
        terms = [{"reward": name} for name in names]
        text = json.dumps({"name": "trial", "steps": 1, "data": {"train": str(data)}, "rewards": terms})
        return load_text(RunConfig, text, source="command line", overrides=overrides, resolve_paths=True)
    config = load(RunConfig, files, overrides, resolve_paths=True)
    if names:
        config = config.model_copy(update={"rewards": tuple(_term_of(config, name) for name in names)})
    scored = tuple(term for term in config.rewards if term.model is None)
    if models := [term.shown for term in config.rewards if term.model is not None]:
        say(f"{', '.join(models)}: left out, because a reward model is asked by runs alone")
    if not scored:
        raise InvalidRequest(
            "the run names no rewards", where=", ".join(files), next_step="name one: path.py:function"
        )
    return config.model_copy(update={"rewards": scored})


def _term_of(config: RunConfig, name: str) -> RewardTermConfig:
    """Return the term of the run with this reward or name; a reward that the run does not have is taken as it is."""
    known = {str(term.reward): term for term in config.rewards if term.model is None}
    known |= {term.shown: term for term in config.rewards}
    if judge_of(name) and name not in known:
        raise InvalidRequest("a judge needs a rubric", where=name, next_step="name a run file with its term")
    asked = known.get(name) or RewardTermConfig(reward=name).with_paths_from(Path.cwd())
    return known.get(str(asked.reward), asked)


def outcomes_of(
    terms: tuple[RewardTermConfig, ...], items: list[pb.ScoreItem], steps: int | None, stack: StackConfig
) -> Sequence[pb.ScoreOutcome]:
    """Return the outcomes in the order of the items; of terms that ask a judge of the fleet, from its replicas."""
    from flotilla_coordinator.rollouts.scoring import reward_spec

    if asks_fleet(terms, stack):
        return wait(scored_by_fleet(terms, items, steps, stack))
    request = pb.ScoreRequest(rewards=map(reward_spec, terms), items=items, total_steps=steps)
    return list(_trial(request, stack).outcomes)


def _trial(request: pb.ScoreRequest, stack: StackConfig) -> pb.ScoreResponse:
    """Return the outcomes of a request, from a process of the reward service."""
    if not is_installed():
        raise FailedPrecondition(
            "the reward service is not installed here", next_step="pip install flotilla-reward"
        )
    asked = {judge_of(spec.reward) for spec in request.rewards}
    judges = {
        name: one for name, one in stack.judges.items() if name in asked and isinstance(one, JudgeConfig)
    }
    keys = {one.api_key_env for one in judges.values()}
    places = {name: place for name, place in stack.reward.environment.items() if name in keys}
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answered:
        question.write(request.SerializeToString())
        question.seek(0)
        isolation = stack.reward.isolation.model_dump_json()
        of_judges = TypeAdapter(dict[str, JudgeConfig]).dump_json(judges).decode()
        command = [sys.executable, "-m", TRIAL, isolation, of_judges]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | resolved(places, "reward")
        with subprocess.Popen(
            command, stdin=question, stdout=answered, stderr=subprocess.PIPE, env=environment, bufsize=0
        ) as trial:
            _say_all(trial)
        answered.seek(0)
        answer = answered.read()
    if trial.returncode == 0:
        return pb.ScoreResponse.FromString(answer)
    refused = from_status(answer) if trial.returncode == REFUSED else None
    raise refused or Internal("the trial ended early", why=f"its process ended with code {trial.returncode}")


def _say_all(trial: Popen[bytes]) -> None:
    """Print what the code of a user prints until the trial ends: up to a limit, as text that no terminal obeys."""
    assert trial.stderr is not None
    line, left, more, over = b"", SHOWN_BYTES, 0, False
    while not over:
        # What user code left behind may keep the pipe open: after the end of the trial only what is in it counts.
        over = trial.poll() is not None
        ready, _, _ = select([trial.stderr], [], [], 0 if over else LOOK_S)
        block = os.read(trial.stderr.fileno(), BLOCK_BYTES) if ready else b""
        over = over or bool(ready and not block)
        more += max(0, len(block) - left)
        line += block[:left]
        left = max(0, left - len(block))
        *lines, line = line.split(b"\n")
        if len(line) > LONGEST_LINE_BYTES or (over and line):
            lines, line = [*lines, line], b""
        for one in lines:
            say(line_text(one))
    if more:
        say(f"... and {more:,} bytes more of what was printed, which are not shown")
