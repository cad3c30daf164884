"""Errors, ids, versions and tensors: the small values that everything else is made of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flotilla.common.v1 import error_pb2, tensor_pb2
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core import errors, ids, protocol
from flotilla_core.errors import InvalidRequest, Mismatch
from flotilla_core.findings import parts_of, text_of
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version


def test_every_reason_of_the_contract_has_exactly_one_class() -> None:
    reasons = [kind.reason for kind in errors.FlotillaError.__subclasses__()]
    assert sorted(reasons) == sorted(
        set(error_pb2.ErrorReason.values()) - {error_pb2.ERROR_REASON_UNSPECIFIED}
    )


def test_a_message_reads_as_one_sentence() -> None:
    assert str(errors.NotFound("no run x")) == "no run x"
    assert str(errors.NotFound("no run x", where="ledger", why="gone", next_step="Look.")) == (
        "no run x (ledger): gone. Look."
    )


@pytest.mark.parametrize("kind", errors.FlotillaError.__subclasses__())
def test_a_finding_and_its_parts_tell_the_whole_error(kind: type[errors.FlotillaError]) -> None:
    error = kind("no run x", where="ledger", why="gone", next_step="Look.")
    parts = json.loads(json.dumps(parts_of(error.finding())))
    back = errors.error_of(Finding(**parts))
    assert type(back) is kind and str(back) == str(error) == text_of(error.finding())
    assert error.finding("the run waits").what == "the run waits: no run x"


def test_a_finding_of_a_later_version_is_an_error_all_the_same() -> None:
    assert type(errors.error_of(Finding(code="yet_unknown", what="x"))) is errors.Internal


def test_seeds_depend_on_every_part_and_stay_the_same_for_ever() -> None:
    assert ids.derive_seed(7, "run/0/3/1") == 7115311003453346632
    different = {ids.derive_seed(*parts) for parts in ((1, "a"), ("1", "a"), ("a", 1), ("1a",), (1, "b"))}
    assert len(different) == 5
    assert all(0 <= seed < 2**63 for seed in different)


def test_ids_name_their_parts() -> None:
    group = ids.group_id("run", 0, 12)
    assert group == "run/0/12"
    assert ids.sample_id(group, 3) == "run/0/12/3"
    assert ids.update_id("run", Version(1, 8)) == "run/1.8"
    assert ids.new_run_id("arith").startswith("arith-")
    assert ids.new_instance_id("generator-0") != ids.new_instance_id("generator-0")


def test_versions_are_ordered_by_lineage_first() -> None:
    assert Version(0, 9) < Version(1, 2) < Version(1, 3)
    assert Version.from_proto(Version(2, 5).to_proto()) == Version(2, 5)
    assert f"{Version(2, 5)}" == "2.5"


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "uint8", "bool"])
def test_tensors_read_back_equal(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    back = from_tensor(to_tensor(array.T))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array.T)
    assert from_tensor(to_tensor(array[:0])).shape == (0, 4)


def test_big_endian_arrays_travel_little_endian() -> None:
    assert to_tensor(np.array([1], dtype=">i4")).data == b"\x01\x00\x00\x00"


def test_absent_shape_means_one_dimension() -> None:
    tensor = tensor_pb2.Tensor(data=b"\x01\x00\x00\x00" * 3, dtype=tensor_pb2.DATA_TYPE_INT32)
    assert from_tensor(tensor).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (b"\x00" * 7, [2]),
        (b"\x00" * 8, [3]),
        (b"\x00" * 8, [-1, -2]),
        (b"\x00" * 7, []),
        (b"", [2**63 - 1, 0]),
        (b"\x00" * 4, [1] * 100),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(data: bytes, shape: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        from_tensor(tensor_pb2.Tensor(data=data, dtype=tensor_pb2.DATA_TYPE_INT32, shape=shape))


def test_dtypes_outside_the_contract_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="float16"):
        to_tensor(np.zeros(2, dtype="float16"))


def speaker(version: str) -> Registration:
    return Registration(instance_id="generator-0-a", address="10.0.0.1:1", protocol_version=version)


def test_a_build_understands_the_releases_beside_its_own_and_refuses_others_by_name() -> None:
    own = protocol.major_of(protocol.PROTOCOL_VERSION)
    assert own is not None
    for major in range(max(own - 1, protocol.OLDEST), own + 2):
        protocol.check_protocol(speaker(f"{major}.7"))
        assert protocol.refusal(speaker(f"{major}.7")) == ""
    for version in (f"{own - 2}.0", f"{protocol.OLDEST - 1}.0", f"{own + 2}.0", "", "new", "9" * 30):
        with pytest.raises(Mismatch, match="generator-0-a speaks protocol") as refused:
            protocol.check_protocol(speaker(version))
        assert protocol.PROTOCOL_VERSION in str(refused.value) and (version or "unknown") in str(
            refused.value
        )


def test_what_an_older_build_cannot_do_is_named_and_nothing_of_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = protocol.major_of(protocol.PROTOCOL_VERSION)
    assert own is not None
    monkeypatch.setitem(protocol.NEW_IN, own, ("sing", "dance"))
    assert (
        protocol.limits(speaker(f"{own - 1}.0"))
        == f"speaks protocol {own - 1}.0, so it cannot sing, or dance"
    )
    assert protocol.limits(speaker(f"{own}.9")) == protocol.limits(speaker(f"{own + 1}.0")) == ""
