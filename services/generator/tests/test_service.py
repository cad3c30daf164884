"""Claims about the generator's service, over gRPC, with the sim engine and real weight groups."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla.generator.v1 import generator_pb2_grpc
from flotilla_core import rpc
from flotilla_core.config.generators import GeneratorConfig, SimConfig
from flotilla_core.errors import (
    AlreadyExists,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    StaleVersion,
    Unavailable,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_core.service import Activities
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import Applied, EngineInfo, KvPolicy, WeightsNotLive
from flotilla_generator.engine.sim.engine import SimEngine
from flotilla_generator.request import read_request
from flotilla_generator.servicer import GeneratorServicer
from flotilla_testing.credentials import credential
from flotilla_testing.servers import serving
from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest

WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(64, 8),
    "model.layers.0.self_attn.k_proj.weight": torch.randn(8, 8),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8),
    "model.norm.weight": torch.randn(8),
}
CONFIG = {"vocab_size": 64, "max_position_embeddings": 128, "eos_token_id": 1, "tie_word_embeddings": True}


def manifest_of(weights: dict[str, torch.Tensor]) -> Manifest:
    return Manifest.from_named(((n, t.dtype, t.shape) for n, t in weights.items()), 600)


class StrictSim(SimEngine):
    """A sim engine that knows which tensors it needs, and can be made to fail at its commit."""

    broken = False

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, required_tensors={n: tuple(t.shape) for n, t in WEIGHTS.items()})

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        if self.broken:
            raise WeightsNotLive("lm_head.weight: live head differs from what was staged")
        return await super().apply(version, kv_policy)


class Replica:
    """A served engine and a trainer's sender."""

    def __init__(
        self,
        engine: StrictSim,
        servicer: GeneratorServicer,
        stub: generator_pb2_grpc.GeneratorServiceAsyncStub,
    ) -> None:
        self.engine = engine
        self.servicer = servicer
        self.stub = stub
        self.sender: Sender | None = None

    async def call(self, method: str, request: object, timeout_s: float = 20.0):
        return await rpc.unary(getattr(self.stub, method), request, timeout_s=timeout_s, attempts=1)

    async def samples(self, request: pb.GenerateRequest) -> list[pb.GeneratedSample]:
        stream = rpc.server_stream(self.stub.Generate, request, idle_timeout_s=20)
        return [sample async for response in stream for sample in response.samples]

    async def join(
        self, epoch: int, manifest: Manifest, run_id: str = "run", timeout_s: float = 10.0
    ) -> None:
        self.sender = sender = Sender.listen("127.0.0.1", epoch, 2, "gloo", timeout_s)
        group = weights_pb2.WeightGroup(
            epoch=epoch,
            backend=weights_pb2.WEIGHT_BACKEND_GLOO,
            host=sender.host,
            port=sender.port,
            secret=sender.secret,
            world_size=2,
            sender_ranks=[0],
        )
        group.timeout.FromNanoseconds(int(timeout_s * 1e9))
        request = pb.JoinWeightGroupRequest(
            run_id=run_id, group=group, rank_offset=1, manifest=manifest.to_proto()
        )
        connecting = asyncio.create_task(asyncio.to_thread(sender.connect, manifest))
        try:
            await self.call("JoinWeightGroup", request)
        except FlotillaError:
            sender.abort()
            await asyncio.wait([connecting])
            connecting.exception()
            raise
        await connecting

    async def stage(
        self, epoch: int, version: Version, weights: dict[str, torch.Tensor]
    ) -> tuple[pb.StageWeightsResponse, weights_pb2.WeightDigests]:
        assert self.sender
        manifest = manifest_of(weights)
        tensors = [(spec.name, weights[spec.name]) for spec in manifest.tensors]
        request = pb.StageWeightsRequest(run_id="run", epoch=epoch, policy_version=version.to_proto())
        digests, staged = await asyncio.gather(
            asyncio.to_thread(self.sender.publish, manifest, tensors), self.call("StageWeights", request)
        )
        sent = weights_pb2.WeightDigests(
            version=version.to_proto(), manifest_digest=manifest.digest, tensor_digests=digests
        )
        return staged, sent

    async def commit(
        self, epoch: int, version: Version, sent: weights_pb2.WeightDigests, run_id: str = "run"
    ) -> pb.CommitWeightsResponse:
        request = pb.CommitWeightsRequest(
            run_id=run_id, epoch=epoch, policy_version=version.to_proto(), expected=sent
        )
        return await self.call("CommitWeights", request)

    async def sync(self, epoch: int, version: Version) -> weights_pb2.WeightDigests:
        await self.join(epoch, manifest_of(WEIGHTS))
        staged, sent = await self.stage(epoch, version, WEIGHTS)
        assert staged.digests == sent
        await self.commit(epoch, version, sent)
        return sent

    async def status(self) -> pb.GetWeightStatusResponse:
        return await self.call("GetWeightStatus", pb.GetWeightStatusRequest(run_id="run"))


def ask(name: str = "request", samples: int = 2, tokens: int = 16, **more: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        run_id="run",
        request_id=name,
        prompt_token_ids=to_tensor(np.array([2, 3, 4], np.int32)),
        samples=[pb.SampleSlot(sample_id=f"{name}/{i}", seed=7 * i) for i in range(samples)],
        sampling=pb.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True),
    )
    request.MergeFrom(pb.GenerateRequest(**more))
    return request


def resumed(written: int, first: int = 5) -> pb.SampleSlot:
    tokens = np.full(written, first, np.int32)
    return pb.SampleSlot(sample_id="resumed", seed=3, prefix_token_ids=to_tensor(tokens))


async def serve(folder: Path, sim: SimConfig) -> AsyncIterator[Replica]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = GeneratorConfig(engine="sim", sim=sim, sleep_while_training=True)
    engine = StrictSim(config, Checkpoint.read(folder))
    servicer = GeneratorServicer(engine, Activities())
    trusted = credential(folder)
    async with serving(servicer, credential=trusted) as address:
        await engine.start()
        servicer.open()
        async with rpc.connect(address, credential=trusted) as channel:
            yield Replica(engine, servicer, generator_pb2_grpc.GeneratorServiceStub(channel))
    await engine.stop()


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    async for one in serve(tmp_path, SimConfig()):
        yield one


@pytest.fixture
async def slow_replica(tmp_path: Path) -> AsyncIterator[Replica]:
    async for one in serve(tmp_path, SimConfig(time_to_first_token_s=0.05, seconds_per_token=0.05)):
        yield one


async def test_every_sample_comes_back_once_with_ids_logprobs_and_the_same_draw_for_the_same_seed(replica):
    first = await replica.samples(ask("a", samples=5))
    second = await replica.samples(ask("b", samples=5))
    assert {s.sample_id for s in first} == {f"a/{i}" for i in range(5)}
    for one, other in zip(first, second, strict=True):
        ids = from_tensor(one.token_ids)
        assert ids.shape == from_tensor(one.logprobs).shape == (16,)
        assert ids.min() >= 0 and ids.max() < 64
        assert one.token_ids == other.token_ids
    assert first[0].token_ids != first[1].token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": to_tensor(np.array([64], np.int32))}, "outside the vocabulary of 64"),
        ({"prompt_token_ids": to_tensor(np.array([-1], np.int32))}, "token id -1"),
        ({"prompt_token_ids": to_tensor(np.zeros(128, np.int32))}, "128 tokens leaves no room"),
        ({"prompt_token_ids": to_tensor(np.zeros(0, np.int32))}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": to_tensor(np.zeros(3, np.float32))}, "integers"),
        ({"samples": []}, "samples is empty"),
        ({"samples": [pb.SampleSlot(sample_id="x"), pb.SampleSlot(sample_id="x")]}, "differ"),
        ({"sampling": pb.SamplingParams(temperature=-1, max_tokens=4)}, "temperature -1"),
        ({"sampling": pb.SamplingParams(temperature=float("nan"), max_tokens=4)}, "temperature is nan"),
        ({"sampling": pb.SamplingParams(temperature=1, max_tokens=0)}, "max_tokens is 0"),
        ({"sampling": pb.SamplingParams(temperature=1, max_tokens=4, top_p=2)}, "top_p 2"),
        ({"sampling": pb.SamplingParams(temperature=1, max_tokens=4, min_tokens=5)}, "min_tokens 5"),
        ({"sampling": pb.SamplingParams(temperature=1, max_tokens=4, stop_token_ids=[64])}, "stop token 64"),
        ({"sampling": pb.SamplingParams(temperature=1, max_tokens=4, stop=["x"])}, "stop needs a tokenizer"),
        ({"request_id": ""}, "request_id is empty"),
        ({"samples": [resumed(16)]}, "a prefix of 16 tokens leaves no room for another one"),
        ({"samples": [resumed(1, first=64)]}, "token id 64 is outside the vocabulary of 64"),
    ],
)
async def test_bad_requests_are_refused_by_name(replica, change, message):
    request = ask()
    for field, value in change.items():
        request.ClearField(field)
        request.MergeFrom(pb.GenerateRequest(**{field: value}))
    with pytest.raises(InvalidRequest, match=message):
        await replica.samples(request)


async def test_the_priority_of_a_request_reaches_the_engine(replica):
    request = read_request(ask(priority=-2), replica.engine.info, None)
    assert request.priority == -2 and read_request(ask(), replica.engine.info, None).priority == 0


async def test_without_a_commit_boot_weights_are_served_but_never_as_a_version(replica):
    (sample,) = await replica.samples(ask(samples=1))
    assert [s.HasField("version") for s in sample.version_spans] == [False]
    with pytest.raises(StaleVersion, match=r"version 0\.0 of run run"):
        await replica.samples(ask(min_version=Version(0, 0).to_proto()))


async def test_a_sync_makes_a_version_live_and_older_replicas_are_not_asked(replica):
    await replica.sync(1, Version(0, 3))
    assert (await replica.status()).live_version == Version(0, 3).to_proto()
    (sample,) = await replica.samples(ask(samples=1, min_version=Version(0, 3).to_proto()))
    (span,) = sample.version_spans
    assert (Version.from_proto(span.version), span.start, span.end) == (Version(0, 3), 0, 16)
    with pytest.raises(StaleVersion, match=r"serves version 0\.3"):
        await replica.samples(ask(min_version=Version(0, 4).to_proto()))
    with pytest.raises(StaleVersion):
        await replica.samples(ask(min_version=Version(0, 1).to_proto(), run_id="other"))


async def test_committing_the_live_version_again_changes_nothing(replica):
    sent = await replica.sync(1, Version(0, 1))
    again = await replica.commit(1, Version(0, 1), sent)
    assert again.stall.ToNanoseconds() == 0


async def test_other_weights_under_the_live_version_are_never_taken_for_it(replica):
    await replica.sync(1, Version(0, 1))
    other = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    _, sent = await replica.stage(1, Version(0, 1), other)
    await replica.commit(1, Version(0, 1), sent)
    live = replica.engine.weights
    assert all(torch.equal(live[name], tensor) for name, tensor in other.items())


async def test_the_group_is_reused_version_after_version(replica):
    await replica.sync(1, Version(0, 1))
    for step in (2, 3):
        _, sent = await replica.stage(1, Version(0, step), WEIGHTS)
        await replica.commit(1, Version(0, step), sent)
    assert (await replica.status()).live_version.step == 3


async def test_a_tensor_that_arrived_otherwise_than_sent_is_named_and_the_old_version_serves(replica):
    await replica.sync(1, Version(0, 1))
    _, sent = await replica.stage(1, Version(0, 2), WEIGHTS)
    wrong = [spec.name for spec in manifest_of(WEIGHTS).tensors].index(
        "model.layers.0.self_attn.k_proj.weight"
    )
    sent.tensor_digests[wrong] ^= 1
    with pytest.raises(
        WeightsMismatch, match=r"arrived otherwise than sent: model\.layers\.0\.self_attn\.k_proj"
    ):
        await replica.commit(1, Version(0, 2), sent)
    assert (await replica.status()).live_version.step == 1
    assert await replica.samples(ask(min_version=Version(0, 1).to_proto()))
    _, sent = await replica.stage(1, Version(0, 2), WEIGHTS)
    await replica.commit(1, Version(0, 2), sent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.0.self_attn.k_proj.weight": None},
            r"missing: model\.layers\.0\.self_attn\.k_proj\.weight",
        ),
        ({"model.extra.weight": torch.zeros(2)}, r"extra: model\.extra\.weight"),
        ({"model.norm.weight": torch.zeros(9)}, r"model\.norm\.weight is \[9\] instead of \[8\]"),
    ],
)
async def test_a_manifest_that_does_not_fit_the_model_is_refused_at_the_door(replica, change, message):
    weights = {name: tensor for name, tensor in {**WEIGHTS, **change}.items() if tensor is not None}
    with pytest.raises(WeightsMismatch, match=message):
        await replica.join(1, manifest_of(weights))
    await replica.sync(1, Version(0, 1))


async def test_broken_weights_serve_nobody_until_a_whole_sync_succeeds(replica):
    await replica.sync(1, Version(0, 1))
    replica.engine.broken = True
    _, sent = await replica.stage(1, Version(0, 2), WEIGHTS)
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight: live head differs"):
        await replica.commit(1, Version(0, 2), sent)
    assert (await replica.status()).phase == pb.WEIGHT_PHASE_BROKEN
    with pytest.raises(FailedPrecondition, match=r"lm_head\.weight"):
        await replica.samples(ask())
    replica.engine.broken = False
    _, sent = await replica.stage(1, Version(0, 2), WEIGHTS)
    await replica.commit(1, Version(0, 2), sent)
    assert await replica.samples(ask(min_version=Version(0, 2).to_proto()))


async def test_older_epochs_and_foreign_groups_are_stale(replica):
    await replica.sync(5, Version(0, 1))
    with pytest.raises(StaleVersion, match="epoch 5 is not newer than 5"):
        await replica.join(5, manifest_of(WEIGHTS))
    stage = pb.StageWeightsRequest(run_id="run", epoch=4, policy_version=Version(0, 2).to_proto())
    with pytest.raises(StaleVersion, match="epoch 4"):
        await replica.call("StageWeights", stage)
    with pytest.raises(FailedPrecondition, match="not staged"):
        await replica.commit(5, Version(0, 2), weights_pb2.WeightDigests())


async def test_another_run_takes_the_replica_over_without_its_versions(replica):
    await replica.sync(5, Version(0, 7))
    await replica.join(1, manifest_of(WEIGHTS), run_id="other")
    status = await replica.status()
    assert status.epoch == 1 and not status.HasField("live_version")


async def test_a_sender_that_dies_leaves_the_old_version_serving_and_a_new_epoch_works(replica):
    await replica.sync(1, Version(0, 1))
    assert replica.sender
    stage = pb.StageWeightsRequest(run_id="run", epoch=1, policy_version=Version(0, 2).to_proto())
    staging = asyncio.create_task(replica.call("StageWeights", stage))
    await until(replica, pb.WEIGHT_PHASE_RECEIVING)
    replica.sender.abort("the trainer died")
    with pytest.raises(WeightGroupFailed, match="the trainer died"):
        await staging
    assert (await replica.status()).phase == pb.WEIGHT_PHASE_IDLE
    assert await replica.samples(ask(min_version=Version(0, 1).to_proto()))
    with pytest.raises(FailedPrecondition, match="no weight group"):
        await replica.call("StageWeights", stage)
    await replica.sync(2, Version(0, 2))


async def test_a_stage_that_never_completes_ends_at_the_timeout_of_the_group(replica):
    await replica.join(1, manifest_of(WEIGHTS), timeout_s=0.5)
    stage = pb.StageWeightsRequest(run_id="run", epoch=1, policy_version=Version(0, 1).to_proto())
    with pytest.raises(WeightGroupFailed, match="waiting for the sender to publish"):
        await replica.call("StageWeights", stage)


async def test_abort_and_cancel_end_a_stage_in_progress(replica):
    stage = pb.StageWeightsRequest(run_id="run", epoch=1, policy_version=Version(0, 1).to_proto())
    await replica.join(1, manifest_of(WEIGHTS))
    staging = asyncio.create_task(replica.call("StageWeights", stage))
    await until(replica, pb.WEIGHT_PHASE_RECEIVING)
    # A run that the replica was taken from may say its last word late.
    await replica.call("AbortWeights", pb.AbortWeightsRequest(run_id="former"))
    assert (await replica.status()).phase == pb.WEIGHT_PHASE_RECEIVING
    await replica.call("AbortWeights", pb.AbortWeightsRequest(run_id="run"))
    with pytest.raises(WeightGroupFailed, match="aborted"):
        await staging

    await replica.join(2, manifest_of(WEIGHTS))
    stage.epoch = 2
    staging = asyncio.create_task(replica.call("StageWeights", stage))
    await until(replica, pb.WEIGHT_PHASE_RECEIVING)
    staging.cancel()
    await until(replica, pb.WEIGHT_PHASE_IDLE)
    assert replica.sender
    with pytest.raises(WeightGroupFailed):
        await asyncio.to_thread(replica.sender.publish, manifest_of(WEIGHTS), [])
    await replica.sync(3, Version(0, 1))


async def test_requests_in_flight_survive_a_commit_and_say_who_wrote_what(slow_replica):
    generating = asyncio.create_task(slow_replica.samples(ask(samples=3)))
    await running(slow_replica, 3)
    await slow_replica.sync(1, Version(0, 1))
    for sample in await generating:
        spans = [(s.HasField("version"), s.start, s.end) for s in sample.version_spans]
        assert spans[-1][0] and spans[-1][2] == 16 and spans[0][1] == 0
        assert all(one[2] == other[1] for one, other in itertools.pairwise(spans))


async def test_abort_delivers_what_is_there_and_cancel_leaves_nothing_running(slow_replica):
    generating = asyncio.create_task(slow_replica.samples(ask("cut", samples=3)))
    await running(slow_replica, 3)
    with pytest.raises(AlreadyExists, match="request cut runs already"):
        await slow_replica.samples(ask("cut"))
    assert await slow_replica.engine.abort(["cut"]) == 3
    cut = await generating
    assert [s.finish_reason for s in cut] == [pb.FINISH_REASON_ABORT] * 3
    assert all(from_tensor(s.token_ids).size < 16 for s in cut)

    generating = asyncio.create_task(slow_replica.samples(ask("gone", samples=3)))
    await running(slow_replica, 3)
    generating.cancel()
    await running(slow_replica, 0)


async def test_a_resumed_sample_brings_the_rest_of_its_tokens_alone(replica):
    whole = {"sampling": pb.SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)}
    request = ask("rest", **whole)
    request.ClearField("samples")
    request.samples.extend([resumed(11), pb.SampleSlot(sample_id="new", seed=3)])
    samples = {sample.sample_id: sample for sample in await replica.samples(request)}
    sizes = {sample_id: from_tensor(sample.token_ids).size for sample_id, sample in samples.items()}
    assert sizes == {"resumed": 5, "new": 16}
    rest = samples["resumed"]
    assert [(span.start, span.end) for span in rest.version_spans] == [(0, 5)]
    assert rest.finish_reason == pb.FINISH_REASON_LENGTH


async def test_what_still_runs_when_a_replica_must_go_is_handed_over_in_part(slow_replica):
    generating = asyncio.create_task(slow_replica.samples(ask("late", samples=2)))
    await running(slow_replica, 2)
    await slow_replica.servicer.close(grace_s=0.2)
    cut = await generating
    assert [s.finish_reason for s in cut] == [pb.FINISH_REASON_ABORT] * 2
    assert all(from_tensor(s.token_ids).size < 16 for s in cut)


async def test_a_sleeping_replica_refuses_weights_and_work_of_others_until_it_wakes(replica):
    sent = await replica.sync(1, Version(0, 1))
    await replica.call("Sleep", pb.SleepRequest(run_id="run"))
    assert (await replica.status()).asleep
    stage = pb.StageWeightsRequest(run_id="run", epoch=1, policy_version=Version(0, 2).to_proto())
    for refused in (
        replica.samples(ask(run_id="other")),
        replica.call("StageWeights", stage),
        replica.commit(1, Version(0, 1), sent),
    ):
        with pytest.raises(Unavailable, match="the replica sleeps"):
            await refused
    with pytest.raises(InvalidRequest, match="run_id is empty"):
        await replica.call("Wake", pb.WakeRequest())
    await replica.call("Wake", pb.WakeRequest(run_id="run"))
    assert not (await replica.status()).asleep
    assert await replica.samples(ask(min_version=Version(0, 1).to_proto()))
    _, sent = await replica.stage(1, Version(0, 2), WEIGHTS)
    await replica.commit(1, Version(0, 2), sent)


@pytest.mark.parametrize("run_id", ["run", "other"])
async def test_a_replica_whose_coordinator_died_while_it_slept_wakes_for_whoever_brings_weights(
    replica, run_id
):
    await replica.sync(1, Version(0, 1))
    await replica.call("Sleep", pb.SleepRequest(run_id="run"))
    await replica.join(2, manifest_of(WEIGHTS), run_id=run_id)
    assert not (await replica.status()).asleep
    assert await replica.samples(ask())


async def test_a_run_that_ends_in_its_sleep_leaves_it_to_the_next_one_to_wake(replica):
    await replica.sync(1, Version(0, 1))
    await replica.call("Sleep", pb.SleepRequest(run_id="run"))
    await replica.call("AbortWeights", pb.AbortWeightsRequest(run_id="run"))
    assert (await replica.status()).asleep
    await replica.sync(2, Version(0, 2))
    assert await replica.samples(ask(min_version=Version(0, 2).to_proto()))


async def test_samples_stand_still_while_their_replica_sleeps_and_end_after_it_woke(slow_replica):
    before = asyncio.create_task(slow_replica.samples(ask("before", samples=3)))
    await running(slow_replica, 3)
    await slow_replica.call("Sleep", pb.SleepRequest(run_id="run"))
    during = asyncio.create_task(slow_replica.samples(ask("during", samples=2)))
    await running(slow_replica, 5)
    longest_s = 16 * 0.05 + 0.05
    ended, _ = await asyncio.wait([before, during], timeout=longest_s + 0.5)
    assert not ended and (await slow_replica.status()).asleep
    await slow_replica.call("Wake", pb.WakeRequest(run_id="run"))
    async with asyncio.timeout(5):
        assert [len(samples) for samples in await asyncio.gather(before, during)] == [3, 2]


async def until(replica: Replica, phase: int) -> None:
    async with asyncio.timeout(5):
        while (await replica.status()).phase != phase:
            await asyncio.sleep(0.01)


async def running(replica: Replica, samples: int) -> None:
    async with asyncio.timeout(5):
        while sum(map(len, replica.engine.requests.values())) != samples:
            await asyncio.sleep(0.01)
