"""Sections of trackers: what does not belong into them is refused by name, and no secret is repeated."""

from __future__ import annotations

import pytest

from flotilla_core.config import RunConfig, TensorBoardConfig, WandbConfig, dump_yaml, load_text
from flotilla_core.errors import InvalidConfig

RUN = {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{type: wandb, api_key: x}", "api_key is no key of a configuration, which is saved"),
        ("{type: wandb, proxy: 'http://user:pw@proxy:1'}", "carries credentials"),
        ("{type: mlflow, tracking_uri: 'http://user:pw@server'}", "carries credentials"),
        ("{type: wandbb}", "did you mean wandb"),
        ("{type: tensorboard, proxy: none}", "another trackers"),
    ],
)
def test_what_does_not_belong_into_a_tracker_is_refused(section: str, expected: str) -> None:
    text = dump_yaml(RunConfig.model_validate(RUN)).replace("trackers: []", f"trackers: [{section}]")
    with pytest.raises(InvalidConfig) as caught:
        load_text(RunConfig, text)
    assert expected in str(caught.value) and "pw" not in str(caught.value)


def test_a_bare_name_is_a_tracker_with_defaults_and_no_name_comes_twice() -> None:
    text = dump_yaml(RunConfig.model_validate(RUN))
    config = load_text(RunConfig, text, overrides=["trackers=[tensorboard, {type: wandb, mode: offline}]"])
    assert config.trackers == (TensorBoardConfig(), WandbConfig(mode="offline"))
    assert load_text(RunConfig, dump_yaml(config)) == config
    with pytest.raises(InvalidConfig, match="wandb is named twice"):
        load_text(RunConfig, text, overrides=["trackers=[wandb, wandb]"])
