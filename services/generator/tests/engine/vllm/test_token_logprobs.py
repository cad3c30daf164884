"""The kernel that takes log-probabilities on GPUs computes those of torch; here Triton interprets it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPARE = """
import torch

from flotilla_generator.engine.vllm.token_logprobs import _sampled_only, agrees_with_torch, token_logprobs

assert agrees_with_torch(torch.device("cpu"))
logits = torch.randn(3, 20_000)[:, :17_003]
logits[2, 5:] = float("-inf")
tokens = torch.tensor([16_999, 0, 4])
expected = logits.log_softmax(1).gather(1, tokens[:, None])
assert torch.allclose(token_logprobs(logits, tokens)[:, None], expected, atol=1e-5)

taken = []
scores = _sampled_only(lambda *_, **more: taken.append(more), dict)
found = scores(logits, 0, tokens, None, max_per_req_token_ids=0, logits_mode=False)
assert torch.allclose(found["logprobs"], expected, atol=1e-5)
assert found["logprob_token_ids"].tolist() == tokens[:, None].tolist()
scores(logits, 2, tokens, None)
scores(logits, 0, tokens, [0, 1])
scores(logits, 0, tokens, None, max_per_req_token_ids=1)
assert len(taken) == 3, "what asks for more is left to vLLM"
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_log_probabilities_are_those_of_torch_and_what_asks_for_more_is_left_to_vllm() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COMPARE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "equal\n", done.stderr
