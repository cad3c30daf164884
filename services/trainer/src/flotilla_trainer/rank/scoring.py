"""Score given tokens without a gradient: log-probabilities under a policy, or values by a critic.

Invariant: the first rank of each group that shares rows answers with the tokens of that group in the order of its
micro-batches; the front puts them back in place.
"""

from __future__ import annotations

import torch

from flotilla_trainer.rank.float32_policy import Float32Policy
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import micro_batches
from flotilla_trainer.wire.frames import Array, Frame


def score(command: Frame, model: ShardedModel, link: FrontLink) -> dict[str, Array]:
    """Return scores of this lane's tokens: logprobs and, where asked for, the likeliest tokens and sums of squares."""
    parts: list[tuple[torch.Tensor, ...]] = []
    total = len(command.fields["idle"])
    policy = Float32Policy(model, link.moved) if command.fields["in_float32"] else model.policy
    with torch.no_grad():
        for index, (columns, idle) in enumerate(micro_batches(command, model.device)):
            link.progress(f"scoring micro-batch {index + 1} of {total}")
            scores = policy(
                columns["tokens"],
                columns["positions"],
                columns["targets"].long(),
                temperature=command.fields["temperature"],
                chunk_tokens=command.fields["chunk_tokens"],
                top_k=command.fields["top_k"],
                packed_row=PackedRow.among(columns),
                squares=command.fields["squares"],
            )
            if not idle and model.mesh.counts_tokens:
                parts.append((scores.logprobs, scores.top_ids.int(), scores.top_logprobs, scores.squares))
    if not parts:
        return {}
    joined = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return dict(zip(("logprobs", "top_ids", "top_logprobs", "squares"), joined, strict=True))


def values_of(command: Frame, model: ShardedModel, link: FrontLink) -> dict[str, Array]:
    """Return the values of this lane's tokens."""
    parts: list[torch.Tensor] = []
    total = len(command.fields["idle"])
    with torch.no_grad():
        for index, (columns, idle) in enumerate(micro_batches(command, model.device)):
            link.progress(f"values of micro-batch {index + 1} of {total}")
            values = model.policy(
                columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns)
            )
            if not idle and model.mesh.counts_tokens:
                parts.append(values)
    return {"values": torch.cat(parts).cpu().numpy()} if parts else {}
