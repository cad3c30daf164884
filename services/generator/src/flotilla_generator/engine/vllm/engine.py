"""AsyncLLM behind the `Engine` seam.

Invariants: the service answers while the engine starts; a stop is never taken for the death of vLLM. Works on vLLM 0.26
to 0.32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import (
    Applied,
    Engine,
    EngineInfo,
    GenerationRequest,
    KvPolicy,
    Received,
    Sample,
    SampleSlot,
    Sampling,
    Verified,
)
from flotilla_generator.engine.vllm.boot import (
    WORKER_EXTENSION,
    accepts,
    booted,
    check_options,
    engine_arguments,
    engine_share,
    prepare_environment,
    require_quantization,
)
from flotilla_generator.engine.vllm.decoding import Decoding
from flotilla_generator.engine.vllm.engine_process import (
    look_at_classes,
    start_server,
    use_forks,
)
from flotilla_generator.engine.vllm.stop_texts import TOKENIZER_FILE
from flotilla_generator.engine.vllm.weight_commit import Commits
from flotilla_generator.engine.vllm.worker_calls import HEALTH_POLL_S, WorkerCalls
from flotilla_weights.manifest import Manifest

STOP_GRACE_S = 1.0
STACKS_TIMEOUT_S = 2.0


class VllmEngine(Engine):
    """One AsyncLLM with its worker processes."""

    def __init__(
        self,
        config: GeneratorConfig,
        checkpoint: Checkpoint,
        worker_extension: str = WORKER_EXTENSION,
        cache: Path | None = None,
    ) -> None:
        """`cache` keeps what one start compiles for the next one."""
        self._config = config
        self._checkpoint = checkpoint
        self._worker_extension = worker_extension
        self._cache = cache
        self.llm: Any = None
        self._info: EngineInfo | None = None
        self._gpus = 0
        self.workers = WorkerCalls(lambda: self.llm)
        self.decoding = Decoding(lambda: self.llm, checkpoint.end_of_sequence, self.workers.explained)
        self.commits = Commits(lambda: self.llm, self.workers, self.decoding)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise FailedPrecondition("the engine has not started")
        return self._info

    async def start(self) -> None:
        # Booting takes seconds: on a thread, so that the service answers meanwhile.
        self.llm, versions = await asyncio.to_thread(self._boot)
        self._info = EngineInfo(
            max_model_tokens=int(self.llm.model_config.max_model_len),
            vocabulary_size=self._checkpoint.vocabulary_size,
            weight_workers=self._config.tensor_parallel_size,
            gpus=self._gpus,
            reads_text=(self._checkpoint.folder / TOKENIZER_FILE).exists(),
            required_tensors=self._checkpoint.tensors,
            versions=versions,
            can_sleep=self._config.sleep_while_training,
        )
        if self._gpus:
            await self.workers.require("flotilla_use_kernels")
        await self._warm_up()

    async def stop(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        outputs = getattr(llm, "output_handler", None)
        if outputs is not None:
            outputs.cancel()  # otherwise it logs the end of its engine as an error
        grace = (STOP_GRACE_S,) if accepts(llm.shutdown, "timeout") else ()
        await asyncio.to_thread(llm.shutdown, *grace)

    async def wait_failed(self) -> str:
        # vLLM reports it to no caller: its own server polls as well.
        while self.llm is None or not self.llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(HEALTH_POLL_S)
        return "vLLM's engine process died"

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        return self.decoding.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return await self.decoding.abort(request_ids)

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
        return self.decoding.waiting

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        arguments = (group.SerializeToString(), rank_offset, manifest.to_proto().SerializeToString())
        await self.workers.transfer("flotilla_join", arguments, lambda _: None)

    async def receive(self, progress: Callable[[int], None], kv_policy: KvPolicy) -> Received:
        in_place = self._config.apply_weights == "direct"
        async with self.commits.standing_still(kv_policy) if in_place else nullcontext():
            answers = proofs = await self.workers.transfer("flotilla_stage", (in_place,), progress)
        while not all(answer["proved"] for answer in proofs):
            proofs = await self.workers.require("flotilla_prove")  # a piece between two steps of decoding
        return Received(tuple(tuple(answer["digests"]) for answer in answers), in_place)

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        return await self.commits.apply(version, kv_policy)

    async def verify(self) -> Verified:
        return await self.commits.verify()

    async def tag(self, version: Version | None) -> None:
        await self.commits.tag(version)

    async def drop(self) -> bool:
        await self.workers.drop()
        return await self.commits.give_up()

    async def sleep(self) -> int:
        return await self.commits.sleep()

    async def wake(self) -> None:
        await self.commits.wake()

    def _boot(self) -> tuple[Any, dict[str, str]]:
        prepare_environment(self._config, self._cache)
        start_server()
        import torch
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        require_quantization(self._config)
        use_forks()
        check_options(self._config.engine_options, {field.name for field in fields(AsyncEngineArgs)})
        look_at_classes(self._checkpoint.config.get("architectures") or ())

        share = None
        if torch.cuda.is_available():
            total = current_platform.get_device_total_memory()
            share = engine_share(self._config, self._checkpoint, total)

        def boot(eager: bool) -> Any:
            arguments = engine_arguments(
                self._config, self._checkpoint, self._worker_extension, eager=eager, share=share
            )
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        llm = booted(boot, self._config)
        self._gpus = self._config.tensor_parallel_size if torch.cuda.is_available() else 0
        return llm, {"vllm": vllm.__version__, "torch": torch.__version__}

    async def _warm_up(self) -> None:
        """Run a first request with logprobs: it compiles and allocates, and no caller should wait for that later."""
        request = GenerationRequest(
            "warm-up",
            [0],
            (SampleSlot("warm-up", 0),),
            Sampling(temperature=1.0, max_tokens=2, ignore_eos=True),
        )
        async for _ in self.generate(request):
            pass
