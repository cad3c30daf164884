"""Weights of a torch model reach a decoding vLLM: exactly, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tokenizers
import torch
from safetensors.torch import load_file
from weight_bench import LONG, Bench

from flotilla.common.v1 import weights_pb2
from flotilla_core.config import LoraConfig
from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import WeightGroupFailed, WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import (
    FinishReason,
    GenerationRequest,
    KvPolicy,
    Sample,
    SampleSlot,
    Sampling,
)
from flotilla_generator.engine.vllm.boot import CPU_BATCHED_TOKENS
from flotilla_generator.engine.vllm.decoding import sampling_params
from flotilla_generator.engine.vllm.engine import VllmEngine
from flotilla_generator.engine.vllm.engine_process import look_at_classes
from flotilla_generator.engine.vllm.stop_texts import TOKENIZER_FILE
from flotilla_generator.weights import Phase
from flotilla_testing.unrelated_models import (
    BUCKET_BYTES,
    Tensors,
    difference,
    first_tokens,
    make_model,
    manifest_of,
    tensors_of,
)
from flotilla_trainer.rank.lora import Adapters
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SENDER = Path(__file__).with_name("dying_sender.py")
STALE_HEAD = r"lm_head\.weight: live head differs from what was staged"
TOLERANCE = 1e-4
CACHED_TOKENS = 400
"""Of a prompt that fills blocks of vLLM's prefix cache on any device."""


class AdaptedPolicy:
    """The trainer's end of a group that moves adapters: a model as the trainer computes it, and what it sends."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.model = make_model(seed).requires_grad_(False)
        self.weights = tensors_of(self.model)
        self.adapters = Adapters(self.model, LoraConfig(rank=8, alpha=16.0), seed, torch.device("cpu"))
        small = manifest_of(self.adapters.tensors())
        self.manifest = manifest_of(self.weights).with_adapters(small, self.adapters.scale)
        self._moves = torch.Generator().manual_seed(seed)
        self._sender: Sender | None = None
        self._base_digests: list[int] = []

    def move(self) -> None:
        """As an update would: every A and B becomes another one."""
        tensors = self.adapters.tensors()
        self.adapters.set({n: torch.randn(t.shape, generator=self._moves) * 0.05 for n, t in tensors.items()})

    async def join(self) -> None:
        """Form a group in place of the last one."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self._base_digests = await self.bench.join(self.manifest), []

    async def publish(self, sent: Tensors | None = None) -> None:
        """A whole sync; `sent` are the adapters on the wire where they differ from those that the digests are of."""
        self.bench.step += 1
        version = Version(0, self.bench.step)
        _, digests = await asyncio.gather(
            self.bench.weights.stage(self.bench.run_id, self.bench.epoch, version),
            asyncio.to_thread(self._send, sent or self.adapters.tensors()),
        )
        await self.bench.commit(
            weights_pb2.WeightDigests(
                version=version.to_proto(), manifest_digest=self.manifest.digest, tensor_digests=digests
            )
        )
        self.bench.model = self.model

    def _send(self, adapters: Tensors) -> list[int]:
        assert self._sender is not None and self.manifest.adapters is not None
        small = self.manifest.adapters.manifest
        if not self._base_digests:
            weights = [(spec.name, self.weights[spec.name]) for spec in self.manifest.tensors]
            self._base_digests = self._sender.publish(self.manifest, weights)
        self._sender.publish(small, [(spec.name, adapters[spec.name]) for spec in small.tensors])
        ours = self.adapters.tensors()
        return self._base_digests + tensor_digests(ours[spec.name] for spec in small.tensors)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    config = GeneratorConfig(kv_cache_gib=0.25, max_model_tokens=2048)
    engine = VllmEngine(config, Checkpoint.read(folder), "faulty_worker.FaultyWorker")
    await engine.start()
    try:
        yield Bench(engine, folder)
    finally:
        await engine.stop()


async def test_what_a_class_can_do_is_found_out_in_a_fork_like_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That spares the first start with a model a third import of vLLM."""
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delattr(registry, "_run_in_subprocess")
    names = Checkpoint.read(bench.folder).config["architectures"]
    await asyncio.to_thread(look_at_classes, names)
    assert len(list((tmp_path / "modelinfos").iterdir())) == len(names) == 1
    assert registry.ModelRegistry.models[names[0]].inspect_model_cls().is_text_generation_model


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_weights_of_a_torch_model_reach_vllm_within_1e_4(bench: Bench, temperature: float) -> None:
    await bench.sync(make_model(bench.epoch + 10))
    assert await bench.worst_difference(temperature) < TOLERANCE


async def test_requests_in_flight_survive_a_commit_and_their_spans_are_right(bench: Bench) -> None:
    await bench.sync(make_model(20))
    before, old = Version(0, bench.step), bench.model
    bench.model = make_model(21)
    staged = await bench.stage(tensors_of(bench.model))
    decoding = await bench.decoding(4)
    await bench.commit(staged)
    for prompt, sample in await decoding:
        first, second = sample.spans
        assert (first.version, second.version) == (before, Version(0, bench.step))
        assert first.start == 0 and first.end == second.start and second.end == LONG
        assert difference(bench.model, prompt, sample, 1.0, start=second.start) < TOLERANCE
        assert difference(old, prompt, first_tokens(first.end, sample), 1.0) < TOLERANCE


async def test_samples_that_begin_after_a_commit_reuse_no_cache_of_older_weights(bench: Bench) -> None:
    """Running ones keep theirs, and every token says who wrote it."""
    await bench.sync(make_model(22))
    before, old = Version(0, bench.step), bench.model
    random = np.random.default_rng(0)
    long_prompts = [random.integers(2, 256, CACHED_TOKENS).tolist() for _ in range(4)]
    few = Sampling(1.0, 8, ignore_eos=True)
    for prompt, sample in await bench.sample(long_prompts, few, salt=f"run/{before}"):
        assert difference(old, prompt, sample, 1.0) < TOLERANCE

    bench.model = make_model(23)
    staged = await bench.stage(tensors_of(bench.model))
    decoding = await bench.decoding(2)
    await bench.commit(staged, KvPolicy.REUSE)
    after = Version(0, bench.step)
    for prompt, sample in await bench.sample(long_prompts, few, salt=f"run/{after}"):
        assert difference(bench.model, prompt, sample, 1.0) < TOLERANCE
    stale = await bench.sample(long_prompts, few, salt=f"run/{before}")
    assert max(difference(bench.model, prompt, sample, 1.0) for prompt, sample in stale) > 0.1
    for prompt, sample in await decoding:
        first, second = sample.spans
        assert (first.version, second.version) == (before, after)
        assert first.start == 0 and first.end == second.start and second.end == LONG
        assert difference(old, prompt, first_tokens(first.end, sample), 1.0) < TOLERANCE


async def test_between_samples_each_one_ends_as_it_began_and_new_ones_wait_for_the_commit(
    bench: Bench,
) -> None:
    await bench.sync(make_model(24))
    before, old = Version(0, bench.step), bench.model
    bench.model = make_model(25)
    staged = await bench.stage(tensors_of(bench.model))
    decoding = await bench.decoding(2)
    committing = asyncio.create_task(bench.commit(staged, KvPolicy.DRAIN))
    await bench.wait_paused()
    late = asyncio.create_task(bench.sample(bench.prompts(3), Sampling(1.0, 8, ignore_eos=True)))
    await committing
    after = Version(0, bench.step)
    assert decoding.done()
    for prompt, sample in await decoding:
        assert [(span.version, span.start, span.end) for span in sample.spans] == [(before, 0, LONG)]
        assert difference(old, prompt, sample, 1.0) < TOLERANCE
    for prompt, sample in await late:
        assert {span.version for span in sample.spans} == {after}
        assert difference(bench.model, prompt, sample, 1.0) < TOLERANCE


async def test_more_seeded_tokens_than_one_step_can_prefill_are_all_sampled(bench: Bench) -> None:
    drawn = await bench.sample(bench.prompts(700), Sampling(1.0, 4, ignore_eos=True))
    assert sum(len(prompt) for prompt, _ in drawn) > CPU_BATCHED_TOKENS
    assert all(len(sample.token_ids) == 4 for _, sample in drawn)


async def test_what_a_step_waits_for_overtakes_the_rollouts_that_wait(bench: Bench) -> None:
    ended: list[int] = []
    waiting: list[int] = []

    async def one(number: int, prompt: list[int], priority: int) -> None:
        slot = SampleSlot("s", number)
        request = GenerationRequest(f"queued-{number}", prompt, (slot,), Sampling(1.0, 1), None, priority)
        async for _ in bench.engine.generate(request):
            ended.append(priority)
            waiting.append(bench.engine.waiting_samples)

    prompts = bench.prompts(700)
    async with bench.standing_still():
        asked = [asyncio.create_task(one(number, prompt, 3)) for number, prompt in enumerate(prompts)]
        await bench.wait_in_engine(len(prompts))
        asked.append(asyncio.create_task(one(len(prompts), prompts[0], -1)))
        await bench.wait_in_engine(len(prompts) + 1)
    await asyncio.gather(*asked)
    assert sum(map(len, prompts)) > CPU_BATCHED_TOKENS
    assert ended.index(-1) < len(prompts) // 2
    assert 0 < max(waiting) < len(prompts) and waiting[-1] == 0


async def test_samples_continue_with_right_logprobs_after_their_engine_slept(bench: Bench) -> None:
    running = await bench.decoding(2)
    await bench.engine.sleep()
    later = asyncio.create_task(bench.sample(bench.prompts(2), Sampling(1.0, 8, ignore_eos=True)))
    await bench.wait_in_engine(4)
    ended, _ = await asyncio.wait([running, later], timeout=1.0)
    assert not ended, "the engine decodes in its sleep"
    await bench.engine.wake()
    drawn = [*await running, *await later]
    assert [len(sample.token_ids) for _, sample in drawn] == [LONG, LONG, 8, 8]
    assert max(difference(bench.model, prompt, sample, 1.0) for prompt, sample in drawn) < TOLERANCE


async def test_a_wrong_tensor_is_named_and_the_old_weights_go_on_serving(bench: Bench) -> None:
    tensors = tensors_of(make_model(30))
    name = "model.layers.2.self_attn.k_proj.weight"
    damaged = tensors[name].clone()
    damaged[0, 0] += 1e-3
    with pytest.raises(WeightsMismatch, match=f"arrived otherwise than sent: {name}"):
        await bench.publish(tensors, sent={**tensors, name: damaged})
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_a_missing_k_proj_is_named_and_the_old_weights_go_on_serving(bench: Bench) -> None:
    tensors = tensors_of(make_model(31))
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(WeightsMismatch, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        await bench.join(manifest_of(tensors))
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_a_stale_tied_head_is_named_and_the_version_before_goes_on(bench: Bench) -> None:
    live = bench.weights.live
    running = await bench.decoding(2)
    async with bench.told("flotilla_leave_tied_heads_stale"):
        staged = await bench.stage(tensors_of(make_model(39)))
        with pytest.raises(WeightsMismatch, match=STALE_HEAD):
            await bench.commit(staged)
    assert (bench.weights.phase, bench.weights.live) == (Phase.IDLE, live)
    for _, sample in await running:
        assert {span.version for span in sample.spans} == {live}
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_weights_that_are_loaded_in_place_are_proved_and_a_stale_head_serves_nobody_until_the_next_sync(
    bench: Bench,
) -> None:
    async with bench.told("flotilla_load_in_place"):
        await bench.sync(make_model(40))
        assert await bench.worst_difference(1.0) < TOLERANCE
        live = bench.weights.live
        staged = await bench.stage(tensors_of(make_model(41)))
        running = await bench.decoding(2)
        async with bench.told("flotilla_leave_tied_heads_stale"):
            with pytest.raises(WeightsMismatch, match=STALE_HEAD):
                await bench.commit(staged)
        assert bench.weights.phase is Phase.BROKEN
        for _, sample in await running:
            assert sample.finish_reason is FinishReason.ABORT
            assert {span.version for span in sample.spans} == {live}
    await bench.sync(make_model(42))
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_a_sender_killed_mid_broadcast_leaves_vllm_serving_and_a_retry_works(bench: Bench) -> None:
    bench.epoch += 1
    checkpoint = str(bench.folder / "model.safetensors")
    command = [sys.executable, SENDER, checkpoint, str(BUCKET_BYTES), str(bench.epoch)]
    sender = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert sender.stdout
        port, secret = (await asyncio.to_thread(sender.stdout.readline)).split()
        stored = load_file(checkpoint)
        manifest = Manifest.from_named(((n, t.dtype, t.shape) for n, t in stored.items()), BUCKET_BYTES)
        await bench.weights.join(bench.run_id, bench.group(int(port), bytes.fromhex(secret)), 1, manifest)
        staging = asyncio.create_task(
            bench.weights.stage(bench.run_id, bench.epoch, Version(0, bench.step + 1))
        )
        assert (await asyncio.to_thread(sender.stdout.readline)).strip() == "halfway"
        sender.send_signal(signal.SIGKILL)
        with pytest.raises(WeightGroupFailed):
            await asyncio.wait_for(staging, timeout=10)
    finally:
        sender.kill()
        sender.wait()
    assert await bench.worst_difference(1.0) < TOLERANCE
    await bench.sync(make_model(50))
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_aborted_and_cancelled_requests_leave_the_engine(bench: Bench) -> None:
    request = GenerationRequest(
        "cut", [5, 6], (SampleSlot("a", 1), SampleSlot("b", 2)), Sampling(1.0, LONG, ignore_eos=True)
    )
    async with bench.standing_still():
        stream = bench.engine.generate(request)
        first = asyncio.ensure_future(anext(stream))
        await bench.wait_in_engine(2)
        assert await bench.engine.abort(["cut"]) == 2
        cut = await first
    cut += [sample async for ended in stream for sample in ended]
    assert [sample.finish_reason for sample in cut] == [FinishReason.ABORT] * 2

    stream = bench.engine.generate(GenerationRequest("gone", *list(vars(request).values())[1:]))
    first = asyncio.ensure_future(anext(stream))
    await bench.wait_in_engine(2)
    first.cancel()
    await asyncio.wait([first])
    await stream.aclose()
    assert bench.engine.decoding.running == []
    assert bench.in_engine() == 0


async def test_a_resumed_sample_has_the_logprobs_of_one_that_was_never_cut(bench: Bench) -> None:
    await bench.sync(make_model(55))
    prompt, tokens = [5, 6, 7], 200
    slots = tuple(SampleSlot(name, seed) for seed, name in enumerate("abc", 1))
    sampling = Sampling(0.8, LONG, ignore_eos=True)
    running = asyncio.create_task(_all(bench, GenerationRequest("cut", prompt, slots, sampling)))
    await asyncio.sleep(0)
    await bench.sample(bench.prompts(1), Sampling(1.0, 30, ignore_eos=True))  # came later and has ended
    await bench.engine.abort(["cut"])
    pieces = {piece.sample_id: piece for piece in await running}
    assert {piece.finish_reason for piece in pieces.values()} == {FinishReason.ABORT}
    assert all(20 <= len(piece.token_ids) < LONG for piece in pieces.values())
    assert all(piece.spans[-1].end == len(piece.token_ids) for piece in pieces.values())

    longest = max(len(piece.token_ids) for piece in pieces.values()) + tokens
    resumed = tuple(
        SampleSlot(slot.sample_id, slot.seed + 100, tuple(map(int, pieces[slot.sample_id].token_ids)))
        for slot in slots
    )
    rest = await _all(
        bench, GenerationRequest("rest", prompt, resumed, Sampling(0.8, longest, ignore_eos=True))
    )
    for last in rest:
        first = pieces[last.sample_id]
        assert len(first.token_ids) + len(last.token_ids) == longest
        assert [(span.version, span.start) for span in last.spans] == [(Version(0, bench.step), 0)]
        whole = replace(
            last,
            token_ids=np.concatenate([first.token_ids, last.token_ids]),
            logprobs=np.concatenate([first.logprobs, last.logprobs]),
        )
        assert difference(bench.model, prompt, whole, 0.8) < TOLERANCE


async def test_logprobs_are_those_that_vllm_computed_bit_for_bit(bench: Bench) -> None:
    from vllm.sampling_params import RequestOutputKind

    sampling = Sampling(0.8, 24, top_k=50, ignore_eos=True)
    ((prompt, sample),) = await bench.sample([[5, 6, 7, 8]], sampling, salt="ours")
    # A request that streams is left to vLLM, which sends each log-probability with its token.
    params = sampling_params(sampling, SampleSlot("streamed", bench.last_seed), ())
    params.output_kind = RequestOutputKind.DELTA
    tokens, logprobs = [], []
    streamed = {"prompt_token_ids": prompt, "cache_salt": "streamed"}
    async for output in bench.engine.llm.generate(streamed, params, "streamed"):
        (completion,) = output.outputs
        tokens += completion.token_ids
        logprobs += [
            entry[token].logprob
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    assert sample.token_ids.tolist() == tokens
    assert sample.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()


async def _all(bench: Bench, request: GenerationRequest) -> list[Sample]:
    return [sample async for ended in bench.engine.generate(request) for sample in ended]


async def test_the_same_seed_draws_the_same_sample_and_a_stop_token_ends_it(bench: Bench) -> None:
    async def draw(seed: int, **more: object) -> Sample:
        sampling = Sampling(1.0, 32, **{"ignore_eos": True, **more})
        request = GenerationRequest(f"draw-{seed}-{more}", [7, 8, 9], (SampleSlot("s", seed),), sampling)
        ((sample,),) = [ended async for ended in bench.engine.generate(request)]
        return sample

    first, again, other = await draw(1), await draw(1), await draw(2)
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()
    stop = int(first.token_ids[5])
    stopped = await draw(1, stop_token_ids=(stop,))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == first.token_ids.tolist()[: first.token_ids.tolist().index(stop) + 1]


async def test_a_text_ends_a_sample_that_keeps_the_token_which_completes_it(bench: Bench) -> None:
    words = {f"w{token}": token for token in range(bench.engine.info.vocabulary_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(bench.folder / TOKENIZER_FILE))

    async def draw(*stop: str, written: int = 0) -> Sample:
        slot = SampleSlot("s", 3, tuple(whole[:written]))
        request = GenerationRequest(
            f"text-{stop}-{written}", [7, 8, 9], (slot,), Sampling(1.0, 48, stop=stop, ignore_eos=True)
        )
        ((sample,),) = [ended async for ended in bench.engine.generate(request)]
        return sample

    whole: list[int] = []
    first = await draw()
    whole = first.token_ids.tolist()
    # Between two blocks of the cache, and where one begins.
    for end in (9, 14, 33):
        stop = f"w{whole[end - 1]} w{whole[end]}"
        stopped = await draw("never", stop)
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids.tolist() == whole[: end + 1]
        assert stopped.logprobs.tobytes() == first.logprobs[: end + 1].tobytes()
        assert stopped.spans[-1].end == end + 1
    assert (await draw("never")).finish_reason is FinishReason.LENGTH
    continued = await draw(f"w{whole[8]} w{(await draw(written=9)).token_ids[0]}", written=9)
    assert len(continued.token_ids) == 1, "a text may begin in what another generator wrote"


async def test_adapters_alone_make_vllm_the_policy_that_the_trainer_computes(bench: Bench) -> None:
    policy = AdaptedPolicy(bench, seed=60)
    await policy.join()
    for received in (policy.manifest.messages(first=True), policy.manifest.messages(first=False)):
        policy.move()
        await policy.publish()
        assert bench.weights.buckets_received == received
        assert await bench.worst_difference(1.0) < TOLERANCE


async def test_a_wrong_adapter_is_named_and_the_next_group_brings_everything_again(bench: Bench) -> None:
    policy = AdaptedPolicy(bench, seed=62)
    await policy.join()
    policy.move()
    await policy.publish()
    before = {name: tensor.clone() for name, tensor in policy.adapters.tensors().items()}
    policy.move()
    name = "model.layers.3.mlp.up_proj.lora_B.weight"
    damaged = policy.adapters.tensors()[name] + 1e-3
    with pytest.raises(WeightsMismatch, match=f"arrived otherwise than sent: {name}"):
        await policy.publish(sent={**policy.adapters.tensors(), name: damaged})
    newer = {name: tensor.clone() for name, tensor in policy.adapters.tensors().items()}
    policy.adapters.set(before)
    assert await bench.worst_difference(1.0) < TOLERANCE
    policy.adapters.set(newer)
    await policy.join()
    await policy.publish()
    assert await bench.worst_difference(1.0) < TOLERANCE


async def test_all_weights_of_another_run_replace_those_of_adapters(bench: Bench) -> None:
    policy = AdaptedPolicy(bench, seed=63)
    await policy.join()
    policy.move()
    await policy.publish()
    bench.run_id = "all weights"
    await bench.sync(make_model(64))
    assert await bench.worst_difference(1.0) < TOLERANCE
    bench.run_id = "adapters again"
    await policy.join()
    await policy.publish()
    assert await bench.worst_difference(1.0) < TOLERANCE
