"""Micro-batches: within budget, balanced, complete, and independent of how they were cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, fed_tokens, pack, padding_share


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
LAYOUTS = st.builds(
    Layout,
    budget=st.integers(1, 300),
    ranks=st.integers(1, 5),
    packed=st.booleans(),
    crossover_tokens=st.floats(1, 1000),
)


@given(LENGTHS, LAYOUTS)
@settings(deadline=None)
def test_every_scored_token_is_scored_once_with_its_own_context(lengths: list[int], layout: Layout) -> None:
    sequences = sequences_of(lengths)
    working = [batch for batches in pack(sequences, layout) for batch in batches if not batch.idle]
    places = np.concatenate([batch.places for batch in working])
    assert sorted(places) == list(range(len(sequences.scored)))
    for batch in working:
        np.testing.assert_array_equal(batch.targets, sequences.tokens[sequences.scored[batch.places]])
        np.testing.assert_array_equal(batch.columns["mark"], batch.targets)
        # Tokens count upwards, so the one that predicts is the one just below.
        np.testing.assert_array_equal(batch.tokens.reshape(-1)[batch.positions], batch.targets - 1)


@given(LENGTHS, LAYOUTS)
@settings(deadline=None)
def test_micro_batches_fit_the_budget_and_ranks_walk_in_step(lengths: list[int], layout: Layout) -> None:
    per_rank = pack(sequences_of(lengths), layout)
    assert len(per_rank) == layout.ranks
    assert len({len(batches) for batches in per_rank}) == 1
    for batch in (batch for batches in per_rank for batch in batches if not batch.idle):
        alone = (len(batch.packed_lengths) if layout.packed else batch.tokens.shape[0]) == 1
        assert batch.tokens.size <= layout.budget or alone


@given(LENGTHS, LAYOUTS)
@settings(deadline=None)
def test_packed_rows_hold_no_padding_and_say_where_their_sequences_lie(
    lengths: list[int], layout: Layout
) -> None:
    sequences = sequences_of(lengths)
    working = [b for batches in pack(sequences, replace(layout, packed=True)) for b in batches if not b.idle]
    found = []
    for batch in working:
        assert batch.tokens.shape == (1, batch.packed_lengths.sum())
        found += np.split(batch.tokens[0], np.cumsum(batch.packed_lengths)[:-1])
    expected = np.split(sequences.tokens, np.cumsum(sequences.lengths)[:-1])
    assert sorted(tuple(part) for part in found) == sorted(tuple(part[:-1]) for part in expected)


@given(LENGTHS, LAYOUTS)
@settings(deadline=None)
def test_packed_rows_need_no_more_micro_batches_than_padded_ones(lengths: list[int], layout: Layout) -> None:
    sequences = sequences_of(lengths)
    packed, padded = (pack(sequences, replace(layout, packed=packed)) for packed in (True, False))
    assert len(packed[0]) <= len(padded[0])


def test_fewer_samples_than_ranks_leaves_the_others_idle_work() -> None:
    for packed in (False, True):
        per_rank = pack(sequences_of([5, 7]), Layout(4096, ranks=4, packed=packed))
        assert [[batch.idle for batch in batches] for batches in per_rank] == [
            [False],
            [False],
            [True],
            [True],
        ]


def test_work_is_spread_over_the_ranks_even_where_one_could_take_it_all() -> None:
    sequences = sequences_of([14] * 512)
    for packed, shape in ((False, (256, 13)), (True, (1, 256 * 13))):
        per_rank = pack(sequences, Layout(1 << 20, ranks=2, packed=packed))
        assert [batch.tokens.shape for batches in per_rank for batch in batches] == [shape, shape]


def test_ranks_that_walk_in_step_have_equal_work_where_lengths_have_a_long_tail() -> None:
    lengths = long_tailed(512)
    layout = Layout(8192, ranks=4, packed=True, crossover_tokens=4000.0)
    per_rank = pack(sequences_of(lengths), layout)
    for step in zip(*per_rank, strict=True):
        costs = [layout.costs(batch.packed_lengths).sum() for batch in step]
        assert max(costs) < 1.1 * min(costs)


def test_packing_wastes_less_than_a_twentieth_on_a_long_tail() -> None:
    sequences = sequences_of(long_tailed(512))
    assert padding_share(pack(sequences, Layout(8192, ranks=2, packed=True))) < 0.05


def test_sorting_by_length_keeps_padding_low() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 300).tolist()
    per_rank = pack(sequences_of(lengths), Layout(2048, ranks=2))
    fed = sum(lengths) - len(lengths)
    assert fed_tokens(per_rank) < 1.15 * fed
    assert padding_share(per_rank) == pytest.approx(1 - fed / fed_tokens(per_rank))


@pytest.mark.parametrize("budget", [1, 13, 64, 10**6])
def test_no_token_of_the_input_is_lost_or_changed(budget: int) -> None:
    sequences = sequences_of([3, 9, 2, 9, 30, 4])
    per_rank = pack(sequences, Layout(budget, ranks=1))
    rows = sorted(tuple(row[row > 0]) for batch in per_rank[0] for row in _rows(batch))
    ends = np.cumsum(sequences.lengths)
    expected = sorted(
        tuple(sequences.tokens[e - n : e - 1]) for e, n in zip(ends, sequences.lengths, strict=True)
    )
    assert rows == expected


def long_tailed(count: int) -> list[int]:
    """Most responses are short, a few reach the limit."""
    lengths = np.random.default_rng(1).lognormal(5.5, 1.0, count)
    return lengths.clip(2, 4096).astype(int).tolist()


def _rows(batch: MicroBatch) -> list[np.ndarray]:
    return [] if batch.idle else list(batch.tokens)
