"""vLLM's own scheduler and ours, on the same requests and the same tokens of a model that does not exist."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from flotilla_generator.engine.vllm.sample_records import SampleRecord
from flotilla_generator.engine.vllm.scheduler import recording_scheduler
from flotilla_generator.engine.vllm.stop_texts import stop_arguments

BLOCK = 16
BLOCKS = 14
"""So few that samples which decode together run out of them, and some are preempted."""
SEQUENCES = 4
LONGEST = 96
STOP = 3


def engine_config(model: Path) -> Any:
    """Return vLLM's configuration for this model, for steps and a cache that are soon full."""
    arguments = AsyncEngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=32,
        enable_chunked_prefill=True,
        scheduling_policy="priority",
    )
    made = arguments.create_engine_config()
    made.cache_config.num_gpu_blocks = BLOCKS
    init_none_hash(sha256)
    return made


@dataclass
class Said:
    """All that a scheduler said of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    end: tuple[Any, Any] | None = None
    messages: int = 0

    def hear(self, output: EngineCoreOutput) -> None:
        assert self.end is None, "nothing comes after the end"
        self.messages += 1
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs.logprobs[:, 0].copy())
        if output.finish_reason is not None:
            self.end = (output.finish_reason, output.stop_reason)

    @property
    def bits(self) -> bytes:
        return np.concatenate([np.empty(0, np.float32), *self.logprobs]).tobytes()


class Twins:
    """vLLM's scheduler and ours, step by step."""

    def __init__(self, config: Any, *, asynchronous: bool, seed: int, newer_runner: bool = False) -> None:
        config.scheduler_config.async_scheduling = asynchronous
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layers = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        named = {
            "vllm_config": config,
            "kv_cache_config": layers,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": BLOCK,
        }
        self.theirs = (AsyncScheduler if asynchronous else Scheduler)(**named)
        self.ours = recording_scheduler(**named)
        for scheduler in (self.theirs, self.ours):
            scheduler.use_v2_model_runner = newer_runner
        self.several = 1 if asynchronous else 3
        """Tokens of a request in one step, at most."""
        self.random = np.random.default_rng(seed)
        self.expected: dict[str, Said] = defaultdict(Said)
        self.heard: dict[str, Said] = defaultdict(Said)
        self.records: dict[str, SampleRecord] = {}
        self.clients: dict[str, int] = {}
        self.resumed: dict[str, list[int]] = defaultdict(list)
        self.preemptions = 0
        self._depth = 2 if asynchronous else 1
        self._flying: deque[Any] = deque()

    def add(self, name: str, prompt: int, client: int = 0, *, stream: bool = False, stop: str = "") -> None:
        self.clients[name] = client
        for scheduler in (self.theirs, self.ours):
            params = SamplingParams(
                max_tokens=40,
                stop_token_ids=[STOP],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
                extra_args=stop_arguments([stop] if stop else [], 0) if scheduler is self.ours else None,
            )
            tokens = np.random.default_rng(prompt).integers(4, 200, prompt).tolist()
            hasher = get_request_block_hasher(BLOCK, sha256)
            scheduler.add_request(
                Request(name, tokens, params, None, client_index=client, arrival_time=0, block_hasher=hasher)
            )

    def abort(self, *names: str) -> None:
        for request in self.theirs.finish_requests(names, RequestStatus.FINISHED_ABORTED):
            self.expected[request.request_id].end = (FinishReason.ABORT, None)
        for request in self.ours.finish_requests(names, RequestStatus.FINISHED_ABORTED):
            assert request.sampling_params.output_kind == RequestOutputKind.DELTA
            self.heard[request.request_id].end = (FinishReason.ABORT, None)

    def step(self) -> None:
        """Schedule a step, and hear of the oldest one when there is no place for more."""
        if self.theirs.has_requests():
            planned, same = self.theirs.schedule(), self.ours.schedule()
            assert _facts(planned) == _facts(same)
            self._flying.append((planned, same, self._model(planned.num_scheduled_tokens)))
        if self._flying and (len(self._flying) == self._depth or not self.theirs.has_requests()):
            self.land()

    def land(self) -> None:
        """Hear of the oldest step."""
        planned, same, (sampled, copy) = self._flying.popleft()
        self.preemptions += sum(request.num_preemptions for request in self.theirs.waiting)
        for told in self.theirs.update_from_output(planned, sampled).values():
            for output in told.outputs:
                self.expected[output.request_id].hear(output)
        for client, told in self.ours.update_from_output(same, copy).items():
            assert told.outputs, "a message says something"
            for output in told.outputs:
                assert client == self.clients[output.request_id]
                self.heard[output.request_id].hear(output)
                if output.kv_transfer_params is not None:
                    self.records[output.request_id] = SampleRecord.read(output.kv_transfer_params)

    def pause(self, *, empty_cache: bool, aborted: tuple[str, ...] = ()) -> None:
        """Stand still as for a commit, and go on."""
        for scheduler in (self.theirs, self.ours):
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.abort(*aborted)
        while self._flying or self.theirs.has_requests():
            self.step()
        assert all(self.heard[name].end for name in aborted), "what is aborted leaves during a pause as well"
        if empty_cache:
            self.empty_cache()
        for scheduler in (self.theirs, self.ours):
            scheduler.set_pause_state(PauseState.UNPAUSED)
        for name, said in self.expected.items():
            if said.tokens and said.end is None:
                self.resumed[name].append(len(said.tokens))

    def empty_cache(self) -> None:
        for scheduler in (self.theirs, self.ours):
            scheduler.reset_prefix_cache(reset_running_requests=True)

    def finish(self) -> None:
        for _ in range(10_000):
            if not (self._flying or self.theirs.has_requests()):
                return
            self.step()
        raise AssertionError("the requests do not end")

    def _model(self, scheduled: dict[str, int]) -> list[ModelRunnerOutput]:
        """Return, for each of the two, what a model samples in a step: a prompt that is not whole yet gets no token."""
        names = [str(name) for name in self.random.permutation(list(scheduled))]
        whole = [not self.theirs.requests[name].is_prefill_chunk for name in names]
        counts = [int(self.random.integers(1, self.several + 1)) if one else 0 for one in whole]
        tokens = [self.random.integers(STOP, 40, count).tolist() for count in counts]
        # Where each gets one token at most there is a row for each request, also where it got none.
        rows = sum(counts) if self.several > 1 else len(names)
        starts = [0, *np.cumsum(counts).tolist()] if self.several > 1 else None
        values = self.random.standard_normal((rows, 1)).astype(np.float32)
        return [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[list(row) for row in tokens],
                logprobs=LogprobsLists(np.zeros((rows, 1)), values.copy(), np.zeros(rows), starts),
            )
            for _ in range(2)
        ]


def _facts(step: SchedulerOutput) -> dict[str, Any]:
    """Return what a worker learns of a step, in an order that does not depend on that of the requests."""
    cached = step.scheduled_cached_reqs
    rows = zip(
        cached.req_ids,
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
        strict=True,
    )
    return {
        "tokens": step.num_scheduled_tokens,
        "total": step.total_num_scheduled_tokens,
        "new": [(one.req_id, one.block_ids, one.num_computed_tokens) for one in step.scheduled_new_reqs],
        "cached": sorted((name, *rest) for name, *rest in rows),
        "whole": cached.all_token_ids,
        "resumed": cached.resumed_req_ids,
        "finished": step.finished_req_ids,
    }
