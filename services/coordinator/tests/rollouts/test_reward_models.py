"""Reward models read text by their own tokenizers, and their terms are weighed among the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.common.v1.chat_pb2 import Message
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.ledger.verdicts import named_parts
from flotilla_coordinator.rollouts.reward_models import RewardModel, RewardModelScorer, TermsInOrder
from flotilla_coordinator.rollouts.scoring import Needs, Outcome, Scorer
from flotilla_core.config import RewardTermConfig
from flotilla_core.errors import Unavailable
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer

LETTERS = "_abcdefgh"
TEMPLATE = (
    "{% for message in messages %}{{ 'ef'[message['role'] == 'user'] }}{{ message['content'] }}{% endfor %}"
)


class Gang:
    """Says of a text the sum of its token ids, then its length."""

    def __init__(self, longest: int = 0, labels: int = 1, vocabulary: int = 0) -> None:
        self.longest_sequence = longest
        self.vocabulary = vocabulary
        self._labels = labels
        self.asked: list[list[list[int]]] = []

    async def scores(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.asked.append([text.tolist() for text in texts])
        return [np.array([text.sum(), len(text)][: self._labels], np.float32) for text in texts]


class Lost(Gang):
    async def scores(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise Unavailable("the gang does not answer", where="reward_model-helpful")


def term(reward: Any = None, **keys: Any) -> RewardTermConfig:
    return RewardTermConfig.model_validate({"reward": reward or {"model": "helpful"}, **keys})


def model(folder: Path, gang: Gang, letters: str = LETTERS) -> RewardModel:
    return RewardModel(Tokenizer.load(write_tokenizer(folder, letters, template=TEMPLATE)), gang)


def item(response: str, prompt: str = "a", chat: Sequence[tuple[str, str]] = ()) -> pb.ScoreItem:
    messages = [Message(role=role, content=content) for role, content in chat]
    return pb.ScoreItem(sample_id=response or "empty", prompt=prompt, response=response, chat=messages)


async def outcomes(scorer: RewardModelScorer | TermsInOrder, *items: pb.ScoreItem) -> list[Outcome]:
    found = await Scorer(scorer).score(list(items))
    return [found[one.sample_id] for one in items]


async def test_a_prompt_and_its_response_are_a_chat_in_the_models_own_template_and_tokens(
    tmp_path: Path,
) -> None:
    for letters in (LETTERS, "_hgfedcba"):
        gang = Gang()
        own = model(tmp_path / letters, gang, letters)
        asked = item("bc"), item("d", chat=[("user", "a"), ("assistant", "b"), ("user", "c")])
        (first, second) = await outcomes(RewardModelScorer("run", (term(),), {"helpful": own}), *asked)
        # One tokenizer counts letters up, the other down.
        wanted = [[letters.index(letter) for letter in text] for text in ("faebc", "faebfced")]
        assert gang.asked == [wanted]
        assert (first.total, second.total) == (sum(wanted[0]), sum(wanted[1]))


async def test_a_template_has_the_prompt_and_the_response_in_its_places_and_nothing_else(
    tmp_path: Path,
) -> None:
    gang = Gang()
    scorer = RewardModelScorer(
        "run", (term(template="h{prompt}g{response}"),), {"helpful": model(tmp_path, gang)}
    )
    await outcomes(scorer, item("b", prompt="a{response}"))
    # A place in the prompt is text of the prompt; 0 stands for letters outside of the vocabulary.
    assert gang.asked == [[[8, 1, 0, 0, 5, 0, 0, 0, 0, 0, 5, 0, 7, 2]]]


@pytest.mark.parametrize("too_long", ["error", "cut"])
async def test_text_that_is_too_long_is_an_error_by_name_or_cut_and_counted(
    too_long: str, tmp_path: Path
) -> None:
    gang = Gang(longest=4)
    own = model(tmp_path, gang)
    terms = (term(name="kind", too_long=too_long),)
    long, short = await outcomes(RewardModelScorer("run", terms, {"helpful": own}), item("bc"), item("b"))
    assert short.total == 6 + 1 + 5 + 2
    if too_long == "error":
        assert long.total is None
        assert long.failure.startswith("reward kind: the text has 5 tokens, and the model reads 4")
        assert (gang.asked, own.take_cut()) == ([[[6, 1, 5, 2]]], 0)
    else:
        assert gang.asked == [[[1, 5, 2, 3], [6, 1, 5, 2]]]
        assert named_parts(long.verdicts) == [("kind", 11.0), ("kind[cut]", 1.0)]
        assert named_parts(short.verdicts)[1] == ("kind[cut]", 0.0)
        assert (own.take_cut(), own.take_cut()) == (1, 0)


async def test_text_without_a_token_is_a_failure_and_asks_nobody(tmp_path: Path) -> None:
    gang = Gang()
    scorer = RewardModelScorer("run", (term(template="{response}"),), {"helpful": model(tmp_path, gang)})
    (empty,) = await outcomes(scorer, item(""))
    assert (empty.total, empty.failure, gang.asked) == (None, "reward helpful: there is no text to judge", [])


async def test_a_token_id_that_the_model_lacks_is_a_failure_of_its_sample_alone(tmp_path: Path) -> None:
    gang = Gang(vocabulary=3)
    scorer = RewardModelScorer("run", (term(template="{response}"),), {"helpful": model(tmp_path, gang)})
    unknown, known = await outcomes(scorer, item("bc"), item("b"))
    assert (known.total, gang.asked) == (2.0, [[[2]]])
    assert unknown.failure.endswith("its tokenizer gives token id 3, and the model has ids 0 to 2")


async def test_terms_with_labels_of_one_model_share_its_answer(tmp_path: Path) -> None:
    gang = Gang(labels=2)
    choices = [{"model": "helpful", "label": label} for label in (1, 0)]
    terms = tuple(term(choice, name=f"label{choice['label']}", weight=0.5) for choice in choices)
    (found,) = await outcomes(RewardModelScorer("run", terms, {"helpful": model(tmp_path, gang)}), item("b"))
    assert named_parts(found.verdicts) == [("label1", 4.0), ("label0", 14.0)] and found.total == 9.0
    assert len(gang.asked) == 1


@pytest.mark.parametrize("label", [None, 2])
async def test_a_label_that_the_model_lacks_is_a_failure_and_never_another_label(
    label: int | None, tmp_path: Path
) -> None:
    terms = (term({"model": "helpful", "label": label}),)
    scorer = RewardModelScorer("run", terms, {"helpful": model(tmp_path, Gang(labels=2))})
    (found,) = await outcomes(scorer, item("b"))
    assert found.failure == f"reward helpful: the model gives 2 scores, and label is {label}"


class Functions:
    """Gives every sample its values; fails, or leaves the sample out, after as many as there are."""

    def __init__(
        self, terms: tuple[RewardTermConfig, ...], *values: float, whole_groups: bool = True
    ) -> None:
        self.terms = terms
        self.asked: list[str] = []
        self._values = values
        self._whole_groups = whole_groups

    async def needs(self) -> Needs:
        return Needs(whole_groups=self._whole_groups)

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        self.asked += [one.sample_id for one in items]
        components = [
            pb.RewardComponent(reward=own.shown, value=value)
            for own, value in zip(self.terms, self._values, strict=False)
        ]
        outcome = pb.ScoreOutcome(value=pb.RewardValue(components=components))
        if len(components) < len(self.terms):
            failed = self.terms[len(components)].shown
            error = pb.RewardError(reward=failed, message="it raised")
            outcome = pb.ScoreOutcome(error=error, before=components)
        return {one.sample_id: outcome for one in items}


@pytest.mark.parametrize("values", [(1.0, 3.0), ()])
async def test_terms_of_models_stand_where_the_run_names_them(
    values: tuple[float, ...], tmp_path: Path
) -> None:
    terms = (term("exact", weight=2.0), term(weight=0.5), term("length"))
    scorer = TermsInOrder(
        terms,
        Functions((terms[0], terms[2]), *values),
        RewardModelScorer("run", terms[1:2], {"helpful": model(tmp_path, Gang())}),
    )
    assert (await scorer.needs()).whole_groups, "as the functions beside the models do"
    (found,) = await outcomes(scorer, item("b"))
    if values:
        assert (found.terms, found.total) == ((1.0, 14.0, 3.0), 2.0 + 7.0 + 3.0)
        assert [verdict.reward for verdict in found.verdicts] == ["exact", "helpful", "length"]
        assert found.verdicts[1].seconds > 0
    else:
        assert (found.total, found.failure) == (None, "it raised")


@pytest.mark.parametrize("whole_groups", [True, False])
async def test_functions_of_whole_groups_never_see_a_sample_that_a_model_refused(
    whole_groups: bool, tmp_path: Path
) -> None:
    terms = (term("ranks"), term(template="{response}"))
    functions = Functions(terms[:1], 1.0, whole_groups=whole_groups)
    models = RewardModelScorer("run", terms[1:], {"helpful": model(tmp_path, Gang(longest=1))})
    long, short = await outcomes(TermsInOrder(terms, functions, models), item("bc"), item("b"))
    assert (short.total, long.total) == (1.0 + 2.0, None)
    assert "the model reads 1" in long.failure
    assert functions.asked == (["b"] if whole_groups else ["bc", "b"])


@pytest.mark.parametrize("refused", [True, False])
async def test_what_terms_said_before_another_one_failed_is_kept_whoever_failed(
    refused: bool, tmp_path: Path
) -> None:
    terms = (term(template="{response}"), term("exact"), term("f.py:f"))
    functions = Functions(terms[1:], 1.0, *([3.0] if refused else []), whole_groups=False)
    gang = Gang(longest=1)
    scorer = TermsInOrder(
        terms, functions, RewardModelScorer("run", terms[:1], {"helpful": model(tmp_path, gang)})
    )
    (found,) = await outcomes(scorer, item("bc" if refused else "b"))
    said = [(one.reward, one.value) for one in found.verdicts]
    if refused:
        assert said == [("exact", 1.0), ("f.py:f", 3.0), ("helpful", None)]
    else:
        assert said == [("helpful", 2.0), ("exact", 1.0), ("f.py:f", None)]


async def test_a_gang_that_does_not_answer_gives_no_sample_a_reward(tmp_path: Path) -> None:
    scorer = RewardModelScorer("run", (term(),), {"helpful": model(tmp_path, Lost())})
    with pytest.raises(Unavailable, match=r"does not answer.*reward_model-helpful"):
        await outcomes(scorer, item("b"))
