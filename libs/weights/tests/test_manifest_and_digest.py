"""Claims about what both ends of a sync agree on: cuts and digests."""

from __future__ import annotations

import pytest
import torch

from flotilla_core.errors import InvalidRequest
from flotilla_core.gpu_shares import BUCKETS_UNDER_WAY, ring_bytes
from flotilla_weights.digest import tensor_digest, tensor_digests
from flotilla_weights.manifest import ALIGNMENT, Manifest
from flotilla_weights.ring import Ring

NAMED = [
    ("lm_head.weight", torch.float32, (50, 16)),
    ("model.layers.10.w", torch.float32, (16, 16)),
    ("model.layers.2.w", torch.bfloat16, (3,)),
    ("model.layers.2.v", torch.float32, (16, 16)),
    ("model.embed_tokens.weight", torch.float32, (50, 16)),
    ("model.norm.weight", torch.float32, (16,)),
]


def test_layers_are_whole_and_in_order_with_the_embeddings_first():
    assert [spec.name for spec in Manifest.from_named(NAMED, 1000).tensors] == [
        "model.embed_tokens.weight",
        "model.layers.2.w",
        "model.layers.2.v",
        "model.layers.10.w",
        "lm_head.weight",
        "model.norm.weight",
    ]


def test_buckets_hold_every_tensor_once_aligned_and_within_their_size():
    manifest = Manifest.from_named(NAMED, 1100)
    slots = [slot for bucket in manifest.buckets for slot in bucket.slots]
    assert [slot.spec for slot in slots] == list(manifest.tensors)
    for bucket in manifest.buckets:
        assert bucket.nbytes <= 1100 or len(bucket.slots) == 1
        ends = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0 and slot.offset >= ends
            ends = slot.offset + slot.spec.nbytes
        assert bucket.nbytes == ends
    assert len(manifest.buckets[0].slots) == 1 and manifest.buckets[0].nbytes == 3200


def test_the_wire_form_is_equal_and_a_changed_one_is_refused():
    manifest = Manifest.from_named(NAMED, 1000)
    proto = manifest.to_proto()
    assert Manifest.from_proto(proto) == manifest
    proto.tensors[0].shape[0] = 51
    with pytest.raises(InvalidRequest, match="digest"):
        Manifest.from_proto(proto)


def test_every_part_of_a_manifest_counts_in_its_digest():
    name, dtype, shape = NAMED[0]
    variants = [
        Manifest.from_named(NAMED, 1000),
        Manifest.from_named(NAMED, 1001),
        Manifest.from_named(NAMED[1:], 1000),
        Manifest.from_named([("other", dtype, shape), *NAMED[1:]], 1000),
        Manifest.from_named([(name, torch.float16, shape), *NAMED[1:]], 1000),
        Manifest.from_named([(name, dtype, (16, 50)), *NAMED[1:]], 1000),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "needs tensors"),
        ([NAMED[0], NAMED[0]], "twice"),
        ([("x", torch.float32, (0, 3))], "empty"),
        ([("x", "float33", (3,))], "unknown tensor type"),
    ],
)
def test_manifests_that_cannot_be_are_refused(named, message):
    with pytest.raises(InvalidRequest, match=message):
        Manifest.from_named(named, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [1, 7, 4096, 300_001])
def test_any_single_changed_or_swapped_element_changes_the_digest(dtype, size):
    random = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 100, (size,), generator=random).to(dtype)
    tensor[0] = 101
    digests = {tensor_digest(tensor)}
    for position in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[position] += 1
        digests.add(tensor_digest(changed))
    swaps = 0
    for other in {1, size // 2, size - 1} - {0}:
        if other < size:
            swapped = tensor.clone()
            swapped[0], swapped[other] = tensor[other], tensor[0]
            digests.add(tensor_digest(swapped))
            swaps += 1
    assert len(digests) == 1 + len({0, size // 2, size - 1}) + swaps


def test_swapping_signs_rows_or_blocks_changes_the_digest():
    tensor = torch.ones(4, 1 << 16)
    tensor[0, 0], tensor[2, 5] = -1, 3
    digests = {tensor_digest(tensor), tensor_digest(tensor.flip(0)), tensor_digest(tensor[[0, 2, 1, 3]])}
    moved = torch.ones(4, 1 << 16)
    moved[0, 2], moved[2, 5] = -1, 3
    digests.add(tensor_digest(moved))
    assert len(digests) == 4


def test_the_digest_is_of_the_bytes_wherever_they_lie():
    tensor = torch.randn(1000, 33)
    view = torch.randn(1001, 66)[1:, ::2]
    view.copy_(tensor)
    buffer = torch.empty(tensor.numel() * 4 + 3, dtype=torch.uint8)
    buffer[3:].copy_(tensor.view(torch.uint8).view(-1))
    assert tensor_digests([tensor, view, buffer[3:]]) == [tensor_digest(tensor)] * 3


def test_the_digest_is_the_same_for_ever():
    assert tensor_digest(torch.arange(100_000, dtype=torch.int32)) == FIXED


FIXED = 0xAC328ABA0D793E08


def test_large_buckets_are_cut_so_that_a_model_has_a_few():
    manifest = Manifest.from_named([(f"layers.{i}.w", "bfloat16", (1 << 26,)) for i in range(9)], 512 << 20)
    assert len(manifest.buckets) == 3
    assert manifest.in_enough_buckets().bucket_bytes == (9 << 27) // 4
    small = Manifest.from_named([("w", "bfloat16", (1 << 26,))], 64 << 20)
    assert small.in_enough_buckets() == small


def test_adapters_travel_in_buckets_of_the_size_that_their_model_was_cut_to():
    model = Manifest.from_named([("q_proj.weight", "bfloat16", (1 << 14, 1 << 14))], 512 << 20)
    named = [
        (f"q_proj.lora_{side}.weight", "float32", shape)
        for side, shape in (("A", (8, 1 << 14)), ("B", (1 << 14, 8)))
    ]
    manifest = model.in_enough_buckets().with_adapters(Manifest.from_named(named, 512 << 20), 2.0)
    assert manifest.bucket_bytes < model.bucket_bytes
    assert Manifest.from_proto(manifest.to_proto()) == manifest


@pytest.mark.parametrize(
    ("embedding", "tied", "layer", "layers"),
    [
        (151_936 * 4096, False, 192 << 20, 36),
        (151_936 * 1024, True, 15 << 20, 28),
        (49_152 * 576, True, 4 << 20, 30),
    ],
    ids=["8b", "0.6b", "135m"],
)
def test_the_memory_of_a_ring_is_known_from_the_largest_tensors(
    embedding: int, tied: bool, layer: int, layers: int
):
    named = [("embed", "bfloat16", (embedding,))] + [
        (f"layers.{index}.w{part}", "bfloat16", (layer // 4,)) for index in range(layers) for part in range(4)
    ]
    named += [] if tied else [("lm_head", "bfloat16", (embedding,))]
    manifest = Manifest.from_named(named, 512 << 20).in_enough_buckets()
    ring = Ring(manifest, torch.device("meta"))
    indices = range(len(manifest.buckets))
    taken = sum({i % BUCKETS_UNDER_WAY: ring.message(i).untyped_storage().nbytes() for i in indices}.values())
    assert taken <= manifest.ring_bytes <= 1.5 * taken
    largest = sorted((spec.nbytes for spec in manifest.tensors), reverse=True)[:BUCKETS_UNDER_WAY]
    assert ring_bytes(manifest.nbytes, largest, 512 << 20) == manifest.ring_bytes
