"""Switching compiled layers on when the model is there, so that few updates wait for a compiler.

Invariants: all ranks compile or none does; where nothing can be compiled, for want of a compiler or because of the
model, layers run as they are and the reason is told once; a pass that broke off leaves shards gathered, so that
whoever asked for it builds the model anew; every compilation of this process counts, also those of a backward pass
and those that only a later micro-batch needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TorchDynamoException

from flotilla_trainer.rank.compiled_layers import compiler_refusal, reason_of
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import TokenScores
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.value_model import ValueModel

ROWS = ((37, 29), (41, 23, 5))
"""Lengths of the sequences to compile with; only a second row tells the compiler which sizes are no constants."""

COMPILING = "compiling the layers"


class Compilation:
    """Whether this rank's layers run compiled, why not, and what it cost."""

    def __init__(self, wanted: str, device: torch.device, progress: Callable[[str], None]) -> None:
        self._wanted = wanted == "on" or (wanted == "auto" and device.type != "cpu")
        self._device = device
        self._watch = CompilerWatch(progress)
        self.refusal = ""
        """Why layers that should be compiled are not."""

    def begin(self, model: ShardedModel, *, packed: bool) -> bool:
        """Compile where it is wanted and was not refused; False where the model has to be built anew. A collective."""
        if not self._wanted or self.refusal or model.compiled_layers.on:
            return True
        if not self._agreed(compiler_refusal(self._device)):
            return True
        model.compiled_layers.on = True
        try:
            for lengths in ROWS:
                _one_pass(model, lengths, packed)
        except TorchDynamoException as error:
            self.refusal = reason_of(error)
            return False
        # A shape that only an update has, and that the compiler fails on, runs as it is.
        torch._dynamo.config.suppress_errors = True
        return True

    def metrics(self) -> dict[str, float]:
        """What the compiler took since this was asked last; empty where it did nothing."""
        return self._watch.taken()

    def _agreed(self, refusal: str) -> bool:
        """Whether no rank refuses."""
        refused = torch.tensor(int(bool(refusal)), device=self._device)
        dist.all_reduce(refused)
        if refused.item():
            self.refusal = refusal or "the compiler of another rank does not work"
        return not self.refusal


def _one_pass(model: ShardedModel, lengths: tuple[int, ...], packed: bool) -> None:
    """Forward without and with gradient, and backward where something learns."""
    row = PackedRow.of(lengths, model.device) if packed else None
    rows = 1 if packed else len(lengths)
    tokens = torch.zeros(rows, sum(lengths), dtype=torch.long, device=model.device)
    positions = torch.arange(sum(lengths), device=model.device)

    def forward() -> torch.Tensor:
        if isinstance(model.policy, ValueModel):
            values: torch.Tensor = model.policy(tokens, positions, packed_row=row)
            return values
        scores: TokenScores = model.policy(
            tokens, positions, tokens[0], temperature=1.0, chunk_tokens=len(positions), packed_row=row
        )
        return scores.logprobs

    with torch.no_grad():
        forward()
    with torch.enable_grad():
        numbers = forward()
    if numbers.requires_grad:
        numbers.sum().backward()
        model.policy.zero_grad(set_to_none=True)


class CompilerWatch:
    """What a rank spends in the compiler: seen from outside while it lasts, counted when it is over.

    Hears of every compilation from its making on.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._began = 0.0
        self._seconds = 0.0
        self._compilations = 0
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)

    def taken(self) -> dict[str, float]:
        """Metrics of what was compiled since they were asked for last; none where nothing was."""
        seconds, compilations = self._seconds, self._compilations
        self._seconds, self._compilations = 0.0, 0
        if not compilations:
            return {}
        return {"time/compile_s": seconds, "compilations": float(compilations)}

    def _begins(self, _: CallbackArgs) -> None:
        # Whoever looks sees why nothing else moves, and the watch over the ranks that this one does.
        self._progress(COMPILING)
        self._began = time.monotonic()

    def _ends(self, _: CallbackArgs) -> None:
        self._seconds += time.monotonic() - self._began
        self._compilations += 1
        self._progress("running what was compiled")
