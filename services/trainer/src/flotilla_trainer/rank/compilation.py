"""Switch compiled layers on when the model is loaded, so that few updates wait for a compiler.

Invariants: all ranks compile or none does; where nothing can be compiled, for want of a compiler or because of the
model, layers run uncompiled and the reason is reported once; a pass that fails leaves shards gathered, so the caller
has to build the model again; every compilation of this process counts, also those of a backward pass and those that
only a later micro-batch needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TorchDynamoException

from flotilla_trainer.rank.compiled_layers import compiler_refusal, reason_of
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import TokenScores
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.value_model import ValueModel

ROWS = ((37, 29), (71, 23, 5))
"""The lengths of the sequences to compile with; only a second row shows the compiler which sizes and limits vary."""
COMPILING = "compiling the layers"


class Compilation:
    """Compiles this rank's layers where that is wanted, and keeps the reason if it cannot, and the cost."""

    def __init__(self, wanted: str, device: torch.device, progress: Callable[[str], None]) -> None:
        self._wanted = wanted == "on" or (wanted == "auto" and device.type != "cpu")
        self._device = device
        self._watch = CompilerWatch(progress)
        self.refusal = ""
        """The reason why layers that should be compiled are not; empty if there is none."""

    def begin(self, model: ShardedModel, *, packed: bool) -> bool:
        """Compile if that is wanted and not refused; return False if the model has to be built again. A collective."""
        if not self._wanted or self.refusal or model.compiled_layers.on:
            return True
        if not self._agreed(compiler_refusal(self._device)):
            return True
        model.compiled_layers.on = True
        try:
            for lengths in ROWS:
                one_pass(model, lengths, packed)
        except TorchDynamoException as error:
            self.refusal = reason_of(error)
            return False
        # A later shape that the compiler fails on runs uncompiled.
        torch._dynamo.config.suppress_errors = True
        return True

    def metrics(self) -> dict[str, float]:
        """Return the cost of compilations since the last call; empty where there were none."""
        return self._watch.taken()

    def _agreed(self, refusal: str) -> bool:
        """Return whether no rank refuses; a collective."""
        refused = torch.tensor(int(bool(refusal)), device=self._device)
        dist.all_reduce(refused)
        if refused.item():
            self.refusal = refusal or "the compiler of another rank does not work"
        return not self.refusal


def one_pass(
    model: ShardedModel, lengths: Sequence[int], packed: bool, again: Callable[[], None] | None = None
) -> None:
    """Run forward without and with gradient, and backward where something learns.

    With `again`, which is called in between, all of it runs once more beside the gradients of the first time.
    """
    row = PackedRow.of(lengths, model.device) if packed else None
    size = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    tokens = torch.zeros(size, dtype=torch.long, device=model.device)
    positions = torch.arange(tokens.numel(), device=model.device)

    def forward() -> torch.Tensor:
        if isinstance(model.policy, ValueModel):
            values: torch.Tensor = model.policy(tokens, positions, packed_row=row)
            return values
        scores: TokenScores = model.policy(
            tokens, positions, tokens.flatten(), temperature=1.0, chunk_tokens=len(positions), packed_row=row
        )
        return scores.logprobs

    def forward_backward() -> None:
        with torch.no_grad():
            forward()
        with torch.enable_grad():
            numbers = forward()
        if numbers.requires_grad:
            numbers.sum().backward()

    forward_backward()
    if again is not None:
        again()
        forward_backward()
    model.policy.zero_grad(set_to_none=True)
    # Adapters are no part of the policy's module.
    for parameter in model.trainable().values():
        parameter.grad = None


class CompilerWatch:
    """Measures the time that a rank spends in the compiler, and shows the front while it does.

    It sees every compilation of the process after its own creation.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._began = 0.0
        self._seconds = 0.0
        self._compilations = 0
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)

    def taken(self) -> dict[str, float]:
        """Return metrics of the compilations since the last call; empty where there were none."""
        seconds, compilations = self._seconds, self._compilations
        self._seconds, self._compilations = 0.0, 0
        if not compilations:
            return {}
        return {"time/compile_s": seconds, "compilations": float(compilations)}

    def _begins(self, _: CallbackArgs) -> None:
        # The phase tells users why no work is done, and the progress tells the watch that this rank is not stuck.
        self._progress(COMPILING)
        self._began = time.monotonic()

    def _ends(self, _: CallbackArgs) -> None:
        self._seconds += time.monotonic() - self._began
        self._compilations += 1
        self._progress("running compiled layers")
