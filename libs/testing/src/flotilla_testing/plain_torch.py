"""A plain torch version of the trainer's computations: one whole sequence at a time, in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from flotilla.trainer.v1.trainer_pb2 import TrainSample
from flotilla_core.tensors import from_tensor

Tokens = npt.NDArray[np.int32]


def plain_model(folder: Path) -> Any:
    """Return the model of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def distribution(model: Any, prompt: Tokens, response: Tokens, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities over the whole vocabulary at each response token."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def logprobs(model: Any, prompt: Tokens, response: Tokens, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of each response token."""
    return of_tokens(distribution(model, prompt, response, temperature), response)


def of_tokens(scores: torch.Tensor, response: Tokens) -> torch.Tensor:
    """Return the scores of the response's own tokens among those of the vocabulary."""
    return scores.gather(-1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0]


def trained_tokens(sample: TrainSample) -> torch.Tensor:
    """Return the mask of the tokens of a sample that are trained."""
    length = len(from_tensor(sample.token_ids))
    mask = from_tensor(sample.mask) if sample.mask.data else np.ones(length, bool)
    return torch.from_numpy(mask.copy())


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare the gradients of a model, and assert that there is something to compare."""
    assert found.keys() == expected.keys()
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.01
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].double(), gradient, atol=tolerance, rtol=tolerance, msg=partial("{}: {}".format, name)
        )
