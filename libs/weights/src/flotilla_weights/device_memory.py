"""Memory of a GPU that several processes of its host see: allocated by one of them, mapped by the others.

Invariants: it is the driver's own memory, because what torch's allocators hand out cannot always be exported; exported
memory lives as long as its process, since nobody knows when the last mapping of it ends; a mapping ends only after
`close`, and no tensor of it is used afterwards.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class ExportedMemory:
    """Memory of this process that others map by its `handle`."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        _enter(device)
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(handle)
        self.tensor = _tensor_at(address.value, nbytes, device)


class MappedMemory:
    """Memory that another process exported, of the same GPU."""

    def __init__(self, handle: bytes, nbytes: int, device: torch.device) -> None:
        _enter(device)
        address = ctypes.c_uint64()
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(ENABLE_PEER_ACCESS),
        )
        self._address = address
        self._device = device
        self.tensor = _tensor_at(address.value, nbytes, device)

    def close(self) -> None:
        """Unmap it; whatever reads it must have ended."""
        _enter(self._device)
        _call("cuIpcCloseMemHandle", self._address)


class _Range:
    """A range of addresses, as torch takes it over from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(_Range(address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError("torch copied memory of the driver that it should have taken over")
    return tensor


def _enter(device: torch.device) -> None:
    """Have the driver's calls of this thread mean the context that torch uses on this device."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{function} failed with {code}: {(text.value or b'unknown error').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
