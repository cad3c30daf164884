"""How far judges agree with humans, by which a run begins or not, and what they cost."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1.registration_pb2 import Registration
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.ledger.verdicts import named_parts
from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.functions import functions_of, judge_errors
from flotilla_coordinator.rollouts.judges import (
    FleetJudges,
    JudgeTally,
    agreement_of,
    examples_of,
    spearman,
)
from flotilla_coordinator.rollouts.scoring import Needs, Scorer, reward_spec
from flotilla_core.config import RewardTermConfig, RunConfig, StackConfig
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.structs import to_json

VERDICTS: dict[str, Any] = {"verdicts": {"yes": 1, "no": 0}}
SCALE: dict[str, Any] = {"scale": [1, 10]}
PAIRS: dict[str, Any] = {"pairs": True}


def term(examples: Path | str = "none.jsonl", at_least: float = 0.8, **keys: Any) -> RewardTermConfig:
    agreement = {"examples": str(examples), "at_least": at_least}
    return RewardTermConfig.model_validate(
        {"name": "quality", "reward": {"judge": "j"}, "rubric": "Polite?", "agreement": agreement, **keys}
    )


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def scored(*values: float | None) -> dict[str, pb.ScoreOutcome]:
    """Outcomes of examples in their order; None is a judge without a verdict."""
    return {
        str(number): pb.ScoreOutcome(error=pb.RewardError(message="no verdict"))
        if value is None
        else pb.ScoreOutcome(value=pb.RewardValue(components=[pb.RewardComponent(value=value)]))
        for number, value in enumerate(values)
    }


def labelled(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "response": f"r{n}", "label": label} for n, label in enumerate(labels)]


def test_verdicts_agree_by_the_share_that_is_equal_and_one_without_a_verdict_is_none_of_them(
    tmp_path: Path,
) -> None:
    one = term(written(tmp_path, labelled(["yes", "no"] * 10)), **VERDICTS)
    examples = examples_of(one)
    found = agreement_of(one, examples, scored(*[1.0, 0.0] * 9, 1.0, None))
    assert (found.figure, found.unjudged, found.enough) == (19 / 20, 1, True)
    found = agreement_of(one, examples, scored(*[1.0, 1.0] * 10))
    assert found.figure == 0.5 and not found.enough
    with pytest.raises(
        FailedPrecondition, match=r"quality agrees with its examples by 0\.500.*at least 0\.8"
    ):
        found.require()


def test_a_scale_agrees_by_ranks_and_not_by_numbers(tmp_path: Path) -> None:
    one = term(written(tmp_path, labelled([*range(1, 21)])), **SCALE)
    examples = examples_of(one)
    assert agreement_of(one, examples, scored(*[(n / 20) ** 3 for n in range(20)])).figure == pytest.approx(
        1.0
    )
    assert agreement_of(one, examples, scored(*[-n / 20 for n in range(20)])).figure == pytest.approx(-1.0)
    same = agreement_of(one, examples, scored(*[0.5] * 20))
    assert same.figure == 0.0 and not same.enough


def test_a_judge_that_gives_many_no_verdict_is_not_enough_however_it_agrees_on_the_others(
    tmp_path: Path,
) -> None:
    one = term(written(tmp_path, labelled([*range(1, 21)])), at_least=0.0, **SCALE)
    outcomes = scored(*[n / 20 for n in range(17)], None, None, None)
    found = agreement_of(one, examples_of(one), outcomes)
    assert 0 < found.figure < 1 and not found.enough
    with pytest.raises(FailedPrecondition, match="3 had no verdict: no verdict"):
        found.require()
    nobody = agreement_of(one, examples_of(one), scored(*[None] * 20))
    assert nobody.figure == pytest.approx(-1.0) and not nobody.enough


@pytest.mark.parametrize("wrong", range(10))
def test_a_scale_agrees_no_more_without_a_verdict_than_with_the_worst_one(tmp_path: Path, wrong: int) -> None:
    one = term(written(tmp_path, labelled([*range(10)])), **SCALE)
    examples = examples_of(one)
    values: list[float | None] = [0.1 + n / 20 for n in range(10)]
    found = []
    for value in (None, 0.0, 1.0):
        values[wrong] = value
        found.append(agreement_of(one, examples, scored(*values)).figure)
    assert found[0] == pytest.approx(min(found[1:]))


def test_of_pairs_the_chosen_one_has_to_win_and_a_tie_is_no_agreement(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "Hi"}], "chosen": f"c{n}", "rejected": "r"} for n in range(10)
    ]
    one = term(written(tmp_path, rows), **PAIRS)
    examples = examples_of(one)
    assert (examples[3].item.response, examples[3].item.answer) == ("c3", "r")
    assert [(m.role, m.content) for m in examples[3].item.chat] == [("user", "Hi")]
    assert agreement_of(one, examples, scored(*[1.0] * 8, 0.5, 0.0)).figure == 0.8


def test_the_rank_correlation_is_that_of_the_textbook_with_ties() -> None:
    rng = random.Random(7)
    for _ in range(50):
        first = [float(rng.randrange(6)) for _ in range(30)]
        second = [float(rng.randrange(6)) for _ in range(30)]

        def ranks(values: list[float]) -> list[float]:
            return [
                sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
                for value in values
            ]

        a, b = ranks(first), ranks(second)
        mean = sum(a) / len(a)
        covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
        spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
        assert spearman(first, second) == pytest.approx(covariance / spread)


@pytest.mark.parametrize(
    ("keys", "row", "says"),
    [
        (VERDICTS, {"prompt": "p", "response": "r", "label": "perhaps"}, "label is none of yes, no"),
        (VERDICTS, {"prompt": "p", "response": "r", "label": ["yes"]}, "label is none of yes, no"),
        (SCALE, {"prompt": "p", "response": "r", "label": "7"}, "label is no number"),
        (SCALE, {"prompt": "p", "label": 7}, "texts in response"),
        (SCALE, {"response": "r", "label": 7}, "prompt is no text"),
        (PAIRS, {"prompt": "p", "chosen": "c"}, "texts in chosen and rejected"),
    ],
)
def test_a_row_that_is_no_example_is_refused_by_its_line(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"labelled.jsonl, line 1.*{says}"):
        examples_of(term(written(tmp_path, [row]), **keys))


@pytest.mark.parametrize(
    ("keys", "labels"), [(SCALE, [1, 2, 3]), (SCALE, [5] * 20), (VERDICTS, ["yes"] * 20)]
)
def test_few_examples_or_equal_labels_measure_nothing(
    tmp_path: Path, keys: dict[str, Any], labels: list[Any]
) -> None:
    with pytest.raises(InvalidConfig, match="cannot tell how far the judge agrees"):
        examples_of(term(written(tmp_path, labelled(labels)), **keys))


def test_a_term_says_to_its_service_what_is_set_alone() -> None:
    spec = reward_spec(term(**SCALE))
    assert spec.reward == "judge:j"
    assert to_json(spec.parameters) == {"rubric": "Polite?", "scale": [1, 10]}
    assert to_json(reward_spec(RewardTermConfig(reward="exact")).parameters) == {}


def test_a_judge_that_the_stack_lacks_refuses_the_run_and_is_no_function() -> None:
    rewards = [{"reward": "exact"}, {"reward": {"judge": "j"}, "rubric": "r", "pairs": True}]
    config = RunConfig.model_validate(
        {"name": "n", "steps": 1, "data": {"train": "a.jsonl"}, "rewards": rewards}
    )
    (error,) = Chapter.of(judge_errors(config, StackConfig())).errors
    assert error.startswith("rewards[1].reward: the stack has no judge j (judges: none)")
    stack = StackConfig.model_validate({"judges": {"j": {"url": "http://host/v1", "model": "m"}}})
    assert [*judge_errors(config, stack)] == []
    assert [function.name for function in functions_of(config)] == ["exact"]


def test_a_judge_without_generators_refuses_the_run() -> None:
    rewards = [{"reward": {"judge": "j"}, "rubric": "r", "pairs": True}]
    config = RunConfig.model_validate(
        {"name": "n", "steps": 1, "data": {"train": "a.jsonl"}, "rewards": rewards}
    )
    judges = {"j": {"model": "models/judge", "replicas": 0}}
    (error,) = Chapter.of(judge_errors(config, StackConfig.model_validate({"judges": judges}))).errors
    assert error.startswith("rewards[0].reward: judges.j.replicas is 0, so nothing holds this judge")


async def test_a_term_names_the_generators_that_hold_its_judge_now_and_no_other_term_does() -> None:
    now = [[("b:2", "s1"), ("a:1", "s1")], [("c:3", "s2")]]
    doubted: list[str] = []

    async def generators() -> list[Registration]:
        return [
            Registration(address=address, weights_stamp=stamp, tokenizer_digest="t")
            for address, stamp in now.pop(0)
        ]

    judges = FleetJudges({"j": generators}, lambda judge, why: doubted.append(judge))
    specs = [
        pb.RewardSpec(reward="judge:j"),
        pb.RewardSpec(reward="judge:far"),
        pb.RewardSpec(reward="exact"),
    ]
    await judges.write(specs)
    assert (specs[0].judge.addresses, specs[0].judge.weights_stamps) == (["a:1", "b:2"], ["s1"])
    await judges.write(specs)
    assert (specs[0].judge.addresses, specs[0].judge.weights_stamps) == (["c:3"], ["s2"])
    assert not any(spec.HasField("judge") for spec in specs[1:])
    judges.doubt(specs[1:], "away")
    judges.doubt(specs, "away")
    assert doubted == ["j"]


def test_examples_that_measure_nothing_refuse_the_run_and_name_each_judge(tmp_path: Path) -> None:
    few = term(written(tmp_path, labelled([1, 2, 3])), **SCALE)
    gone = term(tmp_path / "gone.jsonl", **SCALE).model_copy(update={"name": "gone"})
    config = RunConfig.model_validate(
        {"name": "n", "steps": 1, "data": {"train": "a.jsonl"}, "rewards": [{"reward": "exact"}]}
    )
    config = config.model_copy(update={"rewards": (few, gone)})
    stack = StackConfig.model_validate({"judges": {"j": {"url": "http://host/v1", "model": "m"}}})
    first, second = Chapter.of(judge_errors(config, stack)).errors
    assert first.startswith("the judge of reward quality cannot be measured: ") and "they are 3" in first
    assert second.startswith("the judge of reward gone cannot be measured: ") and "does not exist" in second


class Judged:
    """Gives each sample its cost."""

    terms = (RewardTermConfig(reward="exact"), term(**SCALE))

    async def needs(self) -> Needs:
        return Needs()

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        def components(item: pb.ScoreItem) -> list[pb.RewardComponent]:
            cost = {"tokens": float(item.response), "kept": float(item.response == "0")}
            parts = [pb.NamedPart(name=name, value=value) for name, value in cost.items()]
            judged = pb.RewardComponent(reward="quality", value=0.5, parts=parts)
            return [pb.RewardComponent(reward="exact", value=1.0), judged]

        failed = pb.RewardError(reward="exact", message="it raised")
        return {
            item.sample_id: pb.ScoreOutcome(error=failed, before=components(item)[1:])
            if item.sample_id == "failed"
            else pb.ScoreOutcome(value=pb.RewardValue(components=components(item)))
            for item in items
        }


async def test_tokens_and_kept_verdicts_are_counted_once_by_the_name_of_the_term_whatever_came_of_others() -> (
    None
):
    tally = JudgeTally()
    items = [
        pb.ScoreItem(sample_id=name, response=tokens)
        for name, tokens in (("a", "40"), ("b", "0"), ("failed", "2"))
    ]
    outcomes = await Scorer(Judged(), tally=tally).score(items)
    assert named_parts(outcomes["a"].verdicts) == [
        ("exact", 1.0),
        ("quality", 0.5),
        ("quality[tokens]", 40.0),
        ("quality[kept]", 0.0),
    ]
    assert tally.take_metrics() == {
        "judge/tokens/quality": 42.0,
        "judge/cache_hit_ratio/quality": pytest.approx(1 / 3),
    }
    assert tally.take_metrics() == {}
