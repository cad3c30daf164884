"""Attention on a grid is attention within each sequence, whatever fills the grid up."""

from __future__ import annotations

import itertools

import pytest
import torch

from flotilla_trainer.rank import grid_attention as module
from flotilla_trainer.rank.grid_attention import Grid, attention_on_grid

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = {"exact": (37, 37, 37), "filled": (61, 64, 58, 63), "many": tuple(60 + i % 5 for i in range(19))}


@pytest.fixture(autouse=True)
def dense_kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put torch's dense kernels for CPUs in the place of cuDNN's, which take fewer key heads by themselves."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def repeated(*parts: torch.Tensor) -> list[torch.Tensor]:
        return [part.repeat_interleave(HEADS // GROUPS, 1) for part in parts]

    def dense_forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, normalizers = kernel(query, *repeated(key, value), 0.0, True, scale=scale)
        return output, normalizers

    def dense_backward(
        slope: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        normalizers: torch.Tensor,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        by_query, *others = backward(
            slope, query, *repeated(key, value), output, normalizers, 0.0, True, scale=scale
        )
        return by_query, *(by.unflatten(1, (GROUPS, -1)).sum(2) for by in others)

    monkeypatch.setattr(module, "dense_forward", dense_forward)
    monkeypatch.setattr(module, "dense_backward", dense_backward)
    monkeypatch.setattr(module, "_exact_sizes", set())


def given(tokens: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, SIZE, generator=random).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def alone(parts: list[torch.Tensor], lengths: tuple[int, ...], scale: float) -> torch.Tensor:
    """Return the attention of each sequence for itself."""
    outputs = []
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        heads = [part[start:end].transpose(0, 1)[None] for part in parts]
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_output_and_gradients_are_those_of_each_sequence_alone(
    lengths: tuple[int, ...], compiled: bool
) -> None:
    grid = Grid.of(lengths)
    assert grid is not None
    assert (grid.places is None) == (len(set(lengths)) == 1)
    act = (
        torch.compile(attention_on_grid, backend="aot_eager", dynamic=True) if compiled else attention_on_grid
    )
    mine, theirs = given(sum(lengths)), given(sum(lengths))
    slope = torch.randn(sum(lengths), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    found, right = act(*mine, grid, 0.3), alone(theirs, lengths, 0.3)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    for ours, other in zip(
        torch.autograd.grad(found, mine, slope), torch.autograd.grad(right, theirs, slope), strict=True
    ):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_sequences_of_very_different_lengths_get_no_grid() -> None:
    assert Grid.of((4096, 16, 300)) is None
    assert Grid.of((5, 3)) is None  # most of a grid would be filling


def test_grids_have_few_sizes() -> None:
    exact = {tuple(grid.size.tolist()) for n in range(200) if (grid := Grid.of((100 + n,) * 2)) is not None}
    assert len(exact) <= module.EXACT_SIZES + 7
    filled = {
        tuple(grid.size.tolist())
        for rows in range(8, 64)
        for longest in range(900, 1024, 3)
        if (grid := Grid.of((longest, *[longest - 7] * (rows - 1)))) is not None
    }
    assert len(filled) <= 50  # of 57 x 42 that it was asked for
