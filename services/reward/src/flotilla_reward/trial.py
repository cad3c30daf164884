"""Scores samples once, in a process of its own that needs no fleet: how a user tries a reward.

Run as `python -m flotilla_reward.trial list` it prints a `ListRewardsResponse` with the rewards that are installed.

Run as `python -m flotilla_reward.trial ISOLATION JUDGES`, with a `ScoreRequest` on standard input, and with
`reward.isolation` and `judges` of the stack as JSON. It scores as the service does: the same terms in the same order,
in workers that are killed at their limits, functions of users in the same jail, by judges whose keys are where the
service finds them. It prints a `ScoreResponse` with all outcomes, or the status of the error and exit code REFUSED. How
functions run, and what user code prints, goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

from pydantic import TypeAdapter

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import IsolationConfig, JudgeConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.rpc.status import encode
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.catalog import Term, list_rewards
from flotilla_reward.judges.judge import Judges
from flotilla_workers.jail.jail import find, no_jail
from flotilla_workers.jail.level import told

MOST_WORKERS = 4
REFUSED = 3
LIST = "list"


async def outcomes_of(
    request: pb.ScoreRequest, isolation: IsolationConfig, judges: Judges
) -> pb.ScoreResponse:
    """Return one outcome for each item of the request, in its order."""
    terms = scoring.resolve(request.rewards, judges=judges)
    needs_workers = any(term.target is not None for term in terms)
    jailed = any(term.needs_jail for term in terms)
    count = min(len(request.items), os.cpu_count() or 1, MOST_WORKERS) if needs_workers else 0
    pool = Workers(count, partial(find, isolation) if jailed else no_jail)
    await pool.start()
    for line in _how(terms, told(pool.jail.isolation) if jailed else ""):
        print(line, flush=True)  # noqa: T201 - beside what rewards print themselves
    try:
        async with aclosing(scoring.load(terms, pool)) as signs:
            async for _ in signs:
                pass
        for term in terms:
            if form := pool.facts(term).form:
                print(f"{term.name}: {form}", flush=True)  # noqa: T201 - beside what it prints itself
        found: dict[str, pb.ScoreOutcome] = {}
        total_steps = request.total_steps if request.HasField("total_steps") else None
        run = scoring.Run(request.run_id, total_steps)
        async with aclosing(scoring.score_items(request.items, terms, pool, run)) as responses:
            async for response in responses:
                found |= {outcome.sample_id: outcome for outcome in response.outcomes}
    finally:
        await pool.stop()
        await judges.close()
    return pb.ScoreResponse(outcomes=[found[item.sample_id] for item in request.items])


def _how(terms: list[Term], of_jail: str) -> Iterator[str]:
    """Say in which jail functions run, and which of them in none."""
    if of_jail:
        yield of_jail
    for term in terms:
        if term.target is not None and term.target.trusted:
            yield f"{term.name} is trusted, so it runs OUTSIDE OF THE JAIL, as this command itself"


def main() -> int:
    """Answer the request on standard input, or list the rewards."""
    # What user code and its workers print must not come between.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if sys.argv[1:] == [LIST]:
        results.write(pb.ListRewardsResponse(rewards=list_rewards()).SerializeToString())
        results.close()
        return 0
    request = pb.ScoreRequest.FromString(sys.stdin.buffer.read())
    try:
        isolation = IsolationConfig.model_validate_json(sys.argv[1])
        judges = Judges(TypeAdapter(dict[str, JudgeConfig]).validate_json(sys.argv[2]))
        answer, code = asyncio.run(outcomes_of(request, isolation, judges)).SerializeToString(), 0
    except FlotillaError as error:
        answer, code = encode(error).SerializeToString(), REFUSED
    results.write(answer)
    results.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
