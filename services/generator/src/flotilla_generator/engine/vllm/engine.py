"""AsyncLLM behind the `Engine` seam.

Invariants: each sample is one vLLM request and leaves as soon as it ends; live weights change only between a pause that
keeps running requests and the resume after it. Works on vLLM 0.26 to 0.32: newer calls are used where they exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.stack import GeneratorConfig
from flotilla_core.errors import FailedPrecondition, Internal, WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import (
    Applied,
    Engine,
    EngineInfo,
    GenerationRequest,
    KvPolicy,
    Load,
    PauseMode,
    Received,
    Sample,
    SampleSlot,
    Sampling,
    WeightsNotLive,
)
from flotilla_generator.engine.vllm.boot import (
    WORKER_EXTENSION,
    accepts,
    engine_arguments,
    prepare_environment,
)
from flotilla_generator.engine.vllm.running import Running
from flotilla_generator.engine.vllm.sampling import (
    FINISH_REASONS,
    engine_spans,
    sampled_logprobs,
    sampling_params,
)
from flotilla_generator.engine.vllm.worker_calls import HEALTH_POLL_S, WorkerCalls
from flotilla_weights.manifest import Manifest

if TYPE_CHECKING:
    from flotilla_generator.engine.vllm.occupancy import Occupancy

STOP_GRACE_S = 1.0
STACKS_TIMEOUT_S = 2.0
UNTAGGED = "untagged"
PAUSES = {
    KvPolicy.RECOMPUTE: {"mode": "keep", "clear_cache": True},
    KvPolicy.REUSE: {"mode": "keep", "clear_cache": False},
    KvPolicy.DRAIN: {"mode": "wait", "clear_cache": True},
}


class VllmEngine(Engine):
    """One AsyncLLM with its worker processes."""

    def __init__(
        self, config: GeneratorConfig, checkpoint: Checkpoint, worker_extension: str = WORKER_EXTENSION
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._worker_extension = worker_extension
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._requests: dict[str, set[Running]] = {}
        self._live: Version | None = None
        self._paused = False
        self._applying = asyncio.Lock()
        self._gpus = 0
        self._occupancy: Occupancy | None = None
        self.workers = WorkerCalls(lambda: self._llm)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise FailedPrecondition("the engine has not started")
        return self._info

    async def start(self) -> None:
        # Importing and booting take seconds: on a thread, so that the service answers meanwhile.
        self._llm, versions = await asyncio.to_thread(self._boot)
        self._tags_versions = hasattr(self._llm, "update_weight_version")
        self._info = EngineInfo(
            max_model_tokens=int(self._llm.model_config.max_model_len),
            vocabulary_size=self._checkpoint.vocabulary_size,
            weight_workers=self._config.tensor_parallel_size,
            gpus=self._gpus,
            required_tensors=self._checkpoint.tensors,
            versions=versions,
        )
        await self._warm_up()

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        outputs = getattr(llm, "output_handler", None)
        if outputs is not None:
            outputs.cancel()  # otherwise it logs the end of its engine as an error
        grace = (STOP_GRACE_S,) if accepts(llm.shutdown, "timeout") else ()
        await asyncio.to_thread(llm.shutdown, *grace)

    async def wait_failed(self) -> str:
        # vLLM tells nobody: its own server polls as well.
        while self._llm is None or not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(HEALTH_POLL_S)
        return "vLLM's engine process died"

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[Sample]]:
        done: asyncio.Queue[Sample | BaseException] = asyncio.Queue()
        running = {
            Running(
                f"{request.request_id}:{index}",
                slot,
                request.sampling.after(len(slot.prefix)).max_tokens,
                [(self._live, 0)],
            )
            for index, slot in enumerate(request.samples)
        }
        self._requests[request.request_id] = running
        tasks = [asyncio.create_task(self._deliver(request, one, done)) for one in running]
        try:
            left = len(tasks)
            while left:
                outcomes = [await done.get()]
                while not done.empty():
                    outcomes.append(done.get_nowait())
                left -= len(outcomes)
                ended = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
                if ended:
                    yield ended
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
        finally:
            self._requests.pop(request.request_id, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> int:
        engine_ids = [one.engine_id for name in request_ids for one in self._requests.get(name, ())]
        if engine_ids:
            await self._llm.abort(engine_ids)
        return len(engine_ids)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)

    async def resume(self) -> None:
        async with self._applying:  # never while weights are half replaced
            self._paused = False
            await self._llm.resume_generation()

    async def worker_stacks(self) -> list[tuple[str, int, str]]:
        asking = asyncio.ensure_future(self.workers.ask("flotilla_stacks"))
        await asyncio.wait([asking], timeout=STACKS_TIMEOUT_S)
        if not asking.done():
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            return [("vLLM workers", 0, f"no answer within {STACKS_TIMEOUT_S:g} s: a step or a call hangs")]
        return [
            (f"vLLM worker {answer['rank']}", answer["pid"], answer["text"]) for answer in asking.result()
        ]

    @property
    def waiting_samples(self) -> int:
        return 0 if self._occupancy is None else self._occupancy.waiting_samples

    def load(self) -> Load:
        running = [one for group in self._requests.values() for one in group]
        return Load(
            running_samples=len(running),
            waiting_samples=self.waiting_samples,
            outstanding_tokens=sum(one.tokens_left - len(one.token_ids) for one in running),
            kv_cache_usage=None if self._occupancy is None else self._occupancy.kv_cache_usage,
        )

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        arguments = (group.SerializeToString(), rank_offset, manifest.to_proto().SerializeToString())
        await self.workers.transfer("flotilla_join", arguments, lambda _: None)

    async def receive(self, progress: Callable[[int], None]) -> Received:
        answers = await self.workers.transfer("flotilla_stage", (), progress)
        while not all(answer["proved"] for answer in await self.workers.require("flotilla_prove")):
            pass  # each call is a piece between two steps of decoding
        return Received(tuple(tuple(answer["digests"]) for answer in answers))

    async def untag(self) -> None:
        self._live = None
        if self._tags_versions:
            await self._llm.update_weight_version(UNTAGGED)

    async def drop(self) -> None:
        await self.workers.drop()

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        started = time.perf_counter()
        async with self._applying:
            if self._paused and kv_policy is KvPolicy.DRAIN:
                raise FailedPrecondition(
                    "a paused replica cannot drain",
                    why="its samples stand still until Resume",
                    next_step="call Resume first, or commit with the policy recompute",
                )
            await self._stand_still(kv_policy)
            try:
                answers = await self._replace(version)
            except WeightsNotLive:
                await self._llm.pause_generation(mode="abort", clear_cache=True)
                raise
            finally:
                if not self._paused:
                    await self._llm.resume_generation()
        return Applied(
            stall_s=time.perf_counter() - started,
            apply_s=max(answer["apply_s"] for answer in answers),
            verify_s=max(answer["verify_s"] for answer in answers),
        )

    async def _stand_still(self, kv_policy: KvPolicy) -> None:
        """Pause for a commit. vLLM's own pause sleeps 20 ms for outputs on their way: needless where it tags tokens."""
        if self._tags_versions:
            await self._llm.engine_core.pause_scheduler_async(**PAUSES[kv_policy])
        else:
            await self._llm.pause_generation(**PAUSES[kv_policy])

    async def _replace(self, version: Version) -> list[dict[str, Any]]:
        """Load on all workers and tag; the weights count as untouched only where every worker says so."""
        try:
            answers = await self.workers.ask("flotilla_apply")
            errors = dict.fromkeys(answer["error"] for answer in answers if answer["error"])
            if not errors:
                await self._switch(version)
                return answers
        # Whatever went wrong on the way, nobody knows what the workers hold.
        except Exception as error:
            raise WeightsNotLive("the engine did not confirm the new weights", why=str(error)) from error
        if any(answer.get("broken", True) or not answer["error"] for answer in answers):
            raise WeightsNotLive("; ".join(errors))
        raise WeightsMismatch("the staged weights were not applied", why="; ".join(errors))

    async def _switch(self, version: Version) -> None:
        self._live = version
        if self._tags_versions:
            await self._llm.update_weight_version(str(version))
        for group in self._requests.values():
            for one in group:
                one.switch(version)

    async def _deliver(
        self, request: GenerationRequest, running: Running, done: asyncio.Queue[Sample | BaseException]
    ) -> None:
        try:
            done.put_nowait(await self._decode(request, running))
        # The end of a task: whatever vLLM raises is handed to the caller of `generate`.
        except Exception as error:  # noqa: BLE001
            done.put_nowait(self.workers.explained(error))

    async def _decode(self, request: GenerationRequest, running: Running) -> Sample:
        slot = running.slot
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt, *slot.prefix]}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        params = sampling_params(
            request.sampling.after(len(slot.prefix)),
            slot.seed,
            self._checkpoint.end_of_sequence,
            stream=not self._tags_versions,
        )
        started = time.monotonic()
        first: float | None = None
        logprobs = []
        completion = None
        async for output in self._llm.generate(prompt, params, running.engine_id, priority=request.priority):
            first = first or time.monotonic()
            completion = output.outputs[0]
            running.token_ids.extend(completion.token_ids)
            logprobs.append(sampled_logprobs(completion.token_ids, completion.logprobs))
        if completion is None or completion.finish_reason not in FINISH_REASONS:
            raise Internal(
                f"vLLM ended sample {slot.sample_id} without a reason we know", why=str(completion)
            )
        spans = engine_spans(completion.weight_versions) if self._tags_versions else running.spans()
        ended = time.monotonic()
        return Sample(
            sample_id=slot.sample_id,
            token_ids=np.array(running.token_ids, np.int32),
            logprobs=np.concatenate(logprobs),
            finish_reason=FINISH_REASONS[completion.finish_reason],
            spans=spans,
            queued_s=0.0,
            first_token_s=(first or ended) - started,
            total_s=ended - started,
        )

    def _boot(self) -> tuple[Any, dict[str, str]]:
        prepare_environment(self._config)
        import torch
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from flotilla_generator.engine.vllm.occupancy import Occupancy

        self._occupancy = occupancy = Occupancy()
        arguments = engine_arguments(self._config, self._checkpoint, self._worker_extension)
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[lambda _config, _index: occupancy]
        )
        self._gpus = self._config.tensor_parallel_size if torch.cuda.is_available() else 0
        return llm, {"vllm": vllm.__version__, "torch": torch.__version__}

    async def _warm_up(self) -> None:
        """The first request with logprobs compiles and allocates; nobody should wait for that later."""
        request = GenerationRequest(
            "warm-up",
            [0],
            (SampleSlot("warm-up", 0),),
            Sampling(temperature=1.0, max_tokens=2, ignore_eos=True),
        )
        async for _ in self.generate(request):
            pass
