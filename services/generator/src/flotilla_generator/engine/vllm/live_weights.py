"""The live model of one worker: replaced as a whole, and proved.

Invariants: `replace` either leaves the model as it was (`broken` false) or says that it is broken; it reports success
only for weights that were proved to be what was staged. On CPUs, where packing for the kernels is nearly all of the
work, a twin of the model is loaded and packed during decoding, proved between its steps, and `replace` exchanges
references: vLLM's packed kernels share scratch memory, so whatever multiplies runs on the thread that decodes. On GPUs,
and for models without a twin, the first `replace` loads and proves while decoding is paused. It also learns where each
tensor lies in the live model. Where a copy is all that vLLM does, later versions are copied into a standby as they
arrive, and `replace` only queues copies of that; what is live then is compared by `check`, beside decoding. Where they
are expected in place, there is neither twin nor standby: decoding is paused before they arrive. Memory that
changed later is loaded and learned anew with the next version; copies that were wrong at once are not tried again. Sums
with adapters are made while they are copied or loaded, a few tensors at a time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from flotilla_generator.engine.vllm.fused_experts import packing_again
from flotilla_generator.engine.vllm.live_regions import Digests, LiveRegions, NoRegionsError
from flotilla_generator.engine.vllm.shadow_model import ShadowModel
from flotilla_generator.engine.vllm.standby import Filling, Standby
from flotilla_generator.engine.vllm.weight_check import Recorded, matrix_layers, proving, recording
from flotilla_weights.inbox import StagedModel
from flotilla_weights.manifest import Manifest

log = logging.getLogger(__name__)


# vLLM warns at every sync about a tied head that got no tensor of its own; the proof is what counts.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

NOTHING_COMMITTED = "nothing was committed yet"
NAMED = 5
"""Faults that an answer names before it only counts."""


@dataclass(frozen=True)
class Unloaded:
    """The weights that `replace` has to load."""

    staged: StagedModel
    seed: int


@dataclass(frozen=True)
class Filled:
    """A standby with the weights that `replace` has to copy, and the digests that the live memory will have."""

    standby: Standby
    expected: Digests


@dataclass
class Loaded:
    """The weights that `replace` has to exchange once they are verified, or the reason why it must not."""

    twin: ShadowModel
    proving: Iterator[str | None]
    faults: list[str]
    proved: bool = False


Following = Loaded | Unloaded | Filled
"""The version after the one that is live."""


class LiveModel:
    """The model inside one vLLM worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._one_twin = threading.Lock()
        self._has_twins = worker.device.type == "cpu"
        self._regions: LiveRegions | None = None
        self._standby: Standby | None = None
        self._copied = False
        self._found_right = False
        self._ring_bytes = 0
        self._may_learn = True
        self._in_place = False
        self._committed: Digests = {}
        self._unchecked = (
            "the matrices are packed for the kernels of this CPU; the canary sees what they compute"
            if self._has_twins
            else NOTHING_COMMITTED
        )

    def expect(self, manifest: Manifest) -> None:
        """Make room for the buckets of a new group, in place of those of the last one."""
        self._ring_bytes = manifest.ring_bytes
        if self._standby is not None:
            self._standby.forget_lent()

    def expect_in_place(self, in_place: bool) -> None:
        """Say whether the next publication finds decoding paused; called on the thread that decodes."""
        self._in_place = in_place
        if self._standby is not None:
            self._standby.stand_still()

    def begin(self) -> Filling | None:
        """Return what takes the tensors of a publication as they arrive, or None where they are staged as a whole."""
        if self._regions is not None and not self._regions.stand():
            self._forget_places()
        return None if self._standby is None else self._standby.begin()

    def fill(self, filling: Filling, staged: StagedModel | None, told: dict[str, int]) -> Filled:
        """End a publication: `staged` is what has to be summed first, if anything."""
        if staged is not None:
            filling.put_sums(staged, self._worker.device)
            told = staged.digests
        return Filled(filling.standby, filling.settle(told))

    def prepare(self, staged: StagedModel, seed: int) -> Loaded | Unloaded:
        """Do all work that is possible during decoding; `seed` chooses the columns of the proof."""
        # The thread of a transfer that was given up may still load its twin, through the same lists inside vLLM.
        with self._one_twin:
            if self._in_place or not self._has_twins:
                return Unloaded(staged, seed)
            twin = ShadowModel(self._model())
            recorded, error = self._load_recorded(twin.model, staged, seed)
            twin.forget_how_to_load()
            if error:
                return Loaded(twin, iter(()), [error])
            elsewhere = twin.keeps_weights_elsewhere()
            if not elsewhere:
                return Loaded(twin, proving(twin.model, staged, recorded), [])
            self._has_twins = False
            log.warning(
                "%s is more than a weight: from now on decoding waits while layers are packed", elsewhere
            )
            return Unloaded(staged, seed)

    @torch.no_grad()
    def prove(self, following: Following, limit_s: float) -> bool:
        """Between two steps of decoding, for about so long: continue the check; return whether it has ended."""
        if not isinstance(following, Loaded):
            return True
        deadline = time.perf_counter() + limit_s
        for fault in following.proving:
            if fault is not None:
                following.faults.append(fault)
            if time.perf_counter() > deadline:
                return False
        following.proved, following.proving = True, iter(())
        return True

    def replace(self, following: Following) -> dict[str, Any]:
        """Make it live. Returns error, broken, apply_s, verify_s, and whether to `check` it once decoding goes on."""
        if isinstance(following, Filled):
            return self._copy_in_place(following)
        if isinstance(following, Unloaded):
            return self._load_in_place(following.staged, following.seed)
        if following.faults or not following.proved:
            return {"error": _listed(following.faults) or "it was not proved", "broken": False}
        started = time.perf_counter()
        following.twin.exchange()
        applied = time.perf_counter() - started
        free_beside_decoding(following.twin)
        return {"error": "", "broken": False, "apply_s": applied, "verify_s": 0.0, "check": False}

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        """Compare the memory that decodes with what the last commit put there.

        Returns tensors, unchecked, faults, and how long the GPU copied at the commit (copies_s).

        It reads on a stream of its own, beside decoding. After the first commit it also makes the standby.
        """
        if self._regions is not None and self._standby is None:
            self._make_standby(self._regions)
        regions, compared = self._regions, len(self._committed)
        if regions is None or self._standby is None or not compared:
            return {"tensors": 0, "unchecked": self._unchecked, "faults": [], "copies_s": 0.0}
        with self._standby.beside_decoding():
            self._standby.wait_for_commit()
            faults = regions.differing(self._committed)
        copies_s = self._standby.copies_s if self._copied else 0.0
        if not regions.stand():
            faults.append("the parameters lie elsewhere than at the commit")
        if not faults:
            self._found_right = True
        elif self._copied and not self._found_right:
            self._give_up_copies("copies of a version did not bring its weights")
        else:
            log.warning("live memory has changed since a commit: the next version is loaded as a whole")
            self._forget_places()
        return {"tensors": compared, "unchecked": "", "faults": faults, "copies_s": copies_s}

    def repair_tied_layers(self, model: torch.nn.Module, recorded: dict[int, Recorded]) -> None:
        """Give layers whose weights were loaded through another one the kernel copy of that one.

        On CPUs a head tied to the embeddings multiplies by a packed copy of its own, which a reload leaves stale.
        Packing it once more would cost as much as a quarter of the whole reload.
        """
        if self._worker.device.type != "cpu":
            return
        loaded = {id(layer.weight): layer for _, layer in matrix_layers(model) if id(layer) in recorded}
        for _, layer in matrix_layers(model):
            source = loaded.get(id(layer.weight), layer)
            if source is not layer:
                layer.cpu_linear = source.cpu_linear

    def load(self, model: Any, staged: StagedModel) -> None:
        """Have vLLM load and pack every layer."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with self._configured(), packing_again(model):
            initialize_layerwise_reload(model)
            model.load_weights(staged.tensors(self._worker.device))
            finalize_layerwise_reload(model, self._worker.model_runner.model_config)

    def _copy_in_place(self, filled: Filled) -> dict[str, Any]:
        started = time.perf_counter()
        answer = {"broken": False, "apply_s": 0.0, "verify_s": 0.0, "check": False}
        if filled.standby is not self._standby or not filled.standby.regions.stand():
            self._forget_places()
            error = "the parameters of the live model moved; publish again"
            return answer | {"error": error, "broken": filled.standby.in_place}
        try:
            filled.standby.commit()
        # The boundary of a worker call, which must not raise.
        except Exception as failure:  # noqa: BLE001
            self._give_up_copies("copies failed")
            return answer | {"error": f"copying failed: {type(failure).__name__}: {failure}", "broken": True}
        self._committed, self._copied, self._found_right = filled.expected, True, False
        return answer | {"error": "", "apply_s": time.perf_counter() - started, "check": True}

    @torch.no_grad()
    def _load_in_place(self, staged: StagedModel, seed: int) -> dict[str, Any]:
        started = time.perf_counter()
        model = self._model()
        regions = self._rehearsed(model, staged)
        recorded, error = self._load_recorded(model, staged, seed)
        if error:
            return {"error": error, "broken": True}
        self._synchronize()
        applied = time.perf_counter()
        error = _listed([fault for fault in proving(model, staged, recorded) if fault is not None])
        if regions is not None and not error:
            self._keep(regions, staged)
        return {
            "error": error,
            "broken": bool(error),
            "apply_s": applied - started,
            "verify_s": time.perf_counter() - applied,
            "check": self._regions is not None,
        }

    def _rehearsed(self, model: torch.nn.Module, staged: StagedModel) -> LiveRegions | None:
        """Return the places of the tensors, if a copy is all that loading them means."""
        if not self._may_learn:
            return None
        try:
            with self._configured():
                return LiveRegions.learned(model, staged)
        # The loaders are vLLM's: they run here in a way that they were not written for, and need not.
        except Exception as failure:  # noqa: BLE001
            self._give_up_copies(f"{failure}" or type(failure).__name__)
            return None

    def _keep(self, regions: LiveRegions, staged: StagedModel) -> None:
        try:
            regions.require_agreement(staged)
            self._regions, self._committed = regions, regions.expected(staged)
        except NoRegionsError as failure:
            self._give_up_copies(str(failure))

    def _make_standby(self, regions: LiveRegions) -> None:
        try:
            self._standby = (
                Standby(regions, None) if self._in_place else Standby.beside(regions, self._ring_bytes)
            )
        except (MemoryError, torch.OutOfMemoryError) as failure:
            self._give_up_copies(f"there is no memory for a second copy of the weights: {failure}")

    def _give_up_copies(self, why: str) -> None:
        """Have every later version loaded and proved as the first one was."""
        self._forget_places()
        self._may_learn = False
        self._unchecked = f"every commit loads the whole model anew, since {why}"
        log.warning("every commit loads the whole model anew: %s", why)

    def _forget_places(self) -> None:
        self._regions, self._standby, self._committed = None, None, {}
        self._copied = self._found_right = False

    @torch.no_grad()
    def _load_recorded(
        self, model: torch.nn.Module, staged: StagedModel, seed: int
    ) -> tuple[dict[int, Recorded], str]:
        """Columns of what was loaded, or what went wrong."""
        try:
            with recording(model, torch.Generator().manual_seed(seed)) as recorded:
                self.load(model, staged)
            self.repair_tied_layers(model, recorded)
        # The boundary of a worker call, which must not raise.
        except Exception as failure:  # noqa: BLE001
            self._restore(model)
            return {}, f"loading failed: {type(failure).__name__}: {failure}"
        return recorded, ""

    def _restore(self, model: torch.nn.Module) -> None:
        """Take a half-loaded model off the meta device, so that a later sync can load it."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in model.modules():
            info: Any = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        layerwise.LOADING_LAYERS.clear()

    def _configured(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        configured: AbstractContextManager[Any] = set_current_vllm_config(self._worker.vllm_config)
        return configured

    def _synchronize(self) -> None:
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)

    def _model(self) -> Any:
        return self._worker.model_runner.get_model()


def _listed(found: list[str]) -> str:
    return "; ".join(found[:NAMED]) + (f"; and {len(found) - NAMED} more" if len(found) > NAMED else "")


def free_beside_decoding(twin: ShadowModel) -> None:
    """Let go of what was live: that takes long, so it has a thread of its own."""
    threading.Thread(target=_free, args=(twin,), name="weights-free", daemon=True).start()


def _free(twin: ShadowModel) -> None:
    vars(twin).clear()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # glibc has it, others keep less
        give_back(0)
