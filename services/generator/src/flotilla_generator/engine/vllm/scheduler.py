"""The scheduler of vLLM's engine process: vLLM's own, which hands out each sample once, when it has ended.

vLLM would send every token to the service as a message of its own, with three arrays for its log-probability. Here the
log-probabilities of a step enter a table in one assignment, and nothing leaves before the end of a sample.

Invariants: vLLM decides which tokens are accepted, but a sample may also end at a text, which vLLM cannot see; a
log-probability is recorded for exactly the tokens that are handed out; a sample that is aborted leaves with what it
has; requests that stream, or that ask for no log-probabilities, are left to vLLM. The versions that wrote a sample are
known from the times at which decoding resumed: weights change only during a pause, and a pause has begun when no token
is on its way any more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from flotilla_generator.engine.vllm.sample_records import NO_LOGPROBS, LogprobTable, SampleRecord
from flotilla_generator.engine.vllm.steady_steps import SteadyScheduler
from flotilla_generator.engine.vllm.stop_texts import STOP, WRITTEN, StopTexts, stop_texts

YOUNG_OBJECTS = 100_000
"""New objects between two looks for cyclic garbage. With Python's 700 there would be a look every few tokens."""


@dataclass(eq=False, slots=True)
class _Sample:
    """A request that has not ended."""

    request: Request
    row: int = -1
    """The row of its log-probabilities, from the first token on."""
    first_token_at: float | None = None
    resumed: list[tuple[float, int]] = field(default_factory=list)
    stop: StopTexts | None = None
    response_at: int = 0
    """The place where the response begins: a request that continues one has its first tokens in the prompt."""


class RecordingScheduler(SteadyScheduler):
    """Keeps what samples have until they end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        gc.set_threshold(YOUNG_OBJECTS)
        self._logprobs = LogprobTable(self.max_num_running_reqs, self.max_model_len)
        self._samples: dict[str, _Sample] = {}
        self._aborted: list[_Sample] = []

    def add_request(self, request: Request) -> None:
        """Take a request."""
        super().add_request(request)
        params = request.sampling_params
        if params and params.output_kind == RequestOutputKind.FINAL_ONLY and params.logprobs is not None:
            sample = self._samples[request.request_id] = _Sample(request)
            if params.extra_args and STOP in params.extra_args:
                self._end_at_texts(sample, params.extra_args)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step; the answer has the samples that it ended."""
        logprobs = model_runner_output.logprobs
        if len(self._samples) == len(self.requests):
            model_runner_output.logprobs = None  # vLLM would slice them for each token
            rest, done = self.append_plain(scheduler_output.num_scheduled_tokens, model_runner_output)
            scheduler_output.num_scheduled_tokens = rest
            self._note(done, model_runner_output.req_id_to_index, logprobs)
        step: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for told in step.values():
            told.outputs = self._record(told.outputs, model_runner_output.req_id_to_index, logprobs)
        aborted, self._aborted = self._aborted, []
        for sample in aborted:
            request = sample.request
            cut = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            told = step.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            told.outputs.append(self._whole(cut, sample))
        return {client: told for client, told in step.items() if _says_something(told)}

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests; the answer names those whose end the caller has to report."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status != RequestStatus.FINISHED_ABORTED:
            return finished
        left = []
        for request in finished:
            sample = self._samples.pop(request.request_id, None)
            if sample is None:
                left.append(request)
            else:
                # vLLM makes one more step for requests that ended, also during a pause: it takes this one along.
                self._aborted.append(sample)
        return left

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume."""
        super().set_pause_state(pause_state)
        if pause_state == PauseState.UNPAUSED:
            now = time.monotonic()
            for sample in self._samples.values():
                if sample.first_token_at is not None:
                    sample.resumed.append((now, sample.request.num_output_tokens))

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *more: Any, **named: Any
    ) -> tuple[list[int], bool]:
        tokens: list[int]
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, *more, **named)
        sample = self._samples.get(request.request_id)
        if sample is None or sample.stop is None:
            return tokens, stopped
        known = request._all_token_ids
        for count in range(1, len(tokens) + 1):
            late = len(tokens) - count
            text = sample.stop.completed(known, sample.response_at, len(known) - late)
            if text is not None:
                for written in (tokens, known, request._output_token_ids):
                    del written[len(written) - late :]
                request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, text
                return tokens, True
        return tokens, stopped

    def _end_at_texts(self, sample: _Sample, arguments: dict[str, Any]) -> None:
        """Watch a sample for the texts that end it."""
        folder = Path(self.vllm_config.model_config.model)
        sample.stop = stop_texts(folder, tuple(arguments[STOP]))
        sample.response_at = sample.request.num_prompt_tokens - arguments[WRITTEN]
        self.watch(sample.request, sample.stop.last_tokens)

    def _note(self, names: list[str], indices: dict[str, int], logprobs: LogprobsLists | None) -> None:
        """Note the log-probabilities of samples that got one token each."""
        if not names:
            return
        assert logprobs is not None, "all recorded samples ask for them"
        rows = [self._samples[name].row for name in names]
        places = [indices[name] for name in names]
        if (starts := logprobs.cu_num_generated_tokens) is not None:
            places = [starts[place] for place in places]
        self._logprobs.append(rows, logprobs.logprobs[places, 0])

    def _record(
        self, outputs: list[EngineCoreOutput], indices: dict[str, int], logprobs: LogprobsLists | None
    ) -> list[EngineCoreOutput]:
        """Note the log-probabilities of a step; return what is left to say of it."""
        said: list[EngineCoreOutput] = []
        ended: list[tuple[EngineCoreOutput, _Sample]] = []
        rows: list[int] = []
        positions: list[int] = []
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                said.append(output)
                continue
            if output.new_token_ids:
                assert logprobs is not None, "all recorded samples ask for them"
                position = indices[output.request_id]
                if logprobs.cu_num_generated_tokens is not None:
                    position = logprobs.cu_num_generated_tokens[position]
                if sample.row < 0:
                    sample.row, sample.first_token_at = self._logprobs.take(), time.monotonic()
                if (count := len(output.new_token_ids)) == 1:
                    rows.append(sample.row)
                    positions.append(position)
                else:
                    self._logprobs.extend(sample.row, logprobs.logprobs[position : position + count, 0])
            if output.finish_reason is not None:
                ended.append((output, sample))
        if rows and logprobs is not None:
            self._logprobs.append(rows, logprobs.logprobs[positions, 0])
        for output, sample in ended:
            del self._samples[output.request_id]
            said.append(self._whole(output, sample))
        return said

    def _whole(self, output: EngineCoreOutput, sample: _Sample) -> EngineCoreOutput:
        """Return the last output of a sample, with all that was kept back."""
        record = SampleRecord(
            logprobs=self._logprobs.give_back(sample.row) if sample.row >= 0 else NO_LOGPROBS,
            first_token_at=sample.first_token_at,
            resumed=tuple(sample.resumed),
            waiting=self.get_request_counts()[1],
        )
        output.new_token_ids = list(sample.request.output_token_ids)
        output.new_logprobs = None
        output.kv_transfer_params = record.written()
        return output


class AsyncRecordingScheduler(RecordingScheduler, AsyncScheduler):
    """The same, where vLLM schedules a step while the one before runs."""

    steps_ahead = True


def recording_scheduler(**arguments: Any) -> RecordingScheduler:
    """Return the scheduler for what vLLM decided; vLLM calls this by the name that `boot` gives it."""
    asynchronous = arguments["vllm_config"].scheduler_config.async_scheduling
    return (AsyncRecordingScheduler if asynchronous else RecordingScheduler)(**arguments)


def _says_something(told: EngineCoreOutputs) -> bool:
    """Return whether there is anything to send; each message wakes the service."""
    return bool(told.outputs or told.finished_requests or told.scheduler_stats is not None)
