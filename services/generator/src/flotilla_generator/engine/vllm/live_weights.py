"""The live model of one worker: replaced as a whole, and proved.

`LiveModel` chooses one of three ways for each version: `Exchange` on CPUs, `Copied` on GPUs from the second version on,
and `Reloaded` for all else. Invariants: `replace` either leaves the model as it was (`broken` false) or says that it is
broken; it reports success only for weights that were proved to be what was staged, or that `check` will compare beside
decoding. Sums with adapters are made while they are copied or loaded, a few tensors at a time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

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

PACKED = "the matrices are packed for the kernels of this CPU; the canary sees what they compute"
NOTHING_COMMITTED = "nothing was committed yet"
NAMED = 5
"""Faults that an answer names before it only counts."""


class Loader:
    """vLLM's own way to load a model, and to pack it, in one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.device: torch.device = worker.device
        self.packs = self.device.type == "cpu"
        """Whether layers multiply by packed copies of their weights, as on CPUs."""

    @property
    def live(self) -> Any:
        return self._worker.model_runner.get_model()

    def load(self, model: Any, staged: StagedModel) -> None:
        """Have vLLM load and pack every layer."""
        from vllm.model_executor.model_loader import reload

        with self.configured(), packing_again(model):
            reload.initialize_layerwise_reload(model)
            model.load_weights(staged.tensors(self.device))
            reload.finalize_layerwise_reload(model, self._worker.model_runner.model_config)

    @torch.no_grad()
    def load_recorded(self, model: Any, staged: StagedModel, seed: int) -> tuple[dict[int, Recorded], str]:
        """Load; return columns of what was loaded, or what went wrong."""
        try:
            with recording(model, torch.Generator().manual_seed(seed)) as recorded:
                self.load(model, staged)
            self.repair_tied_layers(model, recorded)
        # The boundary of a worker call, which must not raise.
        except Exception as failure:  # noqa: BLE001
            _restore(model)
            return {}, f"loading failed: {type(failure).__name__}: {failure}"
        return recorded, ""

    def repair_tied_layers(self, model: torch.nn.Module, recorded: dict[int, Recorded]) -> None:
        """Give layers whose weights were loaded through another one the kernel copy of that one.

        On CPUs a head tied to the embeddings multiplies by a packed copy of its own, which a reload leaves stale.
        Packing it once more would cost as much as a quarter of the whole reload.
        """
        if not self.packs:
            return
        loaded = {id(layer.weight): layer for _, layer in matrix_layers(model) if id(layer) in recorded}
        for _, layer in matrix_layers(model):
            source = loaded.get(id(layer.weight), layer)
            if source is not layer:
                layer.cpu_linear = source.cpu_linear

    def configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)


@dataclass
class Exchange:
    """A version in a twin of the live model, or what was wrong with it; references are exchanged.

    The way of CPUs, where packing for the kernels is nearly all of the work: a twin is loaded and packed during
    decoding, and proved between its steps. vLLM's packed kernels share scratch memory, so whatever multiplies runs on
    the thread that decodes.
    """

    twin: ShadowModel
    proving: Iterator[str | None]
    faults: list[str]
    proved: bool = False

    @classmethod
    def prepared(cls, loader: Loader, staged: StagedModel, seed: int) -> Self | None:
        """Load and pack a twin; return None where the model has none that can be trusted."""
        twin = ShadowModel(loader.live)
        recorded, error = loader.load_recorded(twin.model, staged, seed)
        twin.forget_how_to_load()
        if error:
            return cls(twin, iter(()), [error])
        elsewhere = twin.keeps_weights_elsewhere()
        if not elsewhere:
            return cls(twin, proving(twin.model, staged, recorded), [])
        log.warning("%s is more than a weight: from now on decoding waits while layers are packed", elsewhere)
        return None

    @torch.no_grad()
    def prove(self, limit_s: float) -> bool:
        """Between two steps of decoding, for about so long: continue the check; return whether it has ended."""
        deadline = time.perf_counter() + limit_s
        for fault in self.proving:
            if fault is not None:
                self.faults.append(fault)
            if time.perf_counter() > deadline:
                return False
        self.proved, self.proving = True, iter(())
        return True

    def replace(self) -> dict[str, Any]:
        if self.faults or not self.proved:
            return {"error": _listed(self.faults) or "it was not proved", "broken": False}
        started = time.perf_counter()
        self.twin.exchange()
        applied = time.perf_counter() - started
        # Letting go of what was live takes long, so it has a thread of its own.
        threading.Thread(target=_free, args=(self.twin,), name="weights-free", daemon=True).start()
        return {"error": "", "broken": False, "apply_s": applied, "verify_s": 0.0, "check": False}


@dataclass(frozen=True)
class Reloaded:
    """A version that is loaded and proved while decoding is paused; how to copy later ones is learned on the way."""

    live: LiveModel
    staged: StagedModel
    seed: int

    @torch.no_grad()
    def replace(self) -> dict[str, Any]:
        started = time.perf_counter()
        loader, staged = self.live.loader, self.staged
        model = loader.live
        regions = self.live.rehearsed(model, staged)
        recorded, error = loader.load_recorded(model, staged, self.seed)
        if error:
            return {"error": error, "broken": True}
        if loader.device.type == "cuda":
            torch.cuda.synchronize(loader.device)
        applied = time.perf_counter()
        error = _listed([fault for fault in proving(model, staged, recorded) if fault is not None])
        if regions is not None and not error:
            self.live.keep(regions, staged)
        return {
            "error": error,
            "broken": bool(error),
            "apply_s": applied - started,
            "verify_s": time.perf_counter() - applied,
            "check": self.live.regions is not None,
        }


@dataclass(frozen=True)
class Copied:
    """A version in a standby: copies out of it are only queued, and `check` compares what is live then.

    Where decoding was paused before it arrived, it lies in place already, and nothing is left to copy.
    """

    live: LiveModel
    standby: Standby
    expected: Digests

    def replace(self) -> dict[str, Any]:
        started = time.perf_counter()
        answer = {"broken": False, "apply_s": 0.0, "verify_s": 0.0, "check": False}
        if self.standby is not self.live.standby or not self.standby.regions.stand():
            self.live.forget_places()
            error = "the parameters of the live model moved; publish again"
            return answer | {"error": error, "broken": self.standby.in_place}
        try:
            self.standby.commit()
        # The boundary of a worker call, which must not raise.
        except Exception as failure:  # noqa: BLE001
            self.live.give_up_copies("copies failed")
            return answer | {"error": f"copying failed: {type(failure).__name__}: {failure}", "broken": True}
        self.live.committed, self.live.copied, self.live.unproved = self.expected, True, True
        return answer | {"error": "", "apply_s": time.perf_counter() - started, "check": True}


Following = Exchange | Reloaded | Copied
"""The version after the one that is live; its `replace` makes it live, and returns error, broken, apply_s, verify_s,
and whether to `check` it once decoding goes on."""


class LiveModel:
    """The model inside one vLLM worker: chooses the way of each version, and knows where copies go.

    That is learned from a reload, where copies are all that vLLM does. Memory that changed later is loaded and learned
    anew with the next version; copies that were wrong at once are not tried again.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.has_twins = loader.packs
        self._one_twin = threading.Lock()
        self._in_place = False
        self._ring_bytes = 0
        self._may_learn = True
        self._unchecked = PACKED if loader.packs else NOTHING_COMMITTED
        self.regions: LiveRegions | None = None
        self.standby: Standby | None = None
        self.committed: Digests = {}
        self.copied = self.unproved = False
        """Whether the last commit made copies, and whether no check has found them right yet."""

    def expect(self, manifest: Manifest) -> None:
        """Make room for the buckets of a new group, in place of those of the last one."""
        self._ring_bytes = manifest.ring_bytes
        if self.standby is not None:
            self.standby.forget_lent()

    def expect_in_place(self, in_place: bool) -> None:
        """Say whether the next publication finds decoding paused; called on the thread that decodes."""
        self._in_place = in_place
        if self.standby is not None:
            self.standby.stand_still()

    def begin(self) -> Filling | None:
        """Return what takes the tensors of a publication as they arrive, or None where they are staged as a whole."""
        if self.regions is not None and not self.regions.stand():
            self.forget_places()
        return None if self.standby is None else self.standby.begin()

    def fill(self, filling: Filling, staged: StagedModel | None, told: dict[str, int]) -> Copied:
        """End a publication: `staged` is what has to be summed first, if anything."""
        if staged is not None:
            filling.put_sums(staged, self.loader.device)
            told = staged.digests
        return Copied(self, filling.standby, filling.settle(told))

    def prepare(self, staged: StagedModel, seed: int) -> Exchange | Reloaded:
        """Do all work that is possible during decoding; `seed` chooses the columns of the proof."""
        # The thread of a transfer that was given up may still load its twin, through the same lists inside vLLM.
        with self._one_twin:
            if self.has_twins and not self._in_place:
                exchange = Exchange.prepared(self.loader, staged, seed)
                if exchange is not None:
                    return exchange
                self.has_twins = False
            return Reloaded(self, staged, seed)

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        """Compare the memory that decodes with what the last commit put there.

        Returns tensors, unchecked, faults, and how long the GPU copied at the commit (copies_s).

        It reads on a stream of its own, beside decoding. After the first commit it also makes the standby.
        """
        if self.regions is not None and self.standby is None:
            self._make_standby(self.regions)
        regions, compared = self.regions, len(self.committed)
        if regions is None or self.standby is None or not compared:
            return {"tensors": 0, "unchecked": self._unchecked, "faults": [], "copies_s": 0.0}
        with self.standby.beside_decoding():
            self.standby.wait_for_commit()
            faults = regions.differing(self.committed)
        copies_s = self.standby.copies_s if self.copied else 0.0
        if not regions.stand():
            faults.append("the parameters lie elsewhere than at the commit")
        if not faults:
            self.unproved = False
        elif self.unproved:
            self.give_up_copies("copies of a version did not bring its weights")
        else:
            log.warning("live memory has changed since a commit: the next version is loaded as a whole")
            self.forget_places()
        return {"tensors": compared, "unchecked": "", "faults": faults, "copies_s": copies_s}

    def rehearsed(self, model: torch.nn.Module, staged: StagedModel) -> LiveRegions | None:
        """Return the places of the tensors, if a copy is all that loading them means."""
        if not self._may_learn:
            return None
        try:
            with self.loader.configured():
                return LiveRegions.learned(model, staged)
        # The loaders are vLLM's: they run here in a way that they were not written for, and need not.
        except Exception as failure:  # noqa: BLE001
            self.give_up_copies(f"{failure}" or type(failure).__name__)
            return None

    def keep(self, regions: LiveRegions, staged: StagedModel) -> None:
        """Have later versions copied to these places, if the load of `staged` put there the same."""
        try:
            regions.require_agreement(staged)
            self.regions, self.committed = regions, regions.expected(staged)
        except NoRegionsError as failure:
            self.give_up_copies(str(failure))

    def give_up_copies(self, why: str) -> None:
        """Have every later version loaded and proved as the first one was."""
        self.forget_places()
        self._may_learn = False
        self._unchecked = f"every commit loads the whole model anew, since {why}"
        log.warning("every commit loads the whole model anew: %s", why)

    def forget_places(self) -> None:
        """Have the next version loaded, and learned from."""
        self.regions, self.standby, self.committed = None, None, {}
        self.copied = self.unproved = False

    def _make_standby(self, regions: LiveRegions) -> None:
        # The first version lay on the GPU as a whole, and torch would keep that memory from the trainer.
        torch.cuda.empty_cache()
        try:
            self.standby = (
                Standby(regions, None) if self._in_place else Standby.beside(regions, self._ring_bytes)
            )
        except (MemoryError, torch.OutOfMemoryError) as failure:
            self.give_up_copies(f"there is no memory for a second copy of the weights: {failure}")


def _restore(model: torch.nn.Module) -> None:
    """Take a half-loaded model off the meta device, so that a later sync can load it."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info: Any = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def _listed(found: list[str]) -> str:
    return "; ".join(found[:NAMED]) + (f"; and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _free(twin: ShadowModel) -> None:
    vars(twin).clear()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # glibc has it, others keep less
        give_back(0)
