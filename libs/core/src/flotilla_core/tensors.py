"""Dense arrays on the wire.

Invariants: bytes are little-endian and row-major; reading copies nothing beyond the message itself and gives
a read-only array; a tensor whose bytes do not fit its shape is refused, never padded or cut.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.common.v1 import tensor_pb2 as pb
from flotilla_core.errors import InvalidRequest

_DTYPES: dict[pb.DataType.ValueType, np.dtype[Any]] = {
    pb.DATA_TYPE_INT32: np.dtype("<i4"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    pb.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    pb.DATA_TYPE_UINT8: np.dtype("u1"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def to_tensor(array: NDArray[Any]) -> pb.Tensor:
    """Return the message for `array`; dtypes outside the contract are refused."""
    code = _CODES.get(array.dtype)
    if code is None:
        array = _little_endian(array)
        code = _CODES[array.dtype]
    return pb.Tensor(data=array.tobytes(), dtype=code, shape=array.shape)


def from_tensor(tensor: pb.Tensor) -> NDArray[Any]:
    """Return a read-only array over the message's bytes."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"tensor dtype {tensor.dtype} is not known")
    data = tensor.data
    shape = tuple(tensor.shape) or (len(data) // dtype.itemsize,)
    if min(shape) >= 0 and math.prod(shape) * dtype.itemsize == len(data):
        try:
            return np.frombuffer(data, dtype=dtype).reshape(shape)
        except ValueError:
            pass  # numpy bounds the number of dimensions, and the length of one next to another of length 0.
    raise InvalidRequest(f"tensor of {len(data)} bytes does not hold {dtype.name}{list(shape)}")


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        known = ", ".join(one.name for one in _CODES)
        raise InvalidRequest(
            f"dtype {array.dtype} has no place in a Tensor", next_step=f"Use one of {known}."
        )
    return array.astype(dtype)
