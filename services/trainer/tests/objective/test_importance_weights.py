"""Weights and rejections of a whole update: against their definitions, and however the update is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.wire.objective import ObjectiveSettings

CAP, FLOOR = 3.0, 0.3
LENGTHS = [[4, 9, 2], [7, 1], [5, 5, 12, 3]]
REJECTIONS = [
    {"measure": "k1", "low": 0.5, "high": 2.0},
    {"measure": "k3", "over": "sequence_mean", "high": 0.5},
]
WEIGHTS = ("token", "segment", "sequence", "icepop", "icepop_sequence")


def batch() -> UpdateBatch:
    """Groups of uneven responses, every second of them with context in between."""
    rng = np.random.default_rng(11)
    groups = []
    for index, lengths in enumerate(LENGTHS):
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(np.array([1], np.int32)))
        for number, length in enumerate(lengths):
            sample = group.samples.add(sample_id=f"g{index}/{number}", reward=float(number % 2))
            sample.token_ids.CopyFrom(to_tensor(rng.integers(0, 9, length).astype(np.int32)))
            sample.logprobs.CopyFrom(to_tensor(rng.normal(-1.5, 0.5, length).astype(np.float32)))
            if number % 2:
                sample.mask.CopyFrom(to_tensor(np.arange(length) % 3 != 1))
        groups.append(group)
    return UpdateBatch.read(groups, ModelLimits(9, 0), Version(0, 0))


def scores_of(batch: UpdateBatch) -> np.ndarray:
    """Return the log-probability of every response token under the policy before the update."""
    noise: np.ndarray = np.random.default_rng(12).normal(-1.5, 0.3, batch.trained.size).astype(np.float32)
    return noise


def objective(kind: str, *, normalize: bool = False, rejects: bool = False) -> ObjectiveSettings:
    correction = {
        "importance": kind,
        "proximal": "trainer",
        "importance_cap": CAP,
        "normalize_importance": normalize,
        "rejection": REJECTIONS if rejects else [],
    }
    if kind.startswith("icepop"):
        correction["importance_floor"] = FLOOR
    return ObjectiveSettings.from_wire(wire_objective("policy", {"correction": correction}))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_and_rejections_do_not_depend_on_the_cuts(kind: str, normalize: bool) -> None:
    asked, update = objective(kind, normalize=normalize, rejects=True), batch()
    columns = PolicyObjective(asked).sequences(update, 5, scores_of(update))[0].columns
    given = {name: torch.from_numpy(values) for name, values in columns.items()}
    rank = Objective(asked)
    now = (given["proximal_logprobs"] + 0.05).requires_grad_()
    whole = rank(now, torch.zeros_like(now), given)
    whole.loss.backward()
    slopes, now.grad = now.grad, None
    tokens = int(whole.sums["tokens"])
    assert 0 < int(whole.sums["left_out"]) < tokens
    _, sizes = torch.unique_consecutive(given["sequences"], return_counts=True)
    parts = torch.split(torch.arange(tokens), [sum(sizes[:2]), sum(sizes[2:5]), sum(sizes[5:])])
    loss = 0.0
    for part in parts:
        terms = rank(
            now[part], torch.zeros(part.numel()), {name: column[part] for name, column in given.items()}
        )
        terms.loss.backward()
        loss += terms.loss.item()
    assert loss == pytest.approx(whole.loss.item(), abs=1e-6)
    assert now.grad is not None and slopes is not None and slopes.abs().max() > 1e-3
    torch.testing.assert_close(now.grad, slopes)
