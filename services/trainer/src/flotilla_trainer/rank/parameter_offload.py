"""Weights and gradients that rest in host memory; FSDP brings those of a layer to the device while it computes.

Invariants: numbers are those of a model on the device bit by bit, up to AdamW's step, which the host takes. On GPUs
both rest in pinned memory, so that transfers run beside kernels. Host memory is written only when no queued transfer
reads it: after a number came back from the device, or after `finish_transfers`. Gradients of several micro-batches add
up on the device: a layer's sum so far comes back for that, and no processor adds. Where a micro-batch may leave
parameters out, such as experts, FSDP adds on the host. Buffers, and adapters, stay on the device. On a CPU, which is
host memory, nothing moves.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from flotilla_trainer.rank.cut import local

HOST = torch.device("cpu")
AHEAD = 2
"""Modules whose gradients the host may queue before their earlier ones, which are pinned as well, are free again."""


def resting_on_host(device: torch.device) -> CPUOffloadPolicy:
    """Return the policy by which FSDP keeps shards on the host of a device."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model without memory that of the host for its parameters, and that of the device for buffers."""
    model.to_empty(device=HOST)
    earlier = EarlierGradients()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(partial(earlier.add, module))


def finish_transfers(device: torch.device) -> None:
    """Wait until nothing that was queued reads host memory any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class EarlierGradients:
    """Adds the gradients of earlier micro-batches to those that FSDP has just reduced, before these go to the host.

    FSDP would add on the host, and make it wait for the device meanwhile.
    """

    def __init__(self) -> None:
        self._queued: deque[torch.cuda.Event] = deque()

    @torch.no_grad()
    def add(self, module: FSDPModule, reduced: torch.Tensor) -> None:
        """Add to the reduced gradients of a module, one after the other and each padded; FSDP calls this."""
        if reduced.is_cuda:
            # FSDP gives this memory back to the stream that reduced, which does not wait for this one.
            reduced.record_stream(torch.cuda.current_stream())
        group = module._get_fsdp_state()._fsdp_param_group
        assert group is not None, "only a module with parameters of its own reduces"
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
        if sum(sizes) != reduced.numel():
            return
        for parameter, new in zip(group.fsdp_params, reduced.split(sizes), strict=True):
            earlier, parameter.sharded_param.grad = parameter.sharded_param.grad, None
            if earlier is not None:
                part = local(earlier).reshape(-1)
                new[: part.numel()].add_(part.to(reduced.device, non_blocking=True))
        if reduced.is_cuda:
            self._queued.append(torch.cuda.current_stream().record_event())
            if len(self._queued) > AHEAD:
                self._queued.popleft().synchronize()
