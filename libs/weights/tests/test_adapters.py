"""Adapters on the wire: weights once a group, then adapters alone, and one sum at both ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import InvalidRequest
from flotilla_weights.adapters import merged
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Manifest

Weights = dict[str, torch.Tensor]
SCALE = 2.0
BUCKET_BYTES = 4096
TARGETS = ("layers.0.q_proj", "layers.1.q_proj")
CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.float32) -> Weights:
    random = torch.Generator().manual_seed(0)
    shapes = {f"layers.{i}.{name}": (24, 16) for i in (0, 1) for name in ("q_proj.weight", "up_proj.weight")}
    return {
        name: torch.randn(shape, generator=random).to(dtype)
        for name, shape in {**shapes, "norm.weight": (16,)}.items()
    }


def adapters(seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {
        f"{target}.lora_{side}.weight": torch.randn(shape, generator=random)
        for target in TARGETS
        for side, shape in (("A", (3, 16)), ("B", (24, 3)))
    }


def named(tensors: Weights) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def manifest_of(weights: Weights, changed: Weights) -> Manifest:
    return Manifest.from_named(named(weights), BUCKET_BYTES).with_adapters(
        Manifest.from_named(named(changed), BUCKET_BYTES), SCALE
    )


def ordered(manifest: Manifest, tensors: Weights) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, tensors[spec.name]) for spec in manifest.tensors]


def summed(weights: Weights, changed: Weights) -> Weights:
    """As the formula says it, in float64."""
    result = dict(weights)
    for target in TARGETS:
        a, b = (changed[f"{target}.lora_{side}.weight"].double() for side in "AB")
        weight = weights[f"{target}.weight"]
        result[f"{target}.weight"] = (weight.double() + SCALE * b @ a).to(weight.dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_publication_brings_the_weights_and_later_ones_adapters_alone(dtype: torch.dtype) -> None:
    weights, versions = model(dtype), [adapters(1), adapters(2)]
    manifest = manifest_of(weights, versions[0])
    assert manifest.adapters is not None
    small = manifest.adapters.manifest
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 20.0)
    group = weights_pb2.WeightGroup(
        epoch=1,
        backend=1,
        host=sender.host,
        port=sender.port,
        secret=sender.secret,
        world_size=2,
        sender_ranks=[0],
    )
    group.timeout.FromSeconds(20)
    inbox = Inbox(receiver := Receiver(group, 1, manifest), manifest)
    heard: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(receiver.connect)
        sender.connect(manifest)
        joining.result()
        for index, changed in enumerate(versions):
            receiving = pool.submit(inbox.receive, heard.append)
            if index == 0:
                sender.publish(manifest, ordered(manifest, weights))
            sender.publish(small, ordered(small, changed))
            receiving.result()
            assert heard[-1] == inbox.buckets_received == manifest.messages(first=index == 0)
            whole = weights | changed
            assert inbox.digests == tensor_digests(whole[spec.name] for spec in manifest.all_tensors)
            staged = inbox.take()
            assert staged is not None and inbox.staged is None
            live, expected = dict(staged.tensors(CPU)), summed(weights, changed)
            assert live.keys() == expected.keys()
            for name, tensor in live.items():
                assert tensor.dtype == dtype
                torch.testing.assert_close(
                    tensor, expected[name], atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-6
                )
            assert {name for name, _ in staged.as_sent()} == {
                name for name in weights if name.removesuffix(".weight") not in TARGETS
            }
    sender.close()
    receiver.close()
    assert small.nbytes == sum(tensor.nbytes for tensor in versions[0].values())


def test_weights_that_do_not_fit_beside_the_live_ones_wait_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = model(torch.float32)
    manifest = Manifest.from_named(named(weights), BUCKET_BYTES)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 20.0)
    group = weights_pb2.WeightGroup(
        epoch=1, backend=1, host=sender.host, port=sender.port, secret=sender.secret, world_size=2
    )
    group.timeout.FromSeconds(20)
    inbox = Inbox(receiver := Receiver(group, 1, manifest), manifest)
    asked: list[int] = []
    monkeypatch.setattr(receiver, "has_room_for", lambda nbytes: asked.append(nbytes) or False)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(receiver.connect)
        sender.connect(manifest)
        joining.result()
        for _ in range(2):
            receiving = pool.submit(inbox.receive)
            sent = sender.publish(manifest, ordered(manifest, weights))
            receiving.result()
            assert inbox.digests == sent and asked.pop() == manifest.nbytes
            staged = inbox.take()
            assert staged is not None and staged.digests == dict(
                zip(dict(staged.as_sent()), sent, strict=True)
            )
            assert all(torch.equal(tensor, weights[name]) for name, tensor in staged.tensors(CPU))
        receiving = pool.submit(inbox.receive, on_host=True)
        sender.publish(manifest, ordered(manifest, weights))
        receiving.result()
        assert inbox.take() is not None and not asked, "nobody planned memory of the device for it"
    assert caplog.text.count("no room for") == 1
    sender.close()
    receiver.close()


def test_a_zero_adapter_leaves_every_bit_of_its_weight() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = model(dtype)["layers.0.q_proj.weight"]
        assert torch.equal(merged(weight, torch.randn(3, 16), torch.zeros(24, 3), SCALE), weight)


def test_a_manifest_with_adapters_travels_whole_and_its_digest_covers_them() -> None:
    manifest = manifest_of(model(), adapters(1))
    assert Manifest.from_proto(manifest.to_proto()) == manifest
    proto = manifest.to_proto()
    proto.adapters.scale = 3.0
    with pytest.raises(InvalidRequest, match="digest"):
        Manifest.from_proto(proto)
    assert manifest.digest != Manifest.from_named(named(model()), BUCKET_BYTES).digest


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"layers.0.q_proj.lora_A.weight": None}, "layers.0.q_proj.weight"),
        ({"layers.1.q_proj.lora_B.weight": torch.zeros(23, 3)}, "layers.1.q_proj.weight"),
        ({"layers.1.q_proj.lora_B.weight": torch.zeros(24, 4)}, "layers.1.q_proj.weight"),
        (
            {
                "layers.7.q_proj.lora_A.weight": torch.zeros(3, 16),
                "layers.7.q_proj.lora_B.weight": torch.zeros(24, 3),
            },
            "layers.7.q_proj.lora_A.weight",
        ),
    ],
)
def test_adapters_that_fit_no_weight_are_named(change: dict[str, torch.Tensor | None], where: str) -> None:
    changed = {name: tensor for name, tensor in (adapters(1) | change).items() if tensor is not None}
    with pytest.raises(InvalidRequest, match=where):
        manifest_of(model(), changed)
