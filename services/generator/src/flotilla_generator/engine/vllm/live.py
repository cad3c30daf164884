"""The live model of one worker: replaced as a whole, and proved afterwards.

Invariants: `replace` either leaves the model as it was (`broken` false) or says that it is broken; it reports success
only when every tensor was taken by some parameter, every matrix multiplies as the new weights do, and every other
parameter equals what was staged. Sums with adapters are made while they load, one layer at a time. The matrix proof is
exact: while vLLM loads a layer, a few columns are kept in checkpoint form; later the live layer is fed one-hot rows for
those columns and must return them bit for bit. That sees a stale or wrongly packed kernel copy, such as the packed head
that vLLM keeps beside tied embeddings on CPUs. Decoding stands still meanwhile: nothing is compared twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flotilla_weights.inbox import StagedModel

PROBED_COLUMNS = 8

# vLLM warns at every sync about a tied head that got no tensor of its own; the proof below is what counts.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class LiveModel:
    """The model inside one vLLM worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @torch.no_grad()
    def replace(self, staged: StagedModel, seed: int) -> dict[str, Any]:
        """Load `staged`, prove the result. Returns error, broken, apply_s and verify_s."""
        from vllm.config import set_current_vllm_config

        started = time.perf_counter()
        model = self._worker.model_runner.get_model()
        columns = torch.Generator().manual_seed(seed)
        try:
            with set_current_vllm_config(self._worker.vllm_config):
                with self._recording(model, columns) as recorded:
                    self._load(model, staged)
                self.repair_tied_layers(model, recorded)
            self._synchronize()
            applied = time.perf_counter()
            faults = self._faults(model, staged, recorded)
        # The boundary of a worker call, which must not raise.
        except Exception as error:  # noqa: BLE001
            self._restore(model)
            return {"error": f"loading failed: {type(error).__name__}: {error}", "broken": True}
        return {
            "error": "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else ""),
            "broken": bool(faults),
            "apply_s": applied - started,
            "verify_s": time.perf_counter() - applied,
        }

    def repair_tied_layers(self, model: torch.nn.Module, recorded: dict[int, _Columns]) -> None:
        """Give layers whose weights were loaded through another one the kernel copy of that one.

        On CPUs a head tied to the embeddings multiplies by a packed copy of its own, which a reload leaves stale.
        Packing it once more would cost as much as a quarter of the whole reload, while decoding stands still.
        """
        if self._worker.device.type != "cpu":
            return
        loaded = {id(layer.weight): layer for _, layer in _matrix_layers(model) if id(layer) in recorded}
        for _, layer in _matrix_layers(model):
            source = loaded.get(id(layer.weight), layer)
            if source is not layer:
                layer.cpu_linear = source.cpu_linear

    def _load(self, model: torch.nn.Module, staged: StagedModel) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(model)
        model.load_weights(staged.tensors(self._worker.device))
        finalize_layerwise_reload(model, self._worker.model_runner.model_config)

    def _restore(self, model: torch.nn.Module) -> None:
        """Take a half-loaded model off the meta device, so that a later sync can load it."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        layerwise.LOADING_LAYERS.clear()

    def _synchronize(self) -> None:
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)

    @contextmanager
    def _recording(self, model: torch.nn.Module, random: torch.Generator) -> Iterator[dict[int, _Columns]]:
        """Keep columns of each matrix as they are loaded, before vLLM packs it for its kernels."""
        recorded: dict[int, _Columns] = {}
        methods = {id(layer.quant_method): layer.quant_method for _, layer in _matrix_layers(model)}

        def recorder(original: Any) -> Any:
            def process(layer: torch.nn.Module) -> None:
                recorded[id(layer)] = _Columns.of(layer.weight, random)
                original(layer)

            return process

        for method in methods.values():
            method.process_weights_after_loading = recorder(method.process_weights_after_loading)
        try:
            yield recorded
        finally:
            for method in methods.values():
                del method.process_weights_after_loading

    def _faults(
        self, model: torch.nn.Module, staged: StagedModel, recorded: dict[int, _Columns]
    ) -> list[str]:
        matrices = _matrix_layers(model)
        by_parameter = {
            id(layer.weight): recorded[id(layer)] for _, layer in matrices if id(layer) in recorded
        }
        faults = []
        proven: set[int] = set()
        for name, layer in matrices:
            kernel = id(getattr(layer, "cpu_linear", layer))
            if kernel in proven:
                continue
            expected = recorded.get(id(layer)) or by_parameter.get(id(layer.weight))
            if expected is None:
                faults.append(f"{name}.weight: nothing was loaded into it")
            elif expected.agrees_with(layer):
                proven.add(kernel)
            else:
                kind = "head" if "head" in name else "layer"
                faults.append(f"{name}.weight: live {kind} differs from what was staged")
        return faults + _other_faults(model, staged, {f"{name}.weight" for name, _ in matrices})


class _Columns:
    """Some columns of a matrix as it was loaded."""

    def __init__(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self.index = index
        self.values = values

    @classmethod
    def of(cls, weight: torch.Tensor, random: torch.Generator) -> _Columns:
        count = min(PROBED_COLUMNS, weight.shape[1])
        index = torch.randperm(weight.shape[1], generator=random)[:count]
        return cls(index, weight.index_select(1, index.to(weight.device)))

    def agrees_with(self, layer: torch.nn.Module) -> bool:
        """Feed one-hot rows: each output must be the column, exactly; a table that is looked up is compared as well."""
        if hasattr(layer, "embedding_dim"):
            live = layer.weight.index_select(1, self.index.to(self.values.device))
            if not torch.equal(live, self.values):
                return False
        one_hot = torch.zeros(
            len(self.index), layer_width(layer), dtype=self.values.dtype, device=self.values.device
        )
        one_hot[torch.arange(len(self.index)), self.index] = 1
        return torch.equal(layer.quant_method.apply(layer, one_hot).T, self.values)


def _other_faults(model: torch.nn.Module, staged: StagedModel, matrices: set[str]) -> list[str]:
    """Parameters that are no matrix, a norm say, are compared whole."""
    parameters = dict(model.named_parameters())
    faults = []
    for name, tensor in staged.as_sent():
        live = parameters.get(name)
        if live is None or name in matrices or live.shape != tensor.shape:
            continue
        if not torch.equal(live, tensor.to(device=live.device, dtype=live.dtype)):
            faults.append(f"{name}: live tensor differs from what was staged")
    return faults


def layer_width(layer: Any) -> int:
    """Columns of a layer on this worker, also where the weight itself was packed away."""
    for name in ("input_size_per_partition", "embedding_dim", "input_size"):
        width = getattr(layer, name, None)
        if isinstance(width, int):
            return width
    raise TypeError(f"{type(layer).__name__} does not say how wide it is")


def _matrix_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Linear layers, embeddings and heads: whatever multiplies by one matrix, with its name."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "apply") and _is_matrix(layer)
    ]


def _is_matrix(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, torch.Tensor) and (weight.ndim == 2 or weight.numel() == 0)
