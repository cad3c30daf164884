"""Make optimizer steps on gradients that were accumulated over micro-batches.

Invariants: losses came weighted, so only the clip scales gradients; the norm is that of the whole gradient over all
ranks; matrices decay, vectors (norms, biases) do not; a rank updates only its own shards, which element-wise AdamW
allows; one kernel reads and writes all that belongs to an element, so that no copy of the gradients is made. Adapters,
which are whole on every rank, take the same step everywhere. With offload no moment is on the device
between steps, and within a step only those of one part; the result is that of one step over all parameters at once,
because AdamW treats every element by itself. Parameters that rest in host memory take their step there, where their
gradients and moments are. The norm comes from the device all the same, so that it is the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flotilla_core.config import OptimizerConfig
from flotilla_trainer.rank.cut import Cut, local
from flotilla_trainer.rank.sharded_model import ShardedModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state that AdamW keeps of a parameter, by torch's names."""

PART_ELEMENTS = 1 << 26
"""The most elements of one part; its two float32 moments take 512 MiB."""


class PolicyOptimizer:
    """AdamW over the sharded parameters."""

    def __init__(self, model: ShardedModel, settings: OptimizerConfig) -> None:
        self._parameters = list(model.trainable().values())
        # Sharded gradients arrive reduced, each element on one rank; adapters are whole on every rank.
        self._replicated = model.frozen
        self._counted = [p for n, p in model.trainable().items() if model.frozen or Cut.of(n, p).counts]
        self._on_host = model.cpu_offload and not model.frozen
        self._device = model.device
        self._max_grad_norm = settings.max_grad_norm
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )
        # Moments of parameters in host memory are there anyway.
        moves = settings.offload and not self._on_host
        self._offload = OptimizerOffload(self._adamw, self._parameters) if moves else None
        self.discard_gradients()
        if not moves:
            # Here and not in the first step: what lasts is there before anyone measures what is left.
            for parameter in self._parameters:
                self._begin(parameter)

    def discard_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients."""
        torch._foreach_mul_(self._local_gradients(), factor)

    def complete_gradients(self) -> None:
        """Sum the gradients of adapters over the ranks; a collective."""
        if not self._replicated:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = self._local_gradients()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])

    def squared_norm(self) -> torch.Tensor:
        """Return this rank's share of the squared norm of the gradient, in float64."""
        if not self._counted:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        share = torch.stack(self._norms()).double().square().sum()
        return share / dist.get_world_size() if self._replicated else share

    def step(self, learning_rate: float, norm: float) -> None:
        """Update the weights; `norm` is the norm of the whole gradient."""
        if self._max_grad_norm and norm > self._max_grad_norm:
            torch._foreach_mul_(self._local_gradients(), self._max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        (self._offload or self._adamw).step()
        self.discard_gradients()

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a parameter; empty before its first step."""
        if not self.steps(parameter):
            return {}
        state = self._adamw.state[parameter]
        return {name: state[name] for name in MOMENTS}

    def steps(self, parameter: torch.Tensor) -> int:
        """Return the number of steps that a parameter has taken."""
        return int(self._adamw.state.get(parameter, {}).get("step", 0))

    def restore(self, parameter: torch.Tensor, moments: dict[str, torch.Tensor], steps: int) -> None:
        """Replace the moments with this rank's part of `moments`; without any, reset as before the first step."""
        self._adamw.state.pop(parameter, None)
        if self._offload is None:
            self._begin(parameter)
        if not moments:
            return
        state = self._adamw.state[parameter]
        state["step"] = torch.tensor(float(steps), device=parameter.device)
        for name, values in moments.items():
            if self._offload is not None:
                state[name] = values
                continue
            local(state[name]).copy_(values)

    def _begin(self, parameter: torch.Tensor) -> None:
        """Make the state of a parameter that has taken no step, as AdamW would in the first one."""
        state = self._adamw.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in MOMENTS:
            state[name] = torch.zeros_like(parameter)

    def _norms(self) -> list[torch.Tensor]:
        gradients = [local(p.grad) for p in self._counted if p.grad is not None]
        if not self._on_host:
            return list(torch._foreach_norm(gradients))
        # One after the other, because the device has no room for all. On the host a norm of 60 million float32 numbers
        # is off by half a percent.
        return [torch._foreach_norm([g.to(self._device, non_blocking=True)])[0] for g in gradients]

    def _local_gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]


class OptimizerOffload:
    """Makes optimizer steps in parts: moments stay in host memory, and only those of one part are on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parts: list[list[torch.Tensor]] = [[]]
        room = PART_ELEMENTS
        for parameter in parameters:
            room -= local(parameter).numel()
            if room < 0 and self._parts[-1]:
                self._parts.append([])
                room = PART_ELEMENTS - local(parameter).numel()
            self._parts[-1].append(parameter)

    def step(self) -> None:
        """Step all parameters that have a gradient; the gradients are gone afterwards."""
        gradients = {parameter: parameter.grad for part in self._parts for parameter in part}
        for parameter in gradients:
            parameter.grad = None
        for part in self._parts:
            self._fetch(part)
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
            self._optimizer.step()
            self._put_away(part)

    def _fetch(self, part: list[torch.Tensor]) -> None:
        for parameter in part:
            for name, moment in self._moments(parameter).items():
                visiting = torch.empty_like(parameter)
                local(visiting).copy_(local(moment), non_blocking=True)
                self._optimizer.state[parameter][name] = visiting

    def _put_away(self, part: list[torch.Tensor]) -> None:
        for parameter in part:
            parameter.grad = None
            for name, moment in self._moments(parameter).items():
                # A GPU copies to pinned memory at full speed; torch keeps and reuses freed pieces.
                resting = torch.empty_like(local(moment), device="cpu", pin_memory=moment.is_cuda)
                resting.copy_(local(moment), non_blocking=True)
                self._optimizer.state[parameter][name] = resting
        if part[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        # The third entry of AdamW's state, the count of steps, is one number, which stays on the device.
        state = self._optimizer.state.get(parameter, {})
        return {name: value for name, value in state.items() if name != "step"}
