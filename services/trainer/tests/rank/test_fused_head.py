"""The fused head gives the scores and the gradients that plain operations of torch give.

In a model it also gives the weights: test_fused_head_learning.py.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from flotilla_trainer.rank import fused_head
from flotilla_trainer.rank.fused_head import PLAIN, HeadOperations, head_scores
from flotilla_trainer.rank.head_rules import HeadRules

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOKENS = 5 if INTERPRETED else 23
"""The interpreter takes milliseconds for what a GPU does in microseconds."""
WIDTH, VOCABULARY = 16, 131
CPU = torch.device("cpu")
RULES = {
    "plain": HeadRules(),
    "cold": HeadRules(temperature=0.7),
    "scaled": HeadRules(scale=1.7, temperature=1.3),
    "capped": HeadRules(scale=0.5, softcap=2.0, temperature=0.7),
}
CHUNKS = [(100, 0.0), (2, 0.3), (5, 0.0)]
"""Tokens of a chunk, and what the entropy earns."""
OF_KERNELS = [(100, 0.0, "plain"), (2, 0.3, "scaled"), (2, 0.3, "capped")]
CASES = OF_KERNELS if INTERPRETED else [(*chunks, rules) for chunks in CHUNKS for rules in RULES]
Scores = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> HeadOperations:
    """Plain operations, or the kernels in Triton's interpreter, which needs no GPU."""
    chosen = PLAIN
    if INTERPRETED:
        head_kernels = importlib.import_module("flotilla_trainer.rank.head_kernels")
        monkeypatch.setattr(head_kernels, "BLOCK", 64)  # several blocks to a row
        chosen = HeadOperations(head_kernels.score_rows, head_kernels.write_gradients)
    monkeypatch.setattr(fused_head, "operations_on", lambda device: chosen)
    return chosen


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_the_kernels_give_the_same_scores_and_gradients() -> None:
    # Triton reads the variable when it is imported, which torch has long done here.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    # Each case, and each of the six tests of the kernels that has none.
    assert f"{len(OF_KERNELS) + 6} passed, 2 skipped" in done.stdout, done.stdout[-4000:]


def given(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return hidden states, weight and bias, all with a gradient."""
    random = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]


def targets() -> torch.Tensor:
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rules: HeadRules) -> Scores:
    """Return what torch's own operations give in one piece."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * rules.scale
    if rules.softcap:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    logprobs = torch.log_softmax(logits / rules.temperature, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets()[:, None]).squeeze(-1), entropies


def loss_of(logprobs: torch.Tensor, entropies: torch.Tensor, bonus: float) -> torch.Tensor:
    weights = torch.linspace(-1.0, 1.0, TOKENS)
    return (weights * logprobs).sum() + bonus * (weights.flip(0) * entropies).sum()


@pytest.mark.parametrize(("chunk_tokens", "bonus", "name"), CASES)
def test_scores_and_gradients_are_those_of_plain_operations(
    operations: HeadOperations, name: str, chunk_tokens: int, bonus: float
) -> None:
    rules, ours, theirs = RULES[name], given(), given()
    found = head_scores(*ours, targets(), rules=rules, chunk_tokens=chunk_tokens, entropy_gradient=bonus != 0)
    right = plain(*theirs, rules)
    loss_of(*found, bonus).backward()
    loss_of(*right, bonus).backward()
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert found[1].requires_grad == (bonus != 0)


def test_a_head_without_bias_that_does_not_learn_passes_the_gradient_on(operations: HeadOperations) -> None:
    hidden, weight, _ = given()
    frozen = weight.detach()
    logprobs, _ = head_scores(
        hidden, frozen, None, targets(), rules=HeadRules(), chunk_tokens=3, entropy_gradient=False
    )
    other = hidden.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(logprobs.sum(), [hidden])
    (right,) = torch.autograd.grad(plain(other, frozen, None, HeadRules())[0].sum(), [other])
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_second_backward_pass_finds_what_the_first_found(operations: HeadOperations) -> None:
    parts = given()
    scores = head_scores(*parts, targets(), rules=HeadRules(), chunk_tokens=2, entropy_gradient=True)
    loss = loss_of(*scores, 0.3)
    first = torch.autograd.grad(loss, parts, retain_graph=True)
    second = torch.autograd.grad(loss, parts)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_micro_batch_that_scores_nothing_has_gradients_of_zero(operations: HeadOperations) -> None:
    hidden, weight, _ = given()
    empty = hidden[:0]
    logprobs, entropies = head_scores(
        empty, weight, None, targets()[:0], rules=HeadRules(), chunk_tokens=3, entropy_gradient=False
    )
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_logits_that_rule_a_token_out_leave_the_scores_finite(operations: HeadOperations) -> None:
    raw = torch.tensor([[0.0, float("-inf"), 1e30, -1e30] + [-5.0] * 90])
    scores = operations.score_rows(raw.clone(), torch.tensor([2]), HeadRules())
    assert scores.logprobs.item() == 0.0
    if operations is not PLAIN:
        assert scores.entropies.item() == 0.0


def test_bfloat16_loses_no_gradient_of_the_weight_between_chunks(operations: HeadOperations) -> None:
    exact = given(torch.bfloat16)
    right = [part.detach().double().requires_grad_() for part in exact]
    loss_of(*plain(*right, HeadRules()), 0.0).backward()
    errors = []
    for chunk_tokens in (1, 100):
        ours = given(torch.bfloat16)
        scores = head_scores(
            *ours, targets(), rules=HeadRules(), chunk_tokens=chunk_tokens, entropy_gradient=False
        )
        loss_of(*scores, 0.0).backward()
        assert [part.grad.dtype for part in ours if part.grad is not None] == [torch.bfloat16] * 3
        errors.append(
            [
                float((mine.grad - other.grad).norm() / other.grad.norm())
                for mine, other in zip(ours, right, strict=True)
            ]
        )
    one_by_one, together = errors
    assert max(together) < 0.03
    assert all(found < 1.3 * right for found, right in zip(one_by_one, together, strict=True)), errors


@pytest.mark.skipif(INTERPRETED, reason="the choice is made before any kernel runs")
def test_nothing_is_computed_again_where_memory_is_plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HeadOperations(*PLAIN)
    monkeypatch.setattr(fused_head, "operations_on", lambda device: kernels)
    products: list[int] = []

    def counted(*parts: torch.Tensor | None) -> torch.Tensor:
        assert parts[0] is not None
        products.append(len(parts[0]))
        return linear(*parts)

    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    gradients = []
    coming = given()[0].nbytes + given()[1].numel() * 8
    needed = coming + TOKENS * VOCABULARY * 4 / fused_head.SPARE_SHARE
    for free, expected in ((needed + 1, [23]), (needed - 9, [12, 11, 12]), (0, [8, 8, 7, 8, 8])):
        monkeypatch.setattr(fused_head, "free_bytes", lambda device, free=free: free)
        parts, products[:] = given(), []
        scores = head_scores(*parts, targets(), rules=HeadRules(), chunk_tokens=2, entropy_gradient=True)
        gradients.append(torch.autograd.grad(loss_of(*scores, 0.3), parts))
        assert products == expected
    for found in gradients[1:]:
        for mine, other in zip(found, gradients[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_the_logits_of_targets_are_not_rounded(operations: HeadOperations) -> None:
    hidden, weight, bias = (part.detach() for part in given(torch.bfloat16))
    hidden = hidden * 2  # logits up to 40, which bfloat16 rounds to an eighth
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()).log_softmax(-1)
    likely = exact.argmax(-1)
    ours, _ = head_scores(
        hidden, weight, bias, likely, rules=HeadRules(), chunk_tokens=100, entropy_gradient=False
    )
    raw = torch.nn.functional.linear(hidden, weight, bias)
    rounded = operations.score_rows(raw, likely, HeadRules()).logprobs
    right = exact.gather(-1, likely[:, None]).squeeze(-1).exp()
    errors = [float((found.double().exp() - right).abs().mean()) for found in (ours, rounded)]
    assert errors[0] < 0.7 * errors[1], errors
