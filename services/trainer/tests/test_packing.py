"""Micro-batches: within budget, balanced, complete, and independent of how they were cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_trainer.packing import MicroBatch, Sequences, pack, padded_tokens


def sequences_of(lengths: list[int], seed: int = 0) -> Sequences:
    rng = np.random.default_rng(seed)
    starts = np.cumsum(lengths) - lengths
    scored = [
        start + rng.choice(np.arange(1, length), rng.integers(1, length), replace=False)
        for start, length in zip(starts, lengths, strict=True)
    ]
    places = np.sort(np.concatenate(scored))
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)  # every token is unlike every other
    return Sequences(tokens, np.array(lengths), places, {"mark": tokens[places].astype(np.float32)})


LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 300), st.integers(1, 5))
def test_every_scored_token_is_scored_once_with_its_own_context(
    lengths: list[int], budget: int, ranks: int
) -> None:
    sequences = sequences_of(lengths)
    working = [batch for batches in pack(sequences, budget, ranks) for batch in batches if not batch.idle]
    places = np.concatenate([batch.places for batch in working])
    assert sorted(places) == list(range(len(sequences.scored)))
    for batch in working:
        np.testing.assert_array_equal(batch.targets, sequences.tokens[sequences.scored[batch.places]])
        np.testing.assert_array_equal(batch.columns["mark"], batch.targets)
        # Tokens count upwards, so the one that predicts is the one just below.
        np.testing.assert_array_equal(batch.tokens.reshape(-1)[batch.positions], batch.targets - 1)


@given(LENGTHS, st.integers(1, 300), st.integers(1, 5))
def test_micro_batches_fit_the_budget_and_ranks_walk_in_step(
    lengths: list[int], budget: int, ranks: int
) -> None:
    per_rank = pack(sequences_of(lengths), budget, ranks)
    assert len(per_rank) == ranks
    assert len({len(batches) for batches in per_rank}) == 1
    for batch in (batch for batches in per_rank for batch in batches if not batch.idle):
        assert batch.tokens.size <= budget or batch.tokens.shape[0] == 1


def test_fewer_samples_than_ranks_leaves_the_others_idle_work() -> None:
    per_rank = pack(sequences_of([5, 7]), 4096, 4)
    assert [[batch.idle for batch in batches] for batches in per_rank] == [[False], [False], [True], [True]]


def test_work_is_spread_over_the_ranks_even_where_one_could_take_it_all() -> None:
    per_rank = pack(sequences_of([14] * 512), 1 << 20, 2)
    assert [batch.tokens.shape for batches in per_rank for batch in batches] == [(256, 13), (256, 13)]


def test_sorting_by_length_keeps_padding_low() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 300).tolist()
    sequences = sequences_of(lengths)
    fed = sum(lengths) - len(lengths)
    assert padded_tokens(pack(sequences, 2048, 2)) < 1.15 * fed


@pytest.mark.parametrize("budget", [1, 13, 64, 10**6])
def test_no_token_of_the_input_is_lost_or_changed(budget: int) -> None:
    sequences = sequences_of([3, 9, 2, 9, 30, 4])
    rows = sorted(tuple(row[row > 0]) for batch in pack(sequences, budget, 1)[0] for row in _rows(batch))
    ends = np.cumsum(sequences.lengths)
    expected = sorted(
        tuple(sequences.tokens[e - n : e - 1]) for e, n in zip(ends, sequences.lengths, strict=True)
    )
    assert rows == expected


def _rows(batch: MicroBatch) -> list[np.ndarray]:
    return [] if batch.idle else list(batch.tokens)
