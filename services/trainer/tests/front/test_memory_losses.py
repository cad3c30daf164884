"""A gang that is lost for want of memory is not lost a second time for the same cause."""

from __future__ import annotations

import pytest

from flotilla_core.errors import Exhausted, RankFailed
from flotilla_trainer.front.session_ranks import MemoryLosses
from flotilla_trainer.wire.settings import SMALLEST_BUDGET

OUT_OF_MEMORY = RankFailed(
    "rank 1 (pid 5) ended with status 1",
    why="its log ends with 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB.'; all in x",
)
KILLED = RankFailed(
    "rank 1 (pid 5) was killed by SIGKILL", why="its log ends with 'ready'; all of it is in x"
)


def test_after_a_loss_of_memory_a_run_gets_half_the_tokens_and_after_the_second_the_key_to_change() -> None:
    losses = MemoryLosses()
    assert losses.allowed("run", 8192) == 8192
    losses.note("run", 8192, OUT_OF_MEMORY)
    assert losses.allowed("run", 8192) == 4096
    losses.note("run", 4096, OUT_OF_MEMORY)
    with pytest.raises(Exhausted, match=r"batching\.tokens_per_microbatch.*below 4096"):
        losses.allowed("run", 8192)


@pytest.mark.parametrize("lost", [1, SMALLEST_BUDGET, 2 * SMALLEST_BUDGET - 1])
def test_no_micro_batch_is_halved_below_the_smallest_and_the_keys_that_help_are_named(lost: int) -> None:
    losses = MemoryLosses()
    losses.note("run", lost, OUT_OF_MEMORY)
    with pytest.raises(Exhausted, match=r"ran out of memory.*activation_checkpointing.*trainer\.nproc"):
        losses.allowed("run", 8192)
    losses.note("another", 2 * SMALLEST_BUDGET, OUT_OF_MEMORY)
    assert losses.allowed("another", 8192) == SMALLEST_BUDGET


def test_other_runs_and_smaller_micro_batches_are_not_held_to_it() -> None:
    losses = MemoryLosses()
    for budget in (8192, 4096):
        losses.note("run", budget, OUT_OF_MEMORY)
    assert losses.allowed("another", 8192) == 8192
    assert losses.allowed("run", 2048) == 2048


def test_another_death_of_a_rank_changes_nothing() -> None:
    losses = MemoryLosses()
    losses.note("run", 8192, KILLED)
    assert losses.allowed("run", 8192) == 8192
