"""Proof that a loaded model is what was staged.

Invariants: nothing is found wrong only when every tensor was taken by some parameter, every matrix multiplies as the
new weights do, and every other parameter equals what was staged. The matrix proof is exact: while vLLM loads a layer, a
few columns are kept in checkpoint form; later the loaded layer is fed one-hot rows for those columns and must return
them bit for bit. That sees a stale or wrongly packed kernel copy, such as the packed head that vLLM keeps beside tied
embeddings on CPUs. Experts are compared whole (`fused_experts`).

A matrix that vLLM quantizes must hold what its quantizer made of the loaded one, all of it, by digest, and multiply as
the loaded one within the rounding of 8-bit floats. The first sees a matrix of an older version even where its numbers
are close, the second a quantizer or a kernel that takes other numbers or another scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from flotilla_generator.engine.vllm.fused_experts import proving_experts
from flotilla_weights.digest import pending_digests, resolve
from flotilla_weights.inbox import StagedModel

PROBED_COLUMNS = 8
RELATIVE = 2**-4 + 2**-7
"""Half a step of an 8-bit float with three bits of mantissa, and the rounding of the product to 16 bits."""
OF_THE_LARGEST = 2**-9 / 448
"""Half a step of the smallest such floats, twice: a scale is at most the largest number of a matrix by 448."""


class MatrixLayer(Protocol):
    """The interface that vLLM gives a layer with one weight matrix; torch's module types do not declare it."""

    weight: torch.Tensor
    quant_method: Any


class Columns:
    """Some columns of a matrix as it was loaded."""

    def __init__(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self.index = index
        self.values = values

    @classmethod
    def of(cls, weight: torch.Tensor, random: torch.Generator) -> Columns:
        """Columns at random places."""
        count = min(PROBED_COLUMNS, weight.shape[1])
        index = torch.randperm(weight.shape[1], generator=random)[:count]
        return cls(index, weight.index_select(1, index.to(weight.device)))

    def agree_with(self, layer: MatrixLayer) -> bool:
        """Feed one-hot rows: each output must be the column, exactly; a table that is looked up is compared as well."""
        if hasattr(layer, "embedding_dim"):
            live = layer.weight.index_select(1, self.index.to(self.values.device))
            if not torch.equal(live, self.values):
                return False
        one_hot = torch.zeros(
            len(self.index), _layer_width(layer), dtype=self.values.dtype, device=self.values.device
        )
        one_hot[torch.arange(len(self.index)), self.index] = 1
        return torch.equal(layer.quant_method.apply(layer, one_hot).T, self.values)


class QuantizedMatrix:
    """A matrix as it was loaded, by some of its columns, and what the quantizer made of it."""

    def __init__(self, index: torch.Tensor, columns: torch.Tensor, loaded: torch.Tensor, layer: Any) -> None:
        """`layer` holds what the quantizer made of the matrix `loaded`."""
        self._index = index
        self._columns = columns.float()
        self._bound = self._columns.abs() * RELATIVE + loaded.abs().amax().float() * OF_THE_LARGEST
        self._dtype = loaded.dtype
        self._names, self._made = _digests(layer)

    def agree_with(self, layer: Any) -> bool:
        """Return whether the live layer holds what was made, and multiplies by it."""
        names, live = _digests(layer)
        if names != self._names or resolve([live]) != resolve([self._made]):
            return False
        count, width = len(self._index), layer.input_size_per_partition
        one_hot = torch.zeros(count, width, dtype=self._dtype, device=self._columns.device)
        one_hot[torch.arange(count), self._index] = 1
        found = layer.quant_method.apply(layer, one_hot).T.float()
        return bool(((found - self._columns).abs() <= self._bound).all())


Recorded = Columns | QuantizedMatrix


@contextmanager
def recording(model: torch.nn.Module, random: torch.Generator) -> Iterator[dict[int, Recorded]]:
    """Keep columns of each matrix as they are loaded, before vLLM packs it for its kernels."""
    recorded: dict[int, Recorded] = {}
    methods = {id(layer.quant_method): layer.quant_method for _, layer in matrix_layers(model)}

    def recorder(original: Any) -> Any:
        def process(layer: MatrixLayer) -> None:
            loaded = layer.weight.data
            columns = recorded[id(layer)] = Columns.of(loaded, random)
            original(layer)
            if layer.weight.dtype != loaded.dtype:
                recorded[id(layer)] = QuantizedMatrix(columns.index, columns.values, loaded, layer)

        return process

    for method in methods.values():
        method.process_weights_after_loading = recorder(method.process_weights_after_loading)
    try:
        yield recorded
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def proving(
    model: torch.nn.Module, staged: StagedModel, recorded: dict[int, Recorded]
) -> Iterator[str | None]:
    """Compare `model` with what was staged, piece by piece: for each what is wrong with it, or nothing."""
    matrices = matrix_layers(model)
    by_parameter = {id(layer.weight): recorded[id(layer)] for _, layer in matrices if id(layer) in recorded}
    proven: set[int] = set()
    for name, layer in matrices:
        kernel = id(getattr(layer, "cpu_linear", layer))
        if kernel in proven:
            continue
        expected = recorded.get(id(layer)) or by_parameter.get(id(layer.weight))
        if expected is None:
            yield f"{name}.weight: nothing was loaded into it"
        elif expected.agree_with(layer):
            proven.add(kernel)
            yield None
        else:
            kind = "head" if "head" in name else "layer"
            yield f"{name}.weight: live {kind} differs from what was staged"
    yield from proving_experts(model, staged)
    yield from _proving_others(model, staged, {f"{name}.weight" for name, _ in matrices})


def matrix_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Linear layers, embeddings and heads: whatever multiplies by one matrix, with its name."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "apply") and _is_matrix(layer)
    ]


def _proving_others(model: torch.nn.Module, staged: StagedModel, matrices: set[str]) -> Iterator[str | None]:
    """Parameters that are no matrix, a norm say, are compared whole."""
    parameters = dict(model.named_parameters())
    for name, tensor in staged.as_sent():
        loaded = parameters.get(name)
        if loaded is None or name in matrices or loaded.shape != tensor.shape:
            continue
        same = torch.equal(loaded, tensor.to(device=loaded.device, dtype=loaded.dtype))
        yield None if same else f"{name}: live tensor differs from what was staged"


def _is_matrix(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, torch.Tensor) and (weight.ndim == 2 or weight.numel() == 0)


def _layer_width(layer: Any) -> int:
    """Columns of a layer on this worker, also where the weight itself was packed away."""
    for name in ("input_size_per_partition", "embedding_dim", "input_size"):
        width = getattr(layer, name, None)
        if isinstance(width, int):
            return width
    raise TypeError(f"{type(layer).__name__} does not say how wide it is")


def _digests(layer: torch.nn.Module) -> tuple[list[str], torch.Tensor]:
    """Return the names of a layer's tensors, and their digests, which are only queued on a GPU."""
    named = {name: value for name, value in layer._parameters.items() if value is not None}
    return list(named), pending_digests(list(named.values()))
