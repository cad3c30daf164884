"""The coordinator's side of judges: how far they agree with humans, who holds them, and what they cost.

Invariants: a judge is measured by the call that scores samples, so by the same rubric, form and model. An example
without a verdict never raises the agreement. A run whose judge agrees less than it has to draws no sample.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.struct_pb2 import Struct

from flotilla.common.v1.chat_pb2 import Message
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import AgreementConfig, RewardTermConfig
from flotilla_core.config.judges import judge_of
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_data.rows import open_rows, parts

MOST_EXAMPLES = 1000
LEAST_EXAMPLES = 10
MOST_UNJUDGED = 0.1
"""Share of examples that may have no verdict: above it, no agreement is measured."""


@dataclass(frozen=True)
class Example:
    """A response that a human judged."""

    item: pb.ScoreItem
    label: float
    """The value that the judge has to give, or for a scale the number that the human gave."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of a judge with humans."""

    term: str
    figure: float
    """The share of equal verdicts, or Spearman's rank correlation."""
    of_ranks: bool
    examples: int
    unjudged: int
    why_unjudged: str
    at_least: float

    @property
    def enough(self) -> bool:
        """Return whether the run may begin."""
        return self.figure >= self.at_least and self.unjudged <= MOST_UNJUDGED * self.examples

    @property
    def shown(self) -> str:
        """The figure with what it is."""
        kind = "Spearman's rank correlation" if self.of_ranks else "share of equal verdicts"
        unjudged = f"; {self.unjudged} had no verdict: {self.why_unjudged}" if self.unjudged else ""
        return f"{kind} over {self.examples} examples, at least {self.at_least:g} is asked for{unjudged}"

    def require(self) -> None:
        """Raise where the judge agrees too little."""
        if not self.enough:
            raise FailedPrecondition(
                f"the judge of reward {self.term} agrees with its examples by {self.figure:.3f}",
                why=self.shown,
                next_step="make the rubric clearer or take another judge; flotilla reward test measures it again",
            )


def examples_of(term: RewardTermConfig) -> list[Example]:
    """Read the labelled examples of a term."""
    assert term.agreement is not None
    agreement: AgreementConfig = term.agreement
    rows = open_rows(agreement.examples, "train", None)
    found: list[Example] = []
    for part in parts(rows, range(min(MOST_EXAMPLES, len(rows)))):
        for row in rows.read(part):
            if row.error is not None:
                raise row.error
            found.append(_example(term, len(found), row.values, row.where))
    if len(found) < LEAST_EXAMPLES or (not term.pairs and len({one.label for one in found}) == 1):
        raise InvalidConfig(
            "the examples cannot tell how far the judge agrees",
            where=str(agreement.examples),
            why=f"they are {len(found)}, and {LEAST_EXAMPLES} with different labels are the least",
        )
    return found


def _example(term: RewardTermConfig, number: int, row: Mapping[str, Any], where: str) -> Example:
    prompt, label = row.get("prompt"), 1.0
    item = pb.ScoreItem(sample_id=str(number), info=Struct())
    if isinstance(prompt, str):
        item.prompt = prompt
    elif isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt):
        item.chat.extend(
            Message(role=str(one.get("role")), content=str(one.get("content"))) for one in prompt
        )
        item.prompt = json.dumps(prompt, ensure_ascii=False)
    else:
        raise _unfit(where, "prompt is no text and no list of messages")
    response, answer = ("chosen", "rejected") if term.pairs else ("response", "answer")
    texts = row.get(response), row.get(answer, None if term.pairs else "")
    if not all(isinstance(text, str) for text in texts):
        raise _unfit(where, f"it needs texts in {response} and {answer}")
    item.response, item.answer = map(str, texts)
    if not term.pairs:
        label = _label(term, row.get("label"), where)
    return Example(item, label)


def _label(term: RewardTermConfig, said: Any, where: str) -> float:
    if term.scale is not None:
        if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
            raise _unfit(where, "label is no number")
        return float(said)
    if not isinstance(said, str) or said not in term.verdicts:
        raise _unfit(where, f"label is none of {', '.join(term.verdicts)}")
    return term.verdicts[said]


def _unfit(where: str, why: str) -> InvalidConfig:
    return InvalidConfig("the row is no example for the judge", where=where, why=why)


def agreement_of(
    term: RewardTermConfig, examples: Sequence[Example], outcomes: Mapping[str, pb.ScoreOutcome]
) -> Agreement:
    """Return how far the outcomes of the examples agree with their labels."""
    assert term.agreement is not None
    labels, why = [one.label for one in examples], ""
    values: list[float | None] = []
    for one in examples:
        outcome = outcomes[one.item.sample_id]
        judged = outcome.WhichOneof("outcome") == "value"
        values.append(outcome.value.components[0].value if judged else None)
        why = why or ("" if judged else outcome.error.message)
    if term.scale is not None:
        figure = spearman(labels, _with_worst(labels, values))
    else:
        figure = sum(label == value for label, value in zip(labels, values, strict=True)) / len(examples)
    return Agreement(
        term.shown,
        figure,
        of_ranks=term.scale is not None,
        examples=len(examples),
        unjudged=values.count(None),
        why_unjudged=why,
        at_least=term.agreement.at_least,
    )


def _with_worst(labels: Sequence[float], values: Sequence[float | None]) -> list[float]:
    """Return the values of a scale, from 0 to 1; one that is not there is at the end that is far from its label."""
    ranks = _ranks(labels)
    middle, most = (len(ranks) - 1) / 2, len(ranks)
    return [
        value if value is not None else (-1 if rank > middle else most + 1) - rank
        for rank, value in zip(ranks, values, strict=True)
    ]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation; 0 where one side is all equal, which orders nothing."""
    ranks = [_ranks(first), _ranks(second)]
    mean = (len(first) - 1) / 2
    one, other = ([rank - mean for rank in side] for side in ranks)
    spread = math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    places: dict[float, list[int]] = defaultdict(list)
    for rank, value in enumerate(sorted(values)):
        places[value].append(rank)
    return [sum(places[value]) / len(places[value]) for value in values]


Generators = Callable[[], Awaitable[Sequence[Registration]]]
"""Returns the generators that hold a judge; waits until there is one."""


class FleetJudges:
    """The judges of a run that the fleet holds, by their names.

    Whether a judge or the replica that asks it failed, a call does not tell: so the generators are doubted, too, and
    prove their health, before the samples are sent again.
    """

    def __init__(
        self,
        generators: Mapping[str, Generators],
        doubt: Callable[[str, str], None] = lambda judge, why: None,
    ) -> None:
        """`doubt` is called with a judge, and why its generators may not serve."""
        self._generators = generators
        self._doubt = doubt

    async def write(self, specs: Sequence[pb.RewardSpec]) -> None:
        """Write into each term of a judge who holds it now."""
        for judge, spec in self._held(specs):
            held = await self._generators[judge]()
            spec.judge.CopyFrom(
                pb.JudgeGenerators(
                    addresses=sorted(one.address for one in held),
                    weights_stamps=sorted({one.weights_stamp for one in held}),
                    tokenizer_digest=held[0].tokenizer_digest,
                )
            )

    def doubt(self, specs: Sequence[pb.RewardSpec], why: str) -> None:
        """Have the generators of all judges in these terms show that they serve."""
        for judge, _ in self._held(specs):
            self._doubt(judge, why)

    def _held(self, specs: Sequence[pb.RewardSpec]) -> Iterator[tuple[str, pb.RewardSpec]]:
        named = ((judge_of(spec.reward), spec) for spec in specs)
        return ((judge, spec) for judge, spec in named if judge in self._generators)


class JudgeTally:
    """Counts what judges cost since the metrics were last taken."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = defaultdict(float)
        self._kept: dict[str, list[float]] = defaultdict(list)

    def note(self, judged: Collection[str], outcomes: Iterable[pb.ScoreOutcome]) -> None:
        """Count what the terms with these names cost, also where another one failed."""
        for outcome in outcomes:
            for component in outcome.value.components or outcome.before:
                if component.reward in judged:
                    said = {part.name: part.value for part in component.parts}
                    self._tokens[component.reward] += said.get("tokens", 0.0)
                    self._kept[component.reward].append(said.get("kept", 0.0))

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics, and begin anew."""
        found = {f"judge/tokens/{name}": tokens for name, tokens in self._tokens.items()}
        found |= {f"judge/cache_hit_ratio/{name}": sum(kept) / len(kept) for name, kept in self._kept.items()}
        self._tokens.clear()
        self._kept.clear()
        return found
