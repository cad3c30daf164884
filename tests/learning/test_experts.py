"""A mixture of experts reaches the real CPU kernels of vLLM as its trainer has it; one engine, in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla_generator.engine.vllm.fused_experts import expert_layers, proving_experts
from flotilla_generator.engine.vllm.live_weights import Exchange, LiveModel, Loader
from flotilla_trainer.rank.checkpoint_layout import CheckpointLayout
from flotilla_weights.digest import tensor_digests
from flotilla_weights.inbox import StagedModel

pytestmark = pytest.mark.timeout(600)

MAKE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "make_model.py"
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "",
}
PROMPT = [3, 4, 13, 5, 6, 15]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    subprocess.run([sys.executable, MAKE_MODEL, "--moe", "--out", folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    """A whole vLLM whose worker lives in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from vllm import LLM

        yield LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 28,
            max_model_len=64,
        )


@pytest.fixture(scope="module")
def live(llm: Any) -> LiveModel:
    (worker,) = llm.collective_rpc(lambda worker: worker)
    return LiveModel(Loader(worker))


def trained(folder: Path, seed: int) -> Any:
    """The model as updates might leave it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.05)
    return model


def staged(model: Any) -> StagedModel:
    """What the trainer would publish of it."""
    specs = [(name, parameter.dtype, parameter.shape) for name, parameter in model.named_parameters()]
    layout = CheckpointLayout.of(model, specs)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def gather(groups: Iterable[list[str]]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        return ((name, [parameters[name]]) for name in chain.from_iterable(groups))

    order = [name for name, _, _ in layout.specs(specs)]
    named = [(name, torch.cat(rows)) for name, rows in layout.rows([order], gather)]
    return StagedModel(named, tensor_digests(tensor for _, tensor in named), {}, 0.0)


def replaced(live: LiveModel, brought: StagedModel) -> dict[str, Any]:
    following = live.prepare(brought, seed=1)
    assert isinstance(following, Exchange), "experts are packed in parameters, which a twin has"
    while not following.prove(1.0):
        pass
    return following.replace()


def difference(llm: Any, model: Any) -> float:
    """Largest difference of logprobs between vLLM and torch, on what vLLM samples."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=24, logprobs=0, detokenize=False, ignore_eos=True
    )
    ((answer,),) = (
        output.outputs
        for output in llm.generate(TokensPrompt(prompt_token_ids=PROMPT), sampling, use_tqdm=False)
    )
    tokens = list(answer.token_ids)
    theirs = torch.tensor(
        [at[token].logprob for token, at in zip(tokens, answer.logprobs, strict=True)], dtype=torch.float32
    )
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    ours = logprobs[len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((ours - theirs).abs().max())


def test_experts_that_a_twin_brought_decode_as_the_trainer_computes(
    llm: Any, live: LiveModel, folder: Path
) -> None:
    for seed in (1, 2):
        model = trained(folder, seed)
        assert replaced(live, staged(model))["error"] == ""
        assert difference(llm, model) < TOLERANCE


def test_real_experts_that_are_stale_swapped_or_missing_are_named(
    llm: Any, live: LiveModel, folder: Path
) -> None:
    brought = staged(trained(folder, 3))
    assert replaced(live, brought)["error"] == ""
    model = live.loader.live
    assert not any(proving_experts(model, brought))
    _, layer = expert_layers(model)[1]
    layer.w2_weight.data[5].view(-1)[7] += 1e-6
    layer.w13_weight.data[[2, 3]] = layer.w13_weight.data[[3, 2]]
    layers = "model.layers.1.mlp.experts"
    found = [fault for fault in proving_experts(model, brought) if fault]
    assert [fault.split(".")[5] for fault in found] == ["2", "3", "5"]
    assert all(fault.startswith(layers) for fault in found)
    gone = "model.layers.0.mlp.experts.6.up_proj.weight"
    fewer = StagedModel([(n, t) for n, t in brought.weights if n != gone], [], {}, 0.0)
    assert any((fault or "").startswith(gone) for fault in proving_experts(model, fewer))
    assert replaced(live, brought)["error"] == "", "a later version repairs what was wrong"


def test_experts_that_are_reloaded_in_place_decode_as_the_trainer_computes(
    llm: Any, live: LiveModel, folder: Path
) -> None:
    live.has_twins = False
    model = trained(folder, 4)
    assert live.prepare(staged(model), seed=1).replace()["error"] == ""
    assert difference(llm, model) < TOLERANCE
