"""The judges of a stack, and how one scores a response.

Invariants: a response gets a value from a verdict alone. A judge that gives none is asked once more, then the sample is
an error; a judge that is away leaves the sample without any outcome. Of a pair both orders are asked. A verdict is kept
under all that it depends on: the model, where and how it is asked, and both messages. Of equal questions at the same
time one is asked, and the others wait for its verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ValidationError

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core import rpc
from flotilla_core.config import FleetJudgeConfig, JudgeConfig, RewardTermConfig
from flotilla_core.config.judges import JUDGE, judge_of, rubric_file
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig
from flotilla_core.findings import passed, warned
from flotilla_core.tasks import gather_or_cancel
from flotilla_reward.builtin import CannotScore, Judged
from flotilla_reward.judges.endpoint import Endpoint, servers
from flotilla_reward.judges.fleet import Connect, FleetJudge, FolderOf
from flotilla_reward.judges.form import FIRST, SECOND, Asked, Form, place
from flotilla_reward.judges.transport import Refused, Transport

MOST_KEPT = 100_000
"""Verdicts that a replica keeps; those that were used longest ago go first."""
TRIES = 2
LONGEST_END = 200
"""Characters that a message shows of an answer without a verdict, whose last line counts."""

Verdict = float | str


@dataclass(frozen=True)
class Found:
    """A verdict, and the tokens that it took; none where it was kept from before."""

    verdict: Verdict
    tokens: int = 0
    kept: bool = False


class Verdicts:
    """The verdicts of before, of all runs of this process."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def turn(self, key: bytes) -> asyncio.Lock:
        """Return what lets those in who need a verdict, one after the other."""
        return self._turns.setdefault(key, asyncio.Lock())

    def find(self, key: bytes) -> Verdict | None:
        """Return a verdict that was kept."""
        if (verdict := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return verdict

    def keep(self, key: bytes, verdict: Verdict) -> None:
        """Keep a verdict, in place of the oldest one where there are too many."""
        self._kept[key] = verdict
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


class Judge:
    """A judge with the rubric of a term."""

    def __init__(self, transport: Transport, term: RewardTermConfig, verdicts: Verdicts) -> None:
        self._transport = transport
        self._term = term
        self._form = Form.of(term)
        self._verdicts = verdicts

    async def check(self) -> None:
        """Raise where the judge can be asked of nothing."""
        await self._transport.check()

    @property
    def version(self) -> str:
        """The name of what decides how it judges: its model, and a digest of what it is told beside material."""
        asked = [*self._transport.about, self._form.response_format, self._form.asked()]
        told = json.dumps(asked, sort_keys=True)
        return f"{self._transport.model}, sha256:{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    async def judged(self, item: pb.ScoreItem) -> Judged:
        """Return the value of a response, with what it is made of and what it cost.

        Raise `CannotScore` without a verdict, `Unavailable` without a judge.
        """
        question = _question(item)
        if self._term.pairs:
            return await self._compared(question, item.response, item.answer)
        reference = {"reference": item.answer} if item.answer.strip() else {}
        found = await self._found(self._form.asked(question=question, response=item.response, **reference))
        parts = _cost(found)
        if isinstance(found.verdict, str):
            return Judged(self._term.verdicts[found.verdict], parts=parts)
        assert self._term.scale is not None
        return Judged(place(found.verdict, self._term.scale), parts={"score": found.verdict, **parts})

    async def _compared(self, question: str, response: str, answer: str) -> Judged:
        if not answer.strip():
            raise CannotScore("the row has no answer to compare the response with: check data.answer_field")
        orders = [(response, answer), (answer, response)]
        asked = [
            self._form.asked(question=question, first_response=one, second_response=other)
            for one, other in orders
        ]
        found = await gather_or_cancel(map(self._found, asked))
        wins = [one.verdict == better for one, better in zip(found, (FIRST, SECOND), strict=True)]
        losses = [one.verdict == better for one, better in zip(found, (SECOND, FIRST), strict=True)]
        value = 1.0 if all(wins) else 0.0 if all(losses) else 0.5
        return Judged(value, parts=_cost(*found))

    async def _found(self, asked: Asked) -> Found:
        transport = self._transport
        of = [transport.model, *transport.about, self._form.response_format, *asked]
        key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).digest()
        since = asyncio.get_running_loop().time()
        async with self._verdicts.turn(key):
            if (kept := self._verdicts.find(key)) is not None:
                return Found(kept, kept=True)
            found = await self._asked(asked, since)
            self._verdicts.keep(key, found.verdict)
            return found

    async def _asked(self, asked: Asked, since: float) -> Found:
        transport, tokens, said = self._transport, 0, ""
        for _ in range(TRIES):
            try:
                completion = await transport.complete(asked, self._form.response_format, since)
            except Refused as refused:
                raise CannotScore(f"{transport.place} gave no verdict: {refused}") from None
            tokens += completion.tokens
            verdict = self._form.read(completion.content)
            if verdict is not None:
                return Found(verdict, tokens)
            said = completion.content.strip()
        end = transport.shown(said[-LONGEST_END:])
        raise CannotScore(f"{transport.place} gave no verdict, {TRIES} times; it ended with: {end}")


def _cost(*found: Found) -> dict[str, float]:
    kept = sum(one.kept for one in found) / len(found)
    return {"tokens": float(sum(one.tokens for one in found)), "kept": kept}


def _question(item: pb.ScoreItem) -> str:
    """Return the prompt as a reader sees it: of a chat the turns, not what a template makes of them."""
    if not item.chat:
        return item.prompt
    return "\n\n".join(f"{message.role}: {message.content}" for message in item.chat)


async def _nowhere(name: str) -> Path:
    raise FailedPrecondition(
        f"judge {name} is held by the fleet, and is asked by its reward replicas",
        next_step="flotilla up, then flotilla run plan or run start, which measure the agreement of judges",
    )


class Judges:
    """The judges that this service can ask, by their names."""

    def __init__(
        self,
        configs: Mapping[str, JudgeConfig | FleetJudgeConfig],
        connect: Connect = rpc.connect,
        folder_of: FolderOf = _nowhere,
    ) -> None:
        endpoints = {name: one for name, one in configs.items() if isinstance(one, JudgeConfig)}
        of_url = servers(endpoints)
        self._servers = [*of_url.values()]
        self._endpoints = {name: Endpoint(name, one, of_url[one.url]) for name, one in endpoints.items()}
        self._of_fleet = {
            name: FleetJudge(name, one, connect, folder_of)
            for name, one in configs.items()
            if isinstance(one, FleetJudgeConfig)
        }
        self._verdicts = Verdicts()

    def resolve(
        self, reward: str, parameters: Mapping[str, Any], generators: pb.JudgeGenerators | None = None
    ) -> Judge:
        """Return the judge of a term; `generators` hold it, where the fleet does."""
        transport = self._transport(judge_of(reward), generators or pb.JudgeGenerators())
        if transport is None:
            known = ", ".join([*self._endpoints, *self._of_fleet]) or "none"
            raise InvalidConfig(
                f"there is no judge {judge_of(reward)}",
                why=f"judges of the stack of this reward service: {known}",
                next_step="write it into `judges` of the stack, then flotilla down and flotilla up",
            )
        try:
            term = RewardTermConfig.model_validate({"reward": reward, **parameters})
        except ValidationError as error:
            why = "; ".join(one["msg"] for one in error.errors(include_url=False, include_input=False))
            raise InvalidConfig(f"reward {reward} is wrong", why=why) from None
        if file := rubric_file(term.rubric):
            raise InvalidConfig(
                f"the rubric of {reward} is the name of a file", where=str(file), why="nobody read it"
            )
        return Judge(transport, term, self._verdicts)

    def _transport(self, name: str, generators: pb.JudgeGenerators) -> Transport | None:
        if name in self._of_fleet:
            return self._of_fleet[name].held_by(generators)
        return self._endpoints.get(name)

    def infos(self) -> list[pb.RewardInfo]:
        """Describe each judge, for lists of rewards."""
        places = {name: f"{one.model} at {one.place}" for name, one in self._endpoints.items()}
        places |= {name: f"{one.config.model} in the fleet" for name, one in self._of_fleet.items()}
        return [
            pb.RewardInfo(name=f"{JUDGE}{name}", description=f"Judge: {place}.")
            for name, place in places.items()
        ]

    def findings(self) -> list[Finding]:
        """Say of each judge behind an endpoint whether its key is there."""
        found = []
        for name, endpoint in self._endpoints.items():
            try:
                endpoint.key()
            except FlotillaError as error:
                found.append(warned(f"judge {name}", str(error), "See docs/judges.md."))
            else:
                found.append(passed(f"judge {name}", f"{endpoint.model} at {endpoint.place}"))
        return found

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            await server.close()
        for judge in self._of_fleet.values():
            await judge.close()
