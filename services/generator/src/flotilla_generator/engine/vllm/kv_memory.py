"""The GPU memory of a worker's KV cache, which is given back while a trainer on the same GPU works.

vLLM's sleep mode allocates weights and KV cache in pieces whose memory can be unmapped under addresses that stay, so
captured graphs stay valid. Its own calls move or drop the weights too; here they stay, since versions arrive by copies
into them.

Invariants: only pieces with tensors of the KV cache and nothing else are unmapped: vLLM 0.26 marks as KV cache all that
it allocates beside it, such as block tables, whose content must stay. Memory that was taken again is zeros, as after
the start: what a kernel reads beyond the end of a sample is multiplied by zero, and must be a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flotilla_core.errors import Exhausted, Internal

FREE_BLOCK = "inactive"


class KvMemory:
    """The KV cache of one worker of vLLM; none on a CPU, where nothing is given back."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._pieces: list[Any] = []
        """The pieces that can be unmapped, as vLLM records them; empty until they were looked for."""

    def give_back(self) -> int:
        """Unmap the memory and return the bytes; nothing may decode until `take_again`."""
        device = self._worker.device
        if device.type != "cuda":
            return 0
        from vllm.device_allocator import cumem

        torch.cuda.synchronize(device)
        if not self._pieces:
            known = cumem.CuMemAllocator.get_instance().pointer_to_data
            found = pieces_of(torch.cuda.memory_snapshot(), {at.data_ptr() for at in self._storages()})
            self._pieces = [known[at] for at in found if at in known]
        if not self._pieces:
            raise Internal(
                "the memory of the KV cache cannot be given back",
                why="no piece of vLLM's allocator for sleep mode has the KV cache and nothing else",
            )
        freed = 0
        for piece in self._pieces:
            if not piece.is_asleep:
                cumem.unmap_and_release(piece.handle)
                piece.is_asleep = True
                freed += piece.handle[1]
        torch.cuda.empty_cache()
        return freed

    def take_again(self) -> None:
        """Map all of it and write zeros; what an attempt before has mapped stays mapped."""
        device = self._worker.device
        if device.type != "cuda" or not self._pieces:
            return
        from vllm.device_allocator import cumem

        torch.cuda.empty_cache()
        for piece in self._pieces:
            if piece.is_asleep:
                try:
                    cumem.create_and_map(piece.handle)
                except RuntimeError as error:
                    free, total = torch.cuda.mem_get_info(device)
                    raise Exhausted(
                        f"the GPU has no room for the {sum(one.handle[1] for one in self._pieces):,} bytes of the KV "
                        "cache",
                        why=f"{error}; {free:,} of {total:,} bytes are free",
                        next_step="lower generator.kv_cache_gib, or see which process has the memory (nvidia-smi)",
                    ) from error
                piece.is_asleep = False
        for storage in self._storages():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        torch.cuda.synchronize(device)

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of the tensors of the KV cache, each once."""
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_in(self._worker.model_runner.kv_caches)
        }
        return list(found.values())


def tensors_in(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of all layers; a layer with a state instead of keys and values has a list of them."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from tensors_in(cache)


def pieces_of(segments: Sequence[Mapping[str, Any]], wanted: set[int]) -> list[int]:
    """Return where those segments of torch's allocator begin in which all that is used is at a `wanted` address."""
    found = []
    for segment in segments:
        used = [block["address"] for block in segment["blocks"] if block["state"] != FREE_BLOCK]
        if used and wanted.issuperset(used):
            found.append(segment["address"])
    return found
