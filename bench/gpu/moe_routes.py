"""How often rounding to bfloat16 sends a token to other experts, and what that does to its probability.

The random model of `moe.py` with weights that bfloat16 has exactly, in plain torch: in float32, in bfloat16, and in
bfloat16 with the routes that float32 took. Prints one JSON object. It runs on
a CPU for a few minutes: `python bench/gpu/moe_routes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from moe import SHAPE, random_model

PROMPTS, PROMPT_TOKENS, SAMPLED = 8, 8, 24


@contextmanager
def hooked(model: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook` after the router of each layer."""
    handles = [layer.mlp.gate.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def main() -> None:
    """Sample, compute three times, compare."""
    model, likely = random_model(SHAPE)
    model.set_experts_implementation("eager")  # the plain loop over experts, which is fast on CPUs
    model.to(torch.bfloat16).float()
    tokens = torch.randint(3, 16, (PROMPTS, PROMPT_TOKENS))
    for _ in range(SAMPLED):
        last = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(last, 1)], 1)
    chosen: list[torch.Tensor] = []

    def note(router: Any, inputs: Any, output: Any) -> None:
        chosen.append(output[2])

    def logprobs() -> torch.Tensor:
        everything = model(tokens).logits.float().log_softmax(-1)
        return everything[:, PROMPT_TOKENS - 1 : -1].gather(2, tokens[:, PROMPT_TOKENS:, None])[..., 0]

    with hooked(model, note):
        exact = logprobs()
        routes = list(chosen)
        chosen.clear()
        model.to(torch.bfloat16)
        rounded = logprobs()
    flips = [
        (ours.sort(-1).values != theirs.sort(-1).values).any(-1).float().mean()
        for ours, theirs in zip(routes, chosen, strict=True)
    ]
    remaining = iter(routes)

    def follow(router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, ...]:
        experts = next(remaining)
        shares = output[0].float().softmax(-1).gather(-1, experts)
        return output[0], (shares / shares.sum(-1, keepdim=True)).to(output[0].dtype), experts

    with hooked(model, follow):
        replayed = logprobs()

    def difference(found: torch.Tensor) -> float:
        return round(float((found.exp() - exact.exp()).abs().mean()), 4)

    print(
        json.dumps(
            {
                "mean_probability": round(likely, 3),
                "tokens_with_another_route": round(float(torch.stack(flips).mean()), 4),
                "probability_difference": difference(rounded),
                "with_the_routes_of_float32": difference(replayed),
            }
        )
    )


if __name__ == "__main__":
    main()
