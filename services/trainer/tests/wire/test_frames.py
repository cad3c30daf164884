"""The protocol between front and ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flotilla_trainer.rank.update import micro_batches
from flotilla_trainer.wire.frames import PREFIX_BYTES, Frame, decode, encode, lengths


def over_the_wire(frame: Frame) -> Frame:
    data = bytearray(b"".join(encode(frame)))
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


def test_every_column_of_a_micro_batch_reaches_the_rank_as_it_was_sent() -> None:
    rng = np.random.default_rng(0)
    # Odd counts of 4, 8 and 1 bytes, so that only aligned places hold them next to each other; and one without rows.
    columns = {
        "tokens": rng.integers(0, 99, (1, 7)).astype(np.int32),
        "positions": np.arange(5),
        "selected": rng.integers(0, 2, 5).astype(bool),
        "teacher_top_ids": rng.integers(0, 99, (5, 3)).astype(np.int32),
        "weights": rng.normal(0, 1, 5).astype(np.float32),
        "packed_lengths": np.array([4, 3]),
    }
    arrays = {f"{index}/{name}": array + index for index in range(12) for name, array in columns.items()}
    arrays["11/weights"] = np.zeros(0, np.float32)
    command = over_the_wire(Frame("train", 1, {"idle": [False] * 11 + [True]}, arrays))
    device = torch.device("cpu")
    everything = list(micro_batches(command, device))
    assert [idle for _, idle in everything] == [False] * 11 + [True]
    for index, (found, _) in enumerate(everything):
        assert found.keys() == columns.keys()
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), arrays[f"{index}/{name}"])
            assert tensor.numpy().dtype == arrays[f"{index}/{name}"].dtype
    part = list(micro_batches(command, device, range(1, 3)))
    assert [found["positions"].tolist() for found, _ in part] == [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]
