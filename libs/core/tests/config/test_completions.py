"""The beginning of an override is completed from the models: section by section, then the values of a key."""

from __future__ import annotations

import pytest

from flotilla_core.config import RunConfig, StackConfig, completions
from flotilla_core.config.model import ConfigModel


def offered(begun: str, model: type[ConfigModel] = RunConfig) -> list[str]:
    return [text for text, _ in completions(model, begun)]


def test_keys_are_offered_one_section_at_a_time() -> None:
    assert offered("ro") == offered("rollout.") != []
    assert {"rollout.prompts_per_step=", "rollout.sampling."} <= set(offered("ro"))
    assert offered("check") == offered("checkpoint.")
    assert set(offered("exp")) == {"export_final=", "export_dtype="}
    assert offered("rollout.sampling.min") == [
        "rollout.sampling.min_response_tokens=",
        "rollout.sampling.min_response_tokens=0",
    ]


def test_a_section_of_several_types_offers_the_keys_of_all() -> None:
    assert {"algorithm.type=", "algorithm.loss.", "algorithm.beta="} <= set(offered("algo"))
    assert {"algorithm.loss.type=", "algorithm.loss.dual_clip=", "algorithm.loss.tau="} <= set(
        offered("algorithm.loss")
    )


@pytest.mark.parametrize(
    ("begun", "values"),
    [
        ("algorithm.type=gr", ["grpo", "grpo_passk"]),
        ("loop=", ["coordinator", "client"]),
        ("export_fi", ["", "true", "false"]),
        ("export_final=f", ["false"]),
        ("algorithm.loss.ov", ["", "sequence", "segment"]),
        ("initial_weights=", ["null"]),
        ("algorithm.correction.fail_at=", ["auto", "null"]),
    ],
)
def test_a_single_key_comes_with_the_values_of_its_enumeration(begun: str, values: list[str]) -> None:
    assert [text.partition("=")[2] for text in offered(begun)] == values


def test_the_default_is_offered_where_all_types_have_the_same() -> None:
    assert ("optimizer.weight_decay=0.0", "the default") in completions(RunConfig, "optimizer.weight_decay")
    assert offered("algorithm.loss.clip_low=") == []
    assert offered("data.train=") == []


def test_names_of_a_user_and_places_in_a_list_lead_to_the_keys_below() -> None:
    assert offered("teachers.", StackConfig) == offered("rewards.") == []
    assert "teachers.math.replicas=" in offered("teachers.math.", StackConfig)
    assert "rewards.0.weight=" in offered("rewards.0.")


def test_what_fits_no_key_has_no_completion() -> None:
    assert offered("algoritm.") == offered("nothing") == offered("steps.more") == offered("=") == []


def test_a_key_says_what_it_means() -> None:
    assert ("seed=", "Every other seed is derived from it") in completions(RunConfig, "seed")
    ((_, meaning),) = completions(RunConfig, "data.difficulty_field")
    assert meaning == "Column with the number that `order: by_field` sorts by, the same in every epoch"
