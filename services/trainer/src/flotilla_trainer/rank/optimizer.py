"""One optimizer step on gradients that were accumulated as sums.

Invariants: gradients are scaled exactly once, by one over the tokens of the whole update times the clip; the norm is
that of the whole gradient over all ranks; matrices decay, vectors (norms, biases) do not; a rank updates only its own
shards, which element-wise AdamW allows.
"""

from __future__ import annotations

import torch

from flotilla_trainer.rank.settings import SessionSettings
from flotilla_trainer.rank.sharded_model import ShardedModel, local


class PolicyOptimizer:
    """AdamW over the sharded parameters."""

    def __init__(self, model: ShardedModel, settings: SessionSettings) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._max_grad_norm = settings.max_grad_norm
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            foreach=True,
        )
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Forget what was accumulated."""
        self._adamw.zero_grad(set_to_none=True)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm of the summed gradient, in float64."""
        norms = torch._foreach_norm(self._local_gradients())
        return torch.stack(norms).double().square().sum()

    def step(self, learning_rate: float, tokens: float, mean_norm: float) -> None:
        """Update the weights; `mean_norm` is the norm of the gradient divided by `tokens`."""
        scale = 1.0 / tokens
        if self._max_grad_norm and mean_norm > self._max_grad_norm:
            scale *= self._max_grad_norm / mean_norm
        torch._foreach_mul_(self._local_gradients(), scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.discard_gradients()

    def _local_gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]
