"""Values at given places, without a gradient.

Invariant: the first rank of each lane answers with the lane's tokens in the order of its micro-batches; the front puts
them back in place.
"""

from __future__ import annotations

import torch

from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import micro_batches
from flotilla_trainer.wire.frames import Array, Frame


def values_of(command: Frame, model: ShardedModel, link: FrontLink) -> dict[str, Array]:
    """The values of this lane's tokens."""
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
