"""Adapters on real ranks give the numbers of the formula on any number of ranks, and the base never changes."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.errors import FlotillaError, InvalidRequest, Mismatch, NotFound, Unimplemented
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import assert_same_gradients, logprobs, plain_model, trained_tokens
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_weights.group import Receiver
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Manifest

TOLERANCE = 1e-5
TEMPERATURE = 0.7
SIZES = [4, 1, 6, 3]
SEED = 7
RANK, ALPHA = 4, 8.0
LIMIT_S = 60.0
TENSORS = "adapter_model.safetensors"

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
Groups = list[pb.TrainGroup]
MakeGroups = Callable[..., Groups]
Adapters = dict[str, torch.Tensor]


def lora(**changes: Any) -> dict[str, Any]:
    return {"rank": RANK, "alpha": ALPHA, **changes}


LORA = lora()
ATTENTION = lora(targets=["q_proj", "o_proj"])


class AdaptedModel:
    """A model of transformers whose linear layers add scale * B A x, written as the formula says, in float64."""

    def __init__(self, folder: Path) -> None:
        self.model = plain_model(folder).requires_grad_(False)
        self.adapters: Adapters = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                self._adapt(name, layer)

    def _adapt(self, name: str, layer: torch.nn.Linear) -> None:
        a = torch.from_numpy(first_a(f"{name}.lora_A.weight", layer.in_features)).double().requires_grad_()
        b = torch.zeros(layer.out_features, RANK, dtype=torch.float64, requires_grad=True)
        self.adapters |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        layer.register_forward_hook(lambda _, inputs, output: output + ALPHA / RANK * inputs[0] @ a.T @ b.T)

    def set(self, adapters: Adapters) -> None:
        with torch.no_grad():
            for name, tensor in adapters.items():
                self.adapters[name].copy_(tensor)

    def logprobs(self, group: pb.TrainGroup, sample: pb.TrainSample, temperature: float) -> torch.Tensor:
        prompt, response = from_tensor(group.prompt_token_ids), from_tensor(sample.token_ids)
        return logprobs(self.model, prompt, response, temperature)

    def all_logprobs(self, groups: Groups) -> list[np.ndarray]:
        return [
            self.logprobs(group, sample, TEMPERATURE).detach().numpy()
            for group in groups
            for sample in group.samples
        ]

    def sft_gradients(self, groups: Groups) -> Adapters:
        """Return the gradient of the mean negative log-probability of all answer tokens that count."""
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for group in groups:
            for sample in group.samples:
                mask = trained_tokens(sample)
                total = total - self.logprobs(group, sample, 1.0)[mask].sum()
                tokens += int(mask.sum())
        (total / tokens).backward()
        return {name: tensor.grad for name, tensor in self.adapters.items()}


def first_a(name: str, width: int) -> np.ndarray:
    random = torch.Generator().manual_seed(ids.derive_seed("lora", SEED, name))
    return torch.empty(RANK, width).uniform_(-1, 1, generator=random).numpy() / math.sqrt(width)


async def ranks_gradients(trainer: Any, groups: Groups) -> Adapters:
    _, gradients = await trainer.gradient(groups)
    return {name: torch.from_numpy(array) for name, array in gradients.items()}


async def ranks_logprobs(trainer: Any, groups: Groups) -> list[np.ndarray]:
    reply = await trainer.logprobs(groups, temperature=TEMPERATURE)
    return [from_tensor(item.logprobs) for item in reply.sequences]


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=TOLERANCE, rtol=TOLERANCE)


async def with_moved_adapters(trainer: Any, groups: Groups, **changes: Any) -> None:
    """A session whose B is far from zero."""
    await trainer.open("sft", lora=changes.pop("lora", LORA), learning_rate=0.05, **changes)
    for step in range(2):
        await trainer.train(step, groups)


async def assert_new_adapters_change_nothing(trainer: Any, groups: Groups) -> None:
    await trainer.open("sft")
    base = await ranks_logprobs(trainer, groups)
    await trainer.open("sft", lora=LORA)
    for ours, theirs in zip(await ranks_logprobs(trainer, groups), base, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("packing", ["off", "on"])
async def test_gradients_of_the_adapters_equal_the_formula_on_any_ranks(
    trainer: Any, groups_of: MakeGroups, packing: int
) -> None:
    groups = groups_of(SIZES)
    plain = AdaptedModel(trainer.model)
    layout = {"packing": packing, "tokens_per_microbatch": 64, "activation_checkpointing": packing == 1}
    await trainer.open("sft", lora=LORA, epsilon=1e-3, **layout)
    for step in range(2):
        optimizer = torch.optim.AdamW(plain.adapters.values(), lr=1e-2, eps=1e-3, weight_decay=0.0)
        for tensor in plain.adapters.values():
            tensor.grad = None
        expected = plain.sft_gradients(groups)
        gradients = await ranks_gradients(trainer, groups)
        assert_same_gradients(gradients, expected, TOLERANCE)
        if step == 0:
            result = await trainer.train(step, groups)
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
            assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            for tensor in plain.adapters.values():
                tensor.grad *= min(1.0, 1.0 / norm)
            optimizer.step()


async def test_adapters_that_begin_change_no_number_of_the_base(trainer: Any, groups_of: MakeGroups) -> None:
    await assert_new_adapters_change_nothing(trainer, groups_of(SIZES, seed=3))


async def test_a_session_of_all_weights_after_one_of_adapters_trains_all_weights(
    trainer: Any, groups_of: MakeGroups
) -> None:
    groups = groups_of(SIZES, seed=3)
    await trainer.open("sft")
    before = await ranks_gradients(trainer, groups)
    await with_moved_adapters(trainer, groups)
    await trainer.open("sft")
    after = await ranks_gradients(trainer, groups)
    assert after.keys() == before.keys()
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient, atol=1e-6, rtol=1e-5)


async def test_the_exported_sum_is_the_model_that_was_trained(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES, seed=4)
    await with_moved_adapters(trainer, groups)
    ours = await ranks_logprobs(trainer, groups)
    merged = AutoModelForCausalLM.from_pretrained(
        await trainer.export(tmp_path / "merged", 2), dtype=torch.float64
    )
    plain = AdaptedModel(trainer.model)
    plain.model = merged
    assert_close(ours, plain.all_logprobs(groups))


async def test_the_export_has_the_type_that_is_asked_for(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await with_moved_adapters(trainer, groups_of(SIZES, seed=4))
    whole = load_file(await trainer.export(tmp_path / "whole", 2) / "model.safetensors")
    half = load_file(await trainer.export(tmp_path / "half", 2, "bfloat16") / "model.safetensors")
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    for name, tensor in whole.items():
        torch.testing.assert_close(half[name].float(), tensor, atol=0, rtol=2**-7)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(InvalidRequest, match="not exported as 'int8'"):
        await trainer.export(tmp_path / "none", 2, "int8")


async def test_the_exported_adapters_are_peft_s_sum_over_the_base(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES, seed=4)
    await with_moved_adapters(trainer, groups)
    ours = await ranks_logprobs(trainer, groups)
    folder = await trainer.export(tmp_path / "merged", 2) / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == str(trainer.model)
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    tensors = load_file(folder / TENSORS)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    plain = AdaptedModel(trainer.model)
    plain.set({name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()})
    assert_close(ours, plain.all_logprobs(groups))

    await trainer.open("sft", lora=lora(adapter=str(folder)))
    for mine, before in zip(await ranks_logprobs(trainer, groups), ours, strict=True):
        np.testing.assert_array_equal(mine, before)


async def test_only_the_targets_have_adapters_and_nothing_else_moves(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES, seed=5)
    await with_moved_adapters(trainer, groups, lora=ATTENTION)
    names = (await ranks_gradients(trainer, groups)).keys()
    assert {name.split(".")[-3] for name in names} == {"q_proj", "o_proj"}
    exported = AutoModelForCausalLM.from_pretrained(await trainer.export(tmp_path / "merged", 2))
    first = dict(AutoModelForCausalLM.from_pretrained(trainer.model).named_parameters())
    moved = {name for name, tensor in exported.named_parameters() if not torch.equal(tensor, first[name])}
    assert moved == {
        f"model.layers.{layer}.self_attn.{target}.weight"
        for layer in (0, 1)
        for target in ("q_proj", "o_proj")
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lora(targets=["query"]), "no linear layer 'query'.*down_proj"),
        (lora(targets=["lm_head"]), "head cannot have adapters.*embeddings"),
        (lora(rank=0), r"spec\.lora\.rank"),
        (lora(alpha=math.nan), r"lora\.alpha is nan"),
    ],
)
async def test_adapters_that_cannot_be_are_named_and_the_trainer_goes_on(
    trainer: Any, groups_of: MakeGroups, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await trainer.open("sft", lora=given)
    await trainer.open("sft", lora=LORA)
    await trainer.train(0, groups_of(SIZES))


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"r": 8}, Mismatch, r"another rank.*8 there, lora\.rank is 4.*set lora\.rank to 8"),
        ({"lora_alpha": 16}, Mismatch, r"another alpha.*set lora\.alpha to 16"),
        ({"use_dora": True}, Unimplemented, "use_dora is True"),
        ({"peft_type": "IA3"}, Unimplemented, "peft_type is 'IA3'"),
        (None, NotFound, "no adapter in this folder"),
    ],
)
async def test_a_folder_that_holds_no_such_adapters_is_refused_by_its_key(
    trainer: Any, tmp_path: Path, config: dict[str, Any] | None, kind: type[FlotillaError], message: str
) -> None:
    folder = tmp_path / "adapter"
    await trainer.open("sft", lora=LORA)
    shutil.copytree(await trainer.export(tmp_path / "model", 0) / "adapter", folder)
    path = folder / "adapter_config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(kind, match=message):
        await trainer.open("sft", lora=lora(adapter=str(folder)))


async def test_adapters_of_another_model_are_refused_by_a_tensor_s_name_and_change_nothing(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await trainer.open("sft", lora=LORA)
    folder = await trainer.export(tmp_path / "model", 0) / "adapter"
    path, name = folder / TENSORS, "model.layers.1.mlp.up_proj.lora_A.weight"
    tensors = load_file(path)
    for changed, what in (
        ({**tensors, f"base_model.model.{name}": torch.zeros(RANK, 48)}, r"is \(4, 48\) there and \(4, 32\)"),
        ({key: tensors[key] for key in tensors if name not in key}, "is absent there"),
        (
            {**tensors, f"base_model.model.{name.replace('1', '9')}": torch.zeros(4, 32)},
            "is .* and absent here",
        ),
    ):
        save_file(changed, path)
        with pytest.raises(Mismatch, match=rf"lora_A\.weight {what}"):
            await trainer.open("sft", lora=lora(adapter=str(folder)))
    await assert_new_adapters_change_nothing(trainer, groups_of(SIZES, seed=3))


async def test_the_reference_is_the_model_without_its_adapters(
    trainer: Any, groups_of: MakeGroups, policy_of: Callable[..., Any]
) -> None:
    groups = groups_of(SIZES, seed=6)
    await trainer.open("sft")
    base = np.concatenate(await ranks_logprobs(trainer, groups))
    kl = {"placement": "loss", "estimator": "k3", "coefficient": 0.1}
    await trainer.open(policy_of(kl=kl), lora=LORA, learning_rate=0.05)
    for step in range(2):
        metrics = (await trainer.train(step, groups)).metrics
    assert metrics["kl/mean"] > 1e-3
    session = trainer.manager.session(trainer.run_id)
    batch = UpdateBatch.read(groups, session.ranks.limits, session.version)
    objective = session.updates.progress.objective
    reference = (await session.updates.preparation.scores(batch, objective, reference=True))["logprobs"]
    np.testing.assert_array_equal(reference, base)
    assert not np.allclose(np.concatenate(await ranks_logprobs(trainer, groups)), base, atol=1e-3)


async def test_a_checkpoint_of_any_number_of_ranks_brings_adapters_and_moments_back(
    trainer: Any, groups_of: MakeGroups, shelf: dict[Path, list[float]], tmp_path: Path, model_maker: Any
) -> None:
    groups, changes = groups_of(SIZES), {"lora": LORA, "learning_rate": 0.05, "epsilon": 1e-3}
    await with_moved_adapters(trainer, groups, epsilon=1e-3)
    ours = tmp_path / "step-000002"
    await trainer.save(ours, Version(0, 2))
    names = {path.name for path in ours.iterdir()}
    assert "adapter" in names and "model" not in names
    # A, B and two moments of each, on rank 0 alone; no weights.
    assert sum(map(numbers_in, (ours / "shards").iterdir())) == 3 * numbers_in(ours / "adapter" / TENSORS)
    shelf[ours] = [(await trainer.train(step, groups)).metrics["loss"] for step in (2, 3)]
    for folder, losses in shelf.items():
        await trainer.open("sft", lineage=1, **changes)
        await trainer.load(folder)
        again = [(await trainer.train(step, groups, lineage=1)).metrics["loss"] for step in (2, 3)]
        np.testing.assert_allclose(again, losses, atol=TOLERANCE)

    await trainer.open("sft", initial_weights=str(model_maker(tmp_path / "other", seed=9)), **changes)
    with pytest.raises(Mismatch, match="weights under the adapters are not those"):
        await trainer.load(ours)
    await trainer.open("sft")
    with pytest.raises(Mismatch, match=r"parameter/model.*absent there"):
        await trainer.load(ours)


async def test_the_first_publication_moves_the_base_and_later_ones_the_adapters_alone(
    trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    groups = groups_of(SIZES, seed=8)
    await with_moved_adapters(trainer, groups)
    for epoch in (1, 2):
        opened = await trainer.open_group(epoch)
        manifest = Manifest.from_proto(opened.manifest)
        assert manifest.adapters is not None
        small = manifest.adapters.manifest.nbytes
        inbox = Inbox(receiver := Receiver(opened.group, 1, manifest), manifest)
        await asyncio.to_thread(receiver.connect)
        for step in (2 * epoch, 2 * epoch + 1):
            published, _ = await asyncio.gather(
                trainer.publish(epoch, step), asyncio.to_thread(inbox.receive)
            )
            first = step == 2 * epoch
            assert published.bytes == small + (manifest.nbytes if first else 0)
            assert list(published.digests.tensor_digests) == inbox.digests
            assert published.digests.manifest_digest == opened.manifest.digest
            model = AutoModelForCausalLM.from_pretrained(await trainer.export(tmp_path / str(step), step))
            expected, staged = dict(model.named_parameters()), inbox.take()
            assert staged is not None
            arrived = dict(staged.tensors(torch.device("cpu")))
            assert arrived.keys() == expected.keys()
            for name, tensor in arrived.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
            await trainer.train(step, groups)
        receiver.close()


@pytest.fixture(scope="module")
def shelf() -> dict[Path, list[float]]:
    """Checkpoints of the gangs so far, with the losses of the two updates after each."""
    return {}


def numbers_in(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())
