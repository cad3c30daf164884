"""The same loop without asyncio: every method waits.

Generated from `Loop` by scripts/generate_sync_client.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_client.groups import Group, Prompt
from flotilla_client.loop import EvaluationResult, Loss, StepResult
from flotilla_client.waiting import WaitingLoop
from flotilla_core.version import Version


class SyncLoop(WaitingLoop):
    """The primitives of one open run, each of which waits for its end; see docs/custom-loops.md."""

    @property
    def run_id(self) -> str:
        return self._loop.run_id

    @property
    def version(self) -> Version:
        return self._loop.version

    @property
    def steps_done(self) -> int:
        return self._loop.steps_done

    @property
    def directory(self) -> Path:
        return self._loop.directory

    def prompts(self, count: int) -> list[Prompt]:
        """Return the next prompts of the run's data set."""
        return self._wait(self._loop.prompts(count))

    def sample(
        self,
        prompts: Sequence[Prompt | str | Sequence[Mapping[str, Any]]],
        samples_per_prompt: int = 1,
        *,
        temperature: float | None = None,
        max_response_tokens: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
    ) -> list[Group]:
        """Samples of the weights that were synced last, in the order of the prompts: texts, chats or `Prompt`s."""
        return self._wait(
            self._loop.sample(
                prompts,
                samples_per_prompt,
                temperature=temperature,
                max_response_tokens=max_response_tokens,
                top_p=top_p,
                stop=stop,
            )
        )

    def score(self, groups: Sequence[Group]) -> list[NDArray[np.float64]]:
        """Rewards by group, also set in the samples; NaN, and the reason in `failure`, where there is none."""
        return self._wait(self._loop.score(groups))

    def logprobs(
        self, groups: Sequence[Group], *, temperature: float | None = None
    ) -> list[list[NDArray[np.float32]]]:
        """Return the log-probability of every response token under the trainer's policy, sample by sample."""
        return self._wait(self._loop.logprobs(groups, temperature=temperature))

    def forward_backward(self, groups: Sequence[Group], loss: Loss | None = None) -> dict[str, float]:
        """Add the gradients of a batch to those that wait for `optim_step`; its metrics."""
        return self._wait(self._loop.forward_backward(groups, loss))

    def optim_step(self, learning_rate: float | None = None) -> StepResult:
        """One step on the gradients that wait; without a rate, on that of the run's schedule."""
        return self._wait(self._loop.optim_step(learning_rate))

    def sync(self) -> Version:
        """Bring the policy to every generator; later samples are drawn from it."""
        return self._wait(self._loop.sync())

    def evaluate(self) -> EvaluationResult:
        """Evaluate the weights that were synced last on the held-out sets of the run."""
        return self._wait(self._loop.evaluate())

    def save(self) -> Path:
        """Save a checkpoint that `flotilla run resume` continues from; return when it is on disk."""
        return self._wait(self._loop.save())

    def save_model(self, path: str | Path | None = None) -> Path:
        """Write a Hugging Face folder of the policy; without a path, `model` in the run's directory."""
        return self._wait(self._loop.save_model(path))
