"""The same loop without asyncio: every method waits.

Invariant: a `with` block that ends by an exception stops the run and says why; one that ends well closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flotilla_client.groups import Group, Prompt
from flotilla_client.loop import Loop, Loss, StepResult
from flotilla_core.version import Version


class SyncLoop:
    """See `Loop` for what each method does."""

    def __init__(
        self, loop: Loop, wait: Callable[[Coroutine[Any, Any, Any]], Any], stop: Callable[[str], Any]
    ) -> None:
        self._loop = loop
        self._wait = wait
        self._stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop(f"the client's loop ended with {error!r}")

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
        found: list[Prompt] = self._wait(self._loop.prompts(count))
        return found

    def sample(
        self,
        prompts: Sequence[Prompt | str],
        samples_per_prompt: int = 1,
        *,
        temperature: float | None = None,
        max_response_tokens: int | None = None,
    ) -> list[Group]:
        groups: list[Group] = self._wait(
            self._loop.sample(
                prompts, samples_per_prompt, temperature=temperature, max_response_tokens=max_response_tokens
            )
        )
        return groups

    def score(self, groups: Sequence[Group]) -> list[NDArray[np.float64]]:
        rewards: list[NDArray[np.float64]] = self._wait(self._loop.score(groups))
        return rewards

    def logprobs(
        self, groups: Sequence[Group], *, temperature: float | None = None
    ) -> list[list[NDArray[np.float32]]]:
        found: list[list[NDArray[np.float32]]] = self._wait(
            self._loop.logprobs(groups, temperature=temperature)
        )
        return found

    def forward_backward(self, groups: Sequence[Group], loss: Loss | None = None) -> dict[str, float]:
        metrics: dict[str, float] = self._wait(self._loop.forward_backward(groups, loss))
        return metrics

    def optim_step(self, learning_rate: float | None = None) -> StepResult:
        result: StepResult = self._wait(self._loop.optim_step(learning_rate))
        return result

    def sync(self) -> Version:
        version: Version = self._wait(self._loop.sync())
        return version

    def evaluate(self) -> float:
        accuracy: float = self._wait(self._loop.evaluate())
        return accuracy

    def save(self) -> Path:
        path: Path = self._wait(self._loop.save())
        return path

    def save_model(self, path: str | Path | None = None) -> Path:
        made: Path = self._wait(self._loop.save_model(path))
        return made

    def close(self) -> None:
        self._wait(self._loop.close())
