"""The inputs of recomputed layers in host memory, from the forward pass until the backward pass asks for them.

Invariants: what comes back is what left, bit for bit; a copy out runs beside the layers that go on computing, and is
done before its copy back begins; what is in host memory already, as everything is without an accelerator, stays there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class RestingInputs:
    """Takes what autograd keeps to the host, and brings it back."""

    def __init__(self) -> None:
        self._outward: torch.cuda.Stream | None = None

    def keeping(self) -> AbstractContextManager[object]:
        """What is saved for the backward pass inside the block rests on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._put_away, self._fetch)

    def _put_away(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if not tensor.is_cuda:
            return tensor.device, tensor
        if self._outward is None:
            self._outward = torch.cuda.Stream(tensor.device)
        resting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            resting.copy_(tensor, non_blocking=True)
        # Its memory is not given to another tensor before the copy has been made.
        tensor.record_stream(self._outward)
        return tensor.device, resting

    def _fetch(self, kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, resting = kept
        if self._outward is not None and device.type == "cuda":
            torch.cuda.current_stream().wait_stream(self._outward)
        return resting.to(device, non_blocking=True)
