"""Inputs of recomputed layers leave the accelerator, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flotilla_trainer.rank.activation_offload import RecomputedLayers

WIDTH, TOKENS = 1024, 4096
LAYERS = 8

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing leaves the memory of the host")


def stack_of_layers() -> tuple[nn.Sequential, RecomputedLayers]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).cuda()
    recomputed = RecomputedLayers(layers)
    recomputed.on = True
    return layers, recomputed


@on_gpu
def test_kept_inputs_take_no_memory_of_the_gpu_and_come_back_as_they_were() -> None:
    layers, recomputed = stack_of_layers()
    inputs = torch.randn(TOKENS, WIDTH, device="cuda")
    kept, gradients = {}, {}
    for rest in (False, True):
        recomputed.inputs_rest_on_host = rest
        before = torch.cuda.memory_allocated()
        loss = layers(inputs).square().sum()
        torch.cuda.synchronize()
        kept[rest] = torch.cuda.memory_allocated() - before
        loss.backward()
        gradients[rest] = [parameter.grad.clone() for parameter in layers.parameters()]
        layers.zero_grad()
    one_input = inputs.numel() * inputs.element_size()
    assert kept[False] - kept[True] >= (LAYERS - 2) * one_input
    for stayed, rested in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(stayed, rested)
