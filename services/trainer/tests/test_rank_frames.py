"""The protocol between front and ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flotilla_trainer.wire.frames import PREFIX_BYTES, Frame, decode, encode, lengths


def over_the_wire(frame: Frame) -> Frame:
    data = b"".join(encode(frame))
    header, body = lengths(data[:PREFIX_BYTES])
    assert len(data) == PREFIX_BYTES + header + body
    return decode(data[PREFIX_BYTES : PREFIX_BYTES + header], data[PREFIX_BYTES + header :])


@given(
    st.dictionaries(st.text(max_size=9), st.one_of(st.integers(), st.text(), st.booleans(), st.none())),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4),
)
def test_frames_arrive_as_they_were_sent(fields: dict[str, object], shapes: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(0)
    kinds = [np.int32, np.float32, np.int64, np.bool_]
    arrays = {
        f"a/{index}": rng.integers(0, 2, shape).astype(kinds[index]) for index, shape in enumerate(shapes)
    }
    got = over_the_wire(Frame("train", 7, fields, arrays))
    assert (got.kind, got.number, got.fields) == ("train", 7, fields)
    assert list(got.arrays) == list(arrays)
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(got.arrays[name], array)


def test_arrays_that_are_not_contiguous_arrive_in_order() -> None:
    array = np.arange(12.0).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(over_the_wire(Frame("x", arrays={"a": array})).arrays["a"], array)


def test_numbers_that_are_not_finite_survive() -> None:
    got = over_the_wire(Frame("done", fields={"loss": float("nan"), "norm": float("inf")}))
    assert got.fields["loss"] != got.fields["loss"]
    assert got.fields["norm"] == float("inf")
