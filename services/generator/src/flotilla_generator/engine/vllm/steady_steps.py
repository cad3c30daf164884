"""Steps of decoding in which nothing happens to most requests, at a fraction of what vLLM's scheduler takes for them.

A GPU waits for the engine process as soon as a step takes longer there than on the GPU, and vLLM handles every request
of every step as if it might begin, end, be preempted or need a block of the cache. Between two blocks a request that
decodes only gets a token more. Such requests are scheduled, and their tokens appended, here; vLLM's own code sees all
others, which are about one in eight.

Invariants: tokens, ends, blocks and counters of every request are those of vLLM's scheduler, step by step; where
anything but plain decoding is configured (drafts, connectors, adapters, several kinds of layers), in releases of vLLM
that this was not tested with, while requests wait or prompts are computed, all is left to vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

log = logging.getLogger(__name__)

TESTED = ((0, 26), (0, 32))
"""The first and the last release of vLLM whose private names are known to mean what they mean here."""
NOT_PLAIN = (
    "connector",
    "ec_connector",
    "aux_output_connector",
    "lora_config",
    "num_spec_tokens",
    "num_lookahead_tokens",
    "use_pp",
    "defer_block_free",
    "enable_return_routed_experts",
)
"""Attributes of vLLM's scheduler, in one release or another, that mean more than plain decoding where they are set."""
LATE_TOKENS = ("num_stale_output_tokens", "async_tokens_to_discard")
"""The counter in a request of tokens that were on their way when it was preempted, by its names in releases of vLLM."""


@dataclass(eq=False, slots=True)
class Steady:
    """A request that may decode for a while without an event."""

    request: Request
    limit: int
    """The number of tokens, those of the prompt too, that ends it."""
    stops: frozenset[int | None]

    @classmethod
    def of(cls, request: Request, longest: int) -> Steady | None:
        """Return what is known of a request beforehand, or None where each of its tokens is vLLM's to judge."""
        params = request.sampling_params
        if (
            params is None
            or request.has_encoder_inputs
            or request.use_structured_output
            or request.resumable
            or params.prompt_logprobs is not None
            or getattr(params, "repetition_detection", None)
        ):
            return None
        limit = min(longest, request.num_prompt_tokens + request.max_tokens)
        return cls(request, limit, frozenset((*(params.stop_token_ids or ()), params.eos_token_id)))


class SteadyScheduler(Scheduler):
    """Leaves to vLLM what is not steady."""

    steps_ahead = False
    """True where a step is scheduled before the tokens of the last one are known; a request counts them until then."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._steady: dict[str, Steady] = {}
        self._late_tokens = ""
        self._block = self._plain_block()
        self._allocate = self.kv_cache_manager.allocate_slots
        if self._block:
            vars(self.kv_cache_manager)["allocate_slots"] = self._slots

    def add_request(self, request: Request) -> None:
        """Take a request."""
        super().add_request(request)
        if self._block and not self._late_tokens:
            self._late_tokens = next(name for name in LATE_TOKENS if hasattr(request, name))
        steady = Steady.of(request, self.max_model_len) if self._block else None
        if steady is not None:
            self._steady[request.request_id] = steady

    def schedule(self, *arguments: Any, **named: Any) -> SchedulerOutput:
        """Schedule a step."""
        running = self.running
        if (
            not self._block
            or len(self.requests) != len(running)
            or self._pause_state != PauseState.UNPAUSED
            or len(running) > self.kv_cache_manager.block_pool.get_num_free_blocks()
        ):
            return super().schedule(*arguments, **named)
        plain, others = self._divided(running)
        if not plain:
            return super().schedule(*arguments, **named)
        self.running = others
        step: SchedulerOutput = super().schedule(*arguments, **named)
        if len(self.running) == len(others):
            self.running = running
        else:
            self.running = [one for one in running if one.status is RequestStatus.RUNNING]
        self._join(step, plain)
        return step

    def watch(self, request: Request, tokens: Iterable[int]) -> None:
        """Have every one of these tokens of a request judged by `_update_request_with_output`."""
        steady = self._steady.get(request.request_id)
        if steady is not None:
            steady.stops = steady.stops.union(tokens)

    def append_plain(
        self, scheduled: dict[str, int], model_output: ModelRunnerOutput
    ) -> tuple[dict[str, int], list[str]]:
        """Append tokens that end nothing; return the requests that are left to vLLM, and those that got a token."""
        indices, sampled = model_output.req_id_to_index, model_output.sampled_token_ids
        rest: dict[str, int] = {}
        done: list[str] = []
        if not sampled or model_output.kv_connector_output or model_output.num_nans_in_logits:
            return scheduled, done
        steady, block, late, running = self._steady, self._block, self._late_tokens, RequestStatus.RUNNING
        for name, count in scheduled.items():
            one = steady.get(name)
            if one is None or count != 1:
                rest[name] = count
                continue
            request, tokens = one.request, sampled[indices[name]]
            known, written = request._all_token_ids, request._output_token_ids
            after = len(known) + 1
            place = after % block
            if (
                len(tokens) != 1
                or place == 1  # the block before it is cached now
                or after >= one.limit
                or tokens[0] in one.stops
                or not written
                or request.status is not running
                or getattr(request, late)
            ):
                rest[name] = count
                continue
            known.append(tokens[0])
            written.append(tokens[0])
            if place == 0:
                request.update_block_hashes()
            request.num_in_flight_tokens -= 1
            if self.steps_ahead:
                request.num_output_placeholders -= 1
            done.append(name)
        return rest, done

    def _free_request(self, request: Request, *more: Any, **named: Any) -> Any:
        self._steady.pop(request.request_id, None)
        return super()._free_request(request, *more, **named)

    def _divided(self, running: list[Request]) -> tuple[list[Request], list[Request]]:
        """Return the requests whose last block has room for their next token, and all others."""
        steady, block = self._steady, self._block
        # The older model runner is told all tokens of a request that was not in the last step.
        told = steady if self.use_v2_model_runner else self.prev_step_scheduled_req_ids
        plain: list[Request] = []
        others: list[Request] = []
        for request in running:
            one = steady.get(request.request_id)
            computed = request.num_computed_tokens
            if request.is_prefill_chunk:
                return [], running
            if (
                one is not None
                and request.request_id in told
                and 0 < computed % block < block - 1
                and computed + 2 < one.limit
                and len(request._all_token_ids) + request.num_output_placeholders == computed + 1
            ):
                plain.append(request)
            else:
                others.append(request)
        return plain, others

    def _join(self, step: SchedulerOutput, plain: list[Request]) -> None:
        """Add requests that get one token each, and need nothing for it, to a step."""
        cached, scheduled, ahead = step.scheduled_cached_reqs, step.num_scheduled_tokens, self.steps_ahead
        for request in plain:
            scheduled[request.request_id] = 1
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if ahead:
                request.num_output_placeholders += 1
        names = [request.request_id for request in plain]
        cached.req_ids.extend(names)
        cached.new_block_ids.extend([None] * len(names))
        step.total_num_scheduled_tokens += len(names)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)

    def _slots(self, request: Request, num_new_tokens: int, *more: Any, **named: Any) -> Any:
        """Allocate as vLLM does; a running request whose last block has room for two tokens needs nothing."""
        if (
            num_new_tokens == 1
            and 0 < request.num_computed_tokens % self._block < self._block - 1
            and request.status is RequestStatus.RUNNING
        ):
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, *more, **named)

    def _plain_block(self) -> int:
        """Return the size of a block where nothing but plain decoding is configured, in a tested release; else 0."""
        if not TESTED[0] <= vllm.__version_tuple__[:2] <= TESTED[1]:
            log.warning("vLLM %s was not tested: its own code schedules every step, slower", vllm.__version__)
            return 0
        groups = self.kv_cache_config.kv_cache_groups
        spec = groups[0].kv_cache_spec if len(groups) == 1 else None
        if not isinstance(spec, FullAttentionSpec) or type(spec) is not FullAttentionSpec:
            return 0
        whole = spec.sliding_window is None and spec.attention_chunk_size is None
        plain = whole and spec.block_size == self.block_size == self.hash_block_size
        return self.block_size if plain and not any(getattr(self, name, None) for name in NOT_PLAIN) else 0
