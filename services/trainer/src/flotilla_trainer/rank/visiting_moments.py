"""An optimizer step whose moments live in host memory and visit the device part by part.

Invariants: between steps no moment is on the device, within one only those of one part; the numbers are those of one
step over all parameters at once, because AdamW treats every element by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flotilla_trainer.rank.sharded_model import local

PART_ELEMENTS = 1 << 26
"""Two float32 moments of one part take 512 MiB."""


class VisitingMoments:
    """Steps an optimizer in parts."""

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
        """One step of all parameters that have a gradient; the gradients are gone afterwards."""
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
                # Pinned memory is what a GPU copies to at full speed; torch keeps and reuses freed pieces.
                resting = torch.empty_like(local(moment), device="cpu", pin_memory=moment.is_cuda)
                resting.copy_(local(moment), non_blocking=True)
                self._optimizer.state[parameter][name] = resting
        if part[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        # The third entry of AdamW's state, the count of steps, is one number on the host.
        state = self._optimizer.state.get(parameter, {})
        return {name: value for name, value in state.items() if name != "step"}
