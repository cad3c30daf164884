"""Reward models on real ranks: the scores after the last token of a text, against transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest, RankFailed
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_testing.session_specs import as_struct
from flotilla_testing.tiny_qwen3 import VOCABULARY

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TOLERANCE = 1e-5
PADDING = 0
NAME = "reward_model-helpful"
LAYOUTS = {
    "one at a time": {"packing": "off", "tokens_per_microbatch": 1},
    "padded": {"packing": "off", "tokens_per_microbatch": 64},
    "padded at once": {"packing": "off", "tokens_per_microbatch": 4096},
    "packed": {"packing": "on", "tokens_per_microbatch": 64},
    "packed at once": {"packing": "on", "tokens_per_microbatch": 4096},
}


@pytest.fixture(scope="module")
def classifier(
    model_maker: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Writes a model for sequence classification with so many labels, as transformers does."""

    def make(labels: int) -> Path:
        base = model_maker(tmp_path_factory.mktemp("base"), 5)
        folder = tmp_path_factory.mktemp("classifier")
        torch.manual_seed(labels)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=labels, dtype=torch.float32
        )
        torch.nn.init.normal_(model.score.weight, std=0.5)
        model.config.pad_token_id = PADDING
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}", "utf-8")
        return folder

    return make


@pytest.fixture(scope="module")
def texts() -> list[np.ndarray]:
    """Of unequal lengths, from one token to as many as the model reads; none is the one that stands for padding."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 64, *rng.integers(2, 64, 20)]
    return [rng.integers(PADDING + 1, VOCABULARY, length).astype(np.int32) for length in lengths]


async def opened(gang: Any, **batching: Any) -> None:
    """A session of a new run, in place of the last one."""
    await gang.call("CloseSession", pb.CloseSessionRequest(run_id=gang.run_id))
    gang.runs += 1
    spec = session_pb2.SessionSpec(role=session_pb2.ROLE_REWARD_MODEL, batching=as_struct(batching))
    await gang.call("OpenSession", pb.OpenSessionRequest(run_id=gang.run_id, spec=spec))


async def scores(gang: Any, texts: list[np.ndarray]) -> np.ndarray:
    sequences = [
        pb.ScoredSequence(sequence_id=str(number), prompt_token_ids=to_tensor(text))
        for number, text in enumerate(texts)
    ]
    request = pb.ComputeValuesRequest(run_id=gang.run_id, sequences=sequences, after_last=True)
    reply = await gang.call("ComputeValues", request)
    assert [one.sequence_id for one in reply.sequences] == [str(number) for number in range(len(texts))]
    return np.stack([from_tensor(one.values) for one in reply.sequences])


def plain_scores(folder: Path, texts: list[np.ndarray], side: str) -> np.ndarray:
    """Return what transformers says of all texts in one batch, padded on a side as a tokenizer pads."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, texts))
    ids, seen = (torch.full((len(texts), width), fill) for fill in (PADDING, 0))
    for row, text in enumerate(texts):
        own = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, own], seen[row, own] = torch.from_numpy(text).long(), 1
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=seen).logits
    return logits.numpy()


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_scores_equal_those_of_transformers_for_any_layout_and_padding(
    start_trainer: Callable[..., Any],
    classifier: Callable[..., Path],
    texts: list[np.ndarray],
    labels: int,
    ranks: int,
) -> None:
    folder = classifier(labels)
    wanted = plain_scores(folder, texts, "right")
    np.testing.assert_allclose(plain_scores(folder, texts, "left"), wanted, atol=TOLERANCE)
    assert wanted.std(axis=0).min() > 0.1
    async with start_trainer(model=folder, name=NAME, nproc=ranks) as gang:
        for layout in LAYOUTS.values():
            await opened(gang, **layout)
            np.testing.assert_allclose(await scores(gang, texts), wanted, atol=TOLERANCE)
            one_by_one = [await scores(gang, [text]) for text in texts[:4]]
            np.testing.assert_allclose(np.concatenate(one_by_one), wanted[:4], atol=TOLERANCE)
        with pytest.raises(FailedPrecondition, match="has no log-probabilities"):
            await gang.call("ComputeLogprobs", pb.ComputeLogprobsRequest(run_id=gang.run_id))
        own = pb.ScoredSequence(
            sequence_id="a", prompt_token_ids=to_tensor(texts[1]), token_ids=to_tensor(texts[1])
        )
        request = pb.ComputeValuesRequest(run_id=gang.run_id, sequences=[own], after_last=True)
        with pytest.raises(InvalidRequest, match="scores whole sequences"):
            await gang.call("ComputeValues", request)
        assert not gang.lost


async def test_a_model_with_the_value_head_of_trl_gives_its_values(
    start_trainer: Callable[..., Any],
    model_maker: Callable[..., Path],
    texts: list[np.ndarray],
    tmp_path: Path,
) -> None:
    folder = model_maker(tmp_path / "model", 6)
    weight, bias = torch.randn(1, 32, generator=torch.Generator().manual_seed(2)), torch.tensor([0.25])
    tensors = load_file(folder / "model.safetensors")
    head = {"v_head.summary.weight": weight, "v_head.summary.bias": bias}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    body = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        body.score.weight.copy_(weight)
        alone = [body(input_ids=torch.from_numpy(text).long()[None]).logits for text in texts]
    async with start_trainer(model=folder, name=NAME, nproc=1) as gang:
        await opened(gang)
        np.testing.assert_allclose(await scores(gang, texts), torch.cat(alone) + bias, atol=TOLERANCE)


@pytest.mark.parametrize("labels", [1, 2])
async def test_an_encoder_gives_what_its_own_class_gives_for_any_layout(
    start_trainer: Callable[..., Any], texts: list[np.ndarray], labels: int, tmp_path: Path
) -> None:
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=66,
        initializer_range=0.3,
        pad_token_id=1,
        num_labels=labels,
    )
    torch.manual_seed(1)
    model = RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    texts = [np.maximum(text, config.pad_token_id + 1) for text in texts]
    with torch.no_grad():
        alone = [model(input_ids=torch.from_numpy(text).long()[None]).logits for text in texts]
    wanted = torch.cat(alone).numpy()
    assert wanted.std(axis=0).min() > 0.01
    async with start_trainer(model=tmp_path, name=NAME, nproc=2) as gang:
        for layout in (one for name, one in LAYOUTS.items() if "packed" not in name):
            await opened(gang, **layout)
            np.testing.assert_allclose(await scores(gang, texts), wanted, atol=TOLERANCE)
        long = np.full(65, 5, np.int32)
        with pytest.raises(InvalidRequest, match="the model takes 64"):
            await scores(gang, [long])
        with pytest.raises(FailedPrecondition, match="cannot be packed"):
            await opened(gang, packing="on")


async def test_a_language_model_cannot_be_a_reward_model(start_trainer: Callable[..., Any]) -> None:
    with pytest.raises(RankFailed, match=r"no head of scores: score\.weight or v_head\.summary\.weight"):
        async with start_trainer(name=NAME, nproc=1):
            pass
