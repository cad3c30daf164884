"""The trainer's fast path against plain torch operations: the same weights and work, in float32 and in bfloat16."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from one_rank import GPU, one_rank
from trainer_work import OPTIMIZER, Line, Record, Trainer, given_answers, micro_batches, shape, work
from transformers import AutoModelForCausalLM

from flotilla_trainer.rank.compilation import Compilation
from flotilla_trainer.rank.cut import gathered
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import finish

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
LAYERS, UPDATES = 4, 10
FLOAT32_LIMIT, HALF_LIMIT = 1e-4, 1.1
WORST = 6

Outcome = dict[str, dict[str, torch.Tensor]]
"""Gradients, weights and steps, each by the name of the parameter."""


def checked(asked: argparse.Namespace, record: Record) -> int:
    """Compare weights and gradients after ten updates on the fast path with those of plain operations."""
    asked.prompts, asked.samples, asked.budget = 2, 2, 2 * (asked.prompt_tokens + asked.response_tokens)
    asked.chunk = 64 if GPU else 5
    fast: dict[str, Outcome] = {}
    plain: dict[str, Outcome] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with one_rank(dtype, **shape(asked.shape, num_hidden_layers=LAYERS)) as (model, place):
            compilation = Compilation(asked.compile, DEVICE, Line().progress)
            assert compilation.begin(model, packed=True), compilation.refusal
            fast[name] = _fast_path(model, asked)
            plain[name] = _plain_path(place, dtype, asked)
    right = plain["float32"]
    paths = {"float32": fast["float32"], "bfloat16": fast["bfloat16"], "bfloat16, plain": plain["bfloat16"]}
    errors = {path: _distances(found, right) for path, found in paths.items()}
    for path, found in errors.items():
        record.say(path=path, against="float32, plain", **found)
    for kind in ("gradient", "first_gradient"):
        record.say(
            worst_of=kind, tensors=_worst(fast["bfloat16"][kind], plain["bfloat16"][kind], right[kind])
        )
    kind = "first_gradient"
    record.say(
        of_all_layers=kind, tensors=_by_part(fast["bfloat16"][kind], plain["bfloat16"][kind], right[kind])
    )
    exact = max(errors["float32"]["gradient"], errors["float32"]["weight"])
    # Only the first gradients are of the same weights: later ones tell how far two paths came apart by chance as well.
    ratios = {
        kind: errors["bfloat16"][kind] / errors["bfloat16, plain"][kind]
        for kind in ("first_gradient_of_all", "first_gradient", "gradient")
    }
    ratio = ratios["first_gradient_of_all"]
    record.say(
        float32_error=exact,
        limit=FLOAT32_LIMIT,
        bfloat16_over_plain={kind: round(value, 3) for kind, value in ratios.items()},
        limit_of_the_first=HALF_LIMIT,
    )
    return 0 if exact < FLOAT32_LIMIT and ratio < HALF_LIMIT else 1


def _fast_path(model: ShardedModel, asked: argparse.Namespace) -> Outcome:
    """Return gradients, weights, and how far the weights moved, of the rank's own code."""
    named = dict(model.causal_lm.named_parameters())
    first = {name: _whole(parameter) for name, parameter in named.items()}
    trainer = Trainer(model, given_answers(asked.chunk))
    (batches,) = micro_batches(asked)
    gradients: list[dict[str, torch.Tensor]] = []
    for _ in range(UPDATES):
        update = trainer.accumulate(batches)
        gradients.append({name: _whole(parameter.grad) for name, parameter in named.items()})
        finish(update, trainer.optimizer, OPTIMIZER.learning_rate)
    return _outcome(first, gradients, {name: _whole(parameter) for name, parameter in named.items()})


def _plain_path(place: Path, dtype: torch.dtype, asked: argparse.Namespace) -> Outcome:
    """Return the same of transformers' own forward pass, log_softmax and torch's plain AdamW on float32 masters."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa")
    model.to(DEVICE).eval()
    read = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).to(DEVICE)
    masters = dict(read.named_parameters())
    first = {name: _whole(master) for name, master in masters.items()}
    adamw = torch.optim.AdamW(
        masters.values(),
        lr=OPTIMIZER.learning_rate,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.epsilon,
        weight_decay=0.0,
        foreach=True,
    )
    given = work(asked)
    rows = torch.from_numpy(given.tokens).to(DEVICE).long().reshape(len(given.lengths), -1)
    weights = torch.from_numpy(given.columns["weights"]).to(DEVICE).reshape(len(rows), -1)
    gradients: list[dict[str, torch.Tensor]] = []
    for _ in range(UPDATES):
        adamw.zero_grad(set_to_none=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        for row, weight in zip(rows, weights, strict=True):
            logits = model(input_ids=row[None, :-1], use_cache=False).logits[0, asked.prompt_tokens - 1 :]
            logprobs = torch.log_softmax(logits.float(), -1)
            (-(weight * logprobs.gather(-1, row[asked.prompt_tokens :, None]).squeeze(-1)).sum()).backward()
            for name, parameter in model.named_parameters():
                held = masters[name].grad
                masters[name].grad = parameter.grad.float() if held is None else held + parameter.grad
                parameter.grad = None
        gradients.append({name: _whole(master.grad) for name, master in masters.items()})
        adamw.step()
    return _outcome(first, gradients, {name: _whole(master) for name, master in masters.items()})


def _outcome(
    first: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    weights: dict[str, torch.Tensor],
) -> Outcome:
    """Return the gradients, the weights and the steps from the first weights."""
    steps = {name: weight - first[name] for name, weight in weights.items()}
    return {
        "first_gradient": gradients[0],
        "gradient": gradients[-1],
        "weight": weights,
        "step": steps,
    }


def _distances(found: Outcome, right: Outcome) -> dict[str, float]:
    """Return the largest relative distance of a tensor of each kind, and that of all tensors as one."""
    facts: dict[str, float] = {}
    for kind, tensors in right.items():
        facts[kind] = max(_distance(found[kind][name], value) for name, value in tensors.items())
        apart = sum(float((found[kind][name] - value).square().sum()) for name, value in tensors.items())
        size = sum(float(value.square().sum()) for value in tensors.values())
        facts[f"{kind}_of_all"] = (apart / max(size, 1e-60)) ** 0.5
    return facts


def _worst(
    fast: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the distances of the tensors that are furthest off on either path: fast, plain."""
    found = {
        name: (round(_distance(fast[name], value), 4), round(_distance(plain[name], value), 4))
        for name, value in right.items()
    }
    return dict(sorted(found.items(), key=lambda item: -max(item[1]))[:WORST])


def _by_part(
    fast: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the distances of each part of a layer, over all layers: fast, plain. One tensor may differ by chance."""
    parts: dict[str, list[str]] = {}
    for name in right:
        parts.setdefault(".".join(name.split(".")[-3:]), []).append(name)
    return {
        part: tuple(
            round(_distance(*(torch.cat([one[n].flatten() for n in names]) for one in (path, right))), 4)
            for path in (fast, plain)
        )
        for part, names in parts.items()
    }


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm().clamp(min=1e-30))


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of all of a tensor on the host."""
    assert tensor is not None
    return gathered(tensor.detach()).float().cpu().clone()
