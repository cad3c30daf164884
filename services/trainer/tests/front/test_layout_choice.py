"""Rows are packed where it pays and the model allows it, and never silently against the configuration."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from flotilla_core.config import BatchingConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.front.session_settings import layout

REFUSAL = "MambaForCausalLM carries a state beyond attention from token to token"


def facts(device: str, refusal: str = "") -> dict[str, Any]:
    return {"device": device, "packing_refusal": refusal, "attention_crossover_tokens": 1e4}


def chosen(packing: Literal["auto", "on", "off"], device: str, refusal: str = "") -> bool:
    batching = BatchingConfig(tokens_per_microbatch=64, packing=packing)
    return layout(batching, facts(device, refusal), ranks=2).packed


def test_rows_are_packed_by_default_on_gpus_only() -> None:
    assert chosen("auto", "cuda:0")
    assert not chosen("auto", "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_wish_is_followed_on_every_device(device: str) -> None:
    assert chosen("on", device)
    assert not chosen("off", device)


def test_a_model_that_cannot_be_packed_gets_padded_rows_unless_packing_was_asked_for() -> None:
    assert not chosen("auto", "cuda:0", REFUSAL)
    assert not chosen("off", "cuda:0", REFUSAL)
    with pytest.raises(FailedPrecondition, match="state beyond attention"):
        chosen("on", "cuda:0", REFUSAL)
