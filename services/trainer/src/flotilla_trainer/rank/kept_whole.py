"""Keep weights and gradients whole from one micro-batch of an update to the next, where the device has the memory.

Invariants: ranks that keep them gather each weight once and reduce each gradient once an update, and otherwise once a
micro-batch; all ranks decide alike, from the rank with the least free memory. Kept weights take the bytes of the whole
model in the type of the computation, kept gradients four bytes more for every parameter that learns; both together, or
the weights alone, are kept where the largest micro-batch leaves the memory for them when the update begins. Nothing is
kept on a CPU, nor where a reference takes the place of the policy before a micro-batch; no gradients are kept of a
model with parts that a micro-batch may not reach. After an update, and after an error in it, every weight is a shard
again; after an error nothing is left of its pass, so that the next one may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from flotilla_trainer.rank.device_memory import free_bytes
from flotilla_trainer.rank.sharded_model import ShardedModel

GRADIENT_BYTES = 4
SHARE = 0.9
"""The share that may be used of the memory that is free beside a micro-batch; allocators waste some."""
UNMEASURED_SHARE = 0.5
"""The share where nobody has measured what a micro-batch takes."""


class Kept(NamedTuple):
    """The parts that stay whole between two micro-batches."""

    weights: bool = False
    gradients: bool = False


Announce = Callable[[bool], None]
"""Prepares the model for the next micro-batch; it is told whether that is the last one."""


def kept_by(model: ShardedModel, needed: float | None) -> Kept:
    """Return what there is memory for beside a micro-batch that needs so many bytes; a collective."""
    if model.device.type != "cuda":
        return Kept()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = parameters * model.dtype.itemsize
    gradients = 0 if model.frozen else parameters * GRADIENT_BYTES
    free = free_bytes(model.device)
    left = free * UNMEASURED_SHARE if needed is None else (free - needed) * SHARE
    room = torch.tensor(left, dtype=torch.float64, device=model.device)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    available = float(room)
    return Kept(weights <= available, weights + gradients <= available and not _may_leave_parts_out(model))


@contextmanager
def keeping(policy: nn.Module, kept: Kept) -> Iterator[Announce]:
    """Let micro-batches with a backward pass keep what `kept` says; each one is announced before it begins."""
    assert isinstance(policy, FSDPModule)

    said: bool | None = None

    def announce(last: bool) -> None:
        nonlocal said
        if last is said:
            return
        said = last
        policy.set_reshard_after_forward(not kept.weights)
        policy.set_reshard_after_backward(last or not kept.weights)
        policy.set_requires_gradient_sync(last or not kept.gradients)

    finished = False
    try:
        yield announce if kept.weights else lambda last: None
        finished = True
    finally:
        if not finished:
            _forget_pass(policy)
        if kept.weights:
            policy.set_requires_gradient_sync(True)
            policy.set_reshard_after_backward(True)
            policy.set_reshard_after_forward(True)
        for module in _sharded(policy) if kept.weights or not finished else ():
            module.reshard()


def _sharded(policy: FSDPModule) -> Iterator[FSDPModule]:
    """Yield all modules with shards of their own."""
    yield from (module for module in cast(nn.Module, policy).modules() if isinstance(module, FSDPModule))


def _forget_pass(policy: FSDPModule) -> None:
    """Forget a pass that broke off and the gradients that were not reduced yet; FSDP has no public way to do so."""
    for module in _sharded(policy):
        state = module._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        # Otherwise FSDP would wait for the end of a backward pass that never ends.
        state._state_ctx.post_backward_final_callback_queued = False
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._all_gather_result = None
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _may_leave_parts_out(model: ShardedModel) -> bool:
    """Return whether a micro-batch may reach only some parts of a layer, such as experts in a list.

    FSDP cannot reduce a gradient that only the last micro-batch gave together with those that it kept.
    """
    return any(isinstance(part, nn.ModuleList) for layer in model.layers for part in layer.modules())
