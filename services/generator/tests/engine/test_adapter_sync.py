"""Adapters through the weight sessions of sim replicas, over real groups: who comes late holds what all hold."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.generators import GeneratorConfig, SimConfig
from flotilla_core.errors import WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import EngineInfo, KvPolicy
from flotilla_generator.engine.sim.engine import SimEngine
from flotilla_generator.weights import WeightSession
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest

SCALE = 2.0
LIMIT_S = 20.0
ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    "model.embed_tokens.weight": (64, 8),
    f"{ATTENTION}.q_proj.weight": (8, 8),
    f"{ATTENTION}.k_proj.weight": (4, 8),
    "model.norm.weight": (8,),
}
ADAPTED = (f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj")
Tensors = dict[str, torch.Tensor]


class StrictSim(SimEngine):
    """A sim engine that knows which tensors it needs."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, required_tensors=SHAPES)


class Session(WeightSession):
    """A session whose engine can be looked at."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__(engine)
        self.engine = engine


def random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def adapters(seed: int) -> Tensors:
    sides = {f"{module}.lora_A.weight": (2, 8) for module in ADAPTED}
    sides |= {f"{module}.lora_B.weight": (SHAPES[f"{module}.weight"][0], 2) for module in ADAPTED}
    return random(sides, seed)


def manifest_of(tensors: Tensors) -> Manifest:
    return Manifest.from_named(((n, t.dtype, t.shape) for n, t in tensors.items()), 600)


def summed(weights: Tensors, changed: Tensors) -> Tensors:
    return {
        name: weight.double() + SCALE * changed[f"{module}.lora_B.weight"].double() @ changed[a].double()
        if (a := f"{(module := name.removesuffix('.weight'))}.lora_A.weight") in changed
        else weight.double()
        for name, weight in weights.items()
    }


class Group:
    """The trainer's end of one epoch with its replicas."""

    def __init__(self, epoch: int, sessions: list[Session], manifest: Manifest, run_id: str) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._manifest = manifest
        self._run_id = run_id
        self._weight_digests: list[int] = []
        self._sender = Sender.listen("127.0.0.1", epoch, len(sessions) + 1, "gloo", LIMIT_S)

    async def form(self) -> None:
        group = weights_pb2.WeightGroup(
            epoch=self._epoch,
            backend=weights_pb2.WEIGHT_BACKEND_GLOO,
            host=self._sender.host,
            port=self._sender.port,
            secret=self._sender.secret,
            world_size=len(self._sessions) + 1,
            sender_ranks=[0],
        )
        group.timeout.FromSeconds(int(LIMIT_S))
        await asyncio.gather(
            asyncio.to_thread(self._sender.connect, self._manifest),
            *(s.join(self._run_id, group, i, self._manifest) for i, s in enumerate(self._sessions, 1)),
        )

    async def sync(self, step: int, weights: Tensors, changed: Tensors | None = None) -> None:
        version = Version(0, step)
        digests, *staged = await asyncio.gather(
            asyncio.to_thread(self._send, weights, changed or {}),
            *(session.stage(self._run_id, self._epoch, version) for session in self._sessions),
        )
        expected = weights_pb2.WeightDigests(
            version=version.to_proto(), manifest_digest=self._manifest.digest, tensor_digests=digests
        )
        assert {one.digests for one in staged} == {tuple(digests)}
        for session in self._sessions:
            assert session.buckets_received == session.buckets_total
            await session.commit(self._run_id, self._epoch, version, KvPolicy.RECOMPUTE, expected)
            assert session.live == version

    def close(self) -> None:
        self._sender.close()

    def _send(self, weights: Tensors, changed: Tensors) -> list[int]:
        if not self._weight_digests or not changed:
            ordered = [(spec.name, weights[spec.name]) for spec in self._manifest.tensors]
            self._weight_digests = self._sender.publish(self._manifest, ordered)
        if self._manifest.adapters is None:
            return self._weight_digests
        small = self._manifest.adapters.manifest
        sent = self._sender.publish(small, [(spec.name, changed[spec.name]) for spec in small.tensors])
        assert sent == tensor_digests(changed[spec.name] for spec in small.tensors)
        return self._weight_digests + sent


@pytest.fixture
def sessions(tmp_path: Path) -> list[Session]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 128}))
    config = GeneratorConfig(engine="sim", sim=SimConfig())
    return [Session(StrictSim(config, Checkpoint.read(tmp_path))) for _ in range(2)]


def assert_holds(session: Session, expected: Tensors) -> None:
    live = session.engine.weights
    assert live.keys() == expected.keys()
    for name, tensor in live.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), atol=1e-6, rtol=1e-6)


async def test_a_late_joiner_and_a_run_of_all_weights_afterwards_hold_what_was_sent(
    sessions: list[Session],
) -> None:
    early, late = sessions
    weights, small = random(SHAPES, 0), manifest_of(adapters(1))
    manifest = manifest_of(weights).with_adapters(small, SCALE)
    alone = Group(1, [early], manifest, "adapters")
    await alone.form()
    counts = []
    for step in (1, 2):
        await alone.sync(step, weights, adapters(step))
        assert_holds(early, summed(weights, adapters(step)))
        counts.append(early.buckets_received)
    assert counts == [manifest.messages(first=True), len(small.buckets)]
    alone.close()

    both = Group(2, [early, late], manifest, "adapters")
    await both.form()
    for step in (3, 4):
        await both.sync(step, weights, adapters(step))
        for session in sessions:
            assert_holds(session, summed(weights, adapters(step)))
    both.close()

    others = random(SHAPES, 9)
    whole = Group(1, [early, late], manifest_of(others), "all weights")
    await whole.form()
    await whole.sync(1, others)
    for session in sessions:
        assert_holds(session, others)
    whole.close()


async def test_adapters_do_not_excuse_a_weight_that_is_missing(sessions: list[Session]) -> None:
    weights = random(SHAPES, 0)
    del weights[f"{ATTENTION}.k_proj.weight"]
    changed = {name: tensor for name, tensor in adapters(1).items() if "k_proj" not in name}
    manifest = manifest_of(weights).with_adapters(manifest_of(changed), SCALE)
    with pytest.raises(WeightsMismatch, match=r"missing: model\.layers\.0\.self_attn\.k_proj\.weight"):
        await sessions[0].join("run", weights_pb2.WeightGroup(epoch=1), 1, manifest)
    assert sessions[0].live is None
