"""The kernel that digests weights on GPUs computes the numbers that torch computes; here Triton interprets it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPARE = """
import torch

from flotilla_weights.digest import BLOCK_WORDS, WORD_BYTES, _coefficients, tensor_digests
from flotilla_weights.digest_kernel import BlockTable

BLOCK = BLOCK_WORDS * WORD_BYTES
random = torch.Generator().manual_seed(1)
memory = torch.randint(0, 256, (5 * BLOCK,), dtype=torch.uint8, generator=random)
sizes = [1, 6, 8, 24, 2056, 66_000, BLOCK - 8, BLOCK, BLOCK + 8, BLOCK + 3, 14]
extents, start = [], 64
for size in sizes:
    extents.append((start, size))
    start += -(-size // 64) * 64
table = BlockTable(extents, BLOCK, *_coefficients(memory.device))
first = memory[extents[3][0] :]
moved = [(start - extents[3][0], size) for start, size in extents]
from_the_fourth = BlockTable(moved, BLOCK, *_coefficients(memory.device))
expected = tensor_digests(memory[start : start + size] for start, size in extents)
for found in (table.digests(memory), from_the_fourth.digests(first)):
    assert [value % (1 << 64) for value in found.tolist()] == expected, (found, expected)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_computes_the_digests_of_torch_for_tensors_of_any_size_and_place() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COMPARE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "equal\n", done.stderr
