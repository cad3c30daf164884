"""Whether rewards can be loaded, found out in a process of its own, which a plan can end when it takes too long.

Run as `python -m flotilla_reward.spec_check` with a JSON list of `{reward, parameters}` on standard input. Prints a
JSON list that says of each what is wrong, with nothing for those that load as a worker loads them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.errors import FlotillaError
from flotilla_reward.catalog import resolve
from flotilla_reward.worker import load
from flotilla_workers.worker import answer


def problem(reward: str, parameters: dict[str, Any]) -> str:
    """Return the reason why a reward cannot be loaded with these parameters; empty if it can."""
    spec = pb.RewardSpec(reward=reward)
    spec.parameters.update(parameters)
    try:
        target = resolve(spec).target
    except FlotillaError as error:
        return str(error)
    if target is None:
        return ""
    return str(answer({"do": "load", "target": asdict(target)}, load, {}).get("failed", ""))


def main() -> None:
    # What user code prints must not come between.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started_as = os.getpid()
    found = [problem(spec["reward"], spec["parameters"]) for spec in json.load(sys.stdin)]
    if os.getpid() != started_as:
        os._exit(0)  # A process that a file forked when it was imported answers nothing.
    results.write(json.dumps(found))
    results.close()
    # Threads that user code started keep no process.
    os._exit(0)


if __name__ == "__main__":
    main()
