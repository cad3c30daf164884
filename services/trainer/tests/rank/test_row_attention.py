"""Attention of packed rows is attention within each sequence, by whatever kernel, and whatever fills a grid up."""

from __future__ import annotations

import itertools

import pytest
import torch

from flotilla_trainer.rank import row_attention as module
from flotilla_trainer.rank.row_attention import Grid, RowLayout, within_sequences

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = {
    "exact": (37, 37, 37),
    "filled": (61, 64, 58, 63),
    "many": tuple(60 + i % 5 for i in range(19)),
    "no grid": (15, 2, 40),
}
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("kernels_of_the_cpu")


def given(tokens: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, SIZE, generator=random).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def alone(parts: list[torch.Tensor], lengths: tuple[int, ...], scale: float, window: int) -> torch.Tensor:
    """Return the attention of each sequence for itself."""
    outputs = []
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        heads = [part[start:end].transpose(0, 1)[None] for part in parts]
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - (window or end))
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=visible, scale=scale, enable_gqa=True
        )
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("window", [0, 7], ids=["whole", "window"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_output_and_gradients_are_those_of_each_sequence_alone(
    lengths: tuple[int, ...], compiled: bool, window: int
) -> None:
    grid = Grid.of(lengths)
    assert (grid is None) == (lengths == LENGTHS["no grid"])
    assert grid is None or (grid.places is None) == (len(set(lengths)) == 1)
    act = within_sequences
    if compiled:
        act = torch.compile(act, backend="aot_eager", dynamic=True)
    mine, theirs = given(sum(lengths)), given(sum(lengths))
    found = act(*mine, RowLayout.of(lengths, CPU, grid), 0.3, window)
    right = alone(theirs, lengths, 0.3, window)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, mine, slope), torch.autograd.grad(right, theirs, slope)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_sequences_of_very_different_lengths_get_no_grid() -> None:
    assert Grid.of((4096, 16, 300)) is None
    assert Grid.of((5, 3)) is None  # most of a grid would be filling


def test_grids_have_few_sizes() -> None:
    exact = {(grid.rows, grid.length) for n in range(200) if (grid := Grid.of((100 + n,) * 2)) is not None}
    assert len(exact) <= module.EXACT_SIZES + 7
    filled = {
        (grid.rows, grid.length)
        for rows in range(8, 64)
        for longest in range(900, 1024, 3)
        if (grid := Grid.of((longest, *[longest - 7] * (rows - 1)))) is not None
    }
    assert len(filled) <= 50  # of 57 x 42 that it was asked for


def test_torch_has_the_kernels_that_are_called_by_their_arguments() -> None:
    # A release that renames them must not go unnoticed before a GPU meets it.
    for kernel, wanted in {
        "_flash_attention_forward": {"cum_seq_q", "max_q", "scale", "window_size_left", "window_size_right"},
        "_flash_attention_backward": {"cum_seq_q", "max_q", "scale", "window_size_left", "window_size_right"},
        "_scaled_dot_product_cudnn_attention": {"compute_log_sumexp", "scale"},
        "_scaled_dot_product_cudnn_attention_backward": {"logsumexp", "philox_seed", "scale"},
    }.items():
        arguments = {argument.name for argument in getattr(torch.ops.aten, kernel).default._schema.arguments}
        assert wanted <= arguments, kernel
