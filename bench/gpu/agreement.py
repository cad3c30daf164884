"""Where generator and trainer differ in bfloat16 on a real model, and the share of each source.

A generator's engine samples tokens in bfloat16, then the trainer's model scores the same tokens: in bfloat16 as the
trainer computes, in float32 from the same weights, and in bfloat16 with one source of rounding after the other switched
to float32. Prints one JSON object a line and appends it to `figures.jsonl`:

- `ends`: the mean and the largest difference of probabilities of trainer and float32 (a), generator and float32 (b),
  and of both ends; `over_explained` is the last mean over sqrt(a^2 + b^2), which is at most 1.1 or the script fails.
- `source`: what is left of a, and of the difference of both ends, with this source in float32. `share` is the part of
  a^2 that it takes away; shares of sources that are not independent do not add up to 1.

`python bench/gpu/agreement.py --model FOLDER --out DIR` needs a Llama or Qwen3 folder with a chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import say

from flotilla_core.config.generators import GeneratorConfig
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import GenerationRequest, SampleSlot, Sampling
from flotilla_generator.engine.vllm.boot import WORKER_EXTENSION
from flotilla_generator.engine.vllm.engine import VllmEngine

MOST_OVER_EXPLAINED = 1.1
LONGEST = 512
CHUNK_TOKENS = 1024
SUBJECTS = (
    "the sea", "a clock", "bread", "winter", "a violin", "the moon", "ants", "a bridge", "salt", "rain", "glass",
    "a lighthouse", "paper", "mountains", "a train", "honey",
)  # fmt: skip
TASKS = (
    "Tell me three facts about {subject}.",
    "Write the first lines of a story about {subject}.",
    "What is {first} plus {second}? Answer with the number.",
    "Explain {subject} to a child in two sentences.",
)


class Answer(NamedTuple):
    """A prompt, and what the engine sampled after it with its log-probabilities."""

    prompt: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


def chat_prompts(model: Path, count: int) -> list[np.ndarray]:
    """Return chats of one turn, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for number in range(count):
        facts = {"subject": SUBJECTS[number // 4 % 16], "first": 11 + 7 * number, "second": 5 + 3 * number}
        turn = [{"role": "user", "content": TASKS[number % 4].format(**facts)}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32))
    return prompts


def engine_for(
    model: Path,
    dtype: str,
    options: dict[str, Any] | None = None,
    extension: str = WORKER_EXTENSION,
    *,
    eager: bool = True,
) -> VllmEngine:
    """Return the engine of a generator, which has not started."""
    config = GeneratorConfig(
        dtype=dtype,
        max_model_tokens=LONGEST,
        kv_cache_gib=1.0,
        enforce_eager=eager,
        engine_options=options or {},
    )
    return VllmEngine(config, Checkpoint.read(model), extension)


async def sampled(
    engine: VllmEngine, prompts: list[np.ndarray], tokens: int, *, seed: int = 0, temperature: float = 1.0
) -> list[Answer]:
    """Let the engine answer all prompts at once."""

    async def one(number: int, prompt: np.ndarray) -> Answer:
        name = f"agreement-{seed}-{number}"
        request = GenerationRequest(
            name,
            prompt.tolist(),
            (SampleSlot(name, 1000 * seed + number),),
            Sampling(temperature, tokens, ignore_eos=True),
            cache_salt=f"{seed}",
        )
        ((sample,),) = [ended async for ended in engine.generate(request)]
        return Answer(prompt, sample.token_ids, sample.logprobs.astype(np.float64))

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


class TrainerEnd:
    """The trainer's model on one device, in the type that its forward pass computes in."""

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from flotilla_trainer.rank.body_model import ROW_ATTENTION
        from flotilla_trainer.rank.policy_model import PolicyModel

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # What the trainer's masters are rounded to; float32 is the same weights, widened.
        stored = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation=ROW_ATTENTION
        )
        self.policy = PolicyModel(stored.to(getattr(torch, dtype)).to(self.device))

    def logprobs(self, answers: list[Answer], temperature: float = 1.0) -> list[np.ndarray]:
        """Score the answers as the trainer does, all of them packed into one row."""
        import torch

        from flotilla_trainer.rank.packed_rows import PackedRow

        tokens, positions, targets, lengths = _packed(answers)
        with torch.no_grad():
            scores = self.policy(
                torch.from_numpy(tokens)[None].to(self.device),
                torch.from_numpy(positions).to(self.device),
                torch.from_numpy(targets).to(self.device),
                temperature=temperature,
                chunk_tokens=CHUNK_TOKENS,
                packed_row=PackedRow.of(lengths, self.device),
            )
        flat = scores.logprobs.double().cpu().numpy()
        return np.split(flat, np.cumsum([len(answer.token_ids) for answer in answers])[:-1])


def _packed(answers: list[Answer]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Return one row of all answers, where it predicts their tokens, and the length of each sequence."""
    rows = [np.concatenate([answer.prompt, answer.token_ids]).astype(np.int64) for answer in answers]
    starts = np.cumsum([0, *map(len, rows)])[:-1]
    positions = [
        start + len(answer.prompt) - 1 + np.arange(len(answer.token_ids))
        for start, answer in zip(starts, answers, strict=True)
    ]
    targets = np.concatenate([answer.token_ids for answer in answers]).astype(np.int64)
    return np.concatenate(rows), np.concatenate(positions), targets, [len(row) for row in rows]


def distance(ours: list[np.ndarray], theirs: list[np.ndarray]) -> np.ndarray:
    """Return the differences of the probabilities of all tokens."""
    return np.abs(np.exp(np.concatenate(ours)) - np.exp(np.concatenate(theirs)))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _float32_head(causal_lm: Any) -> Any:
    """Logits and everything after them in float32; the hidden states are rounded."""
    import torch
    from torch.nn import functional

    weight = causal_lm.get_output_embeddings().weight

    class Head(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return functional.linear(hidden.float(), weight.float())

    return _replaced(causal_lm, "lm_head", Head())


def _float32_norms(causal_lm: Any) -> Any:
    """Norms multiply by their weight before the one rounding of their output."""
    import torch

    kind = type(causal_lm.model.norm)

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * self.weight.float()).to(self.weight.dtype)

    return _replaced(kind, "forward", forward)


def _float32_rotary(causal_lm: Any) -> Any:
    """Queries and keys are turned in float32, by tables that are not rounded."""
    import torch

    rotary = causal_lm.model.rotary_emb
    module = importlib.import_module(type(causal_lm.model).__module__)
    turn = module.apply_rotary_pos_emb

    def tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = kept(self, x.float(), position_ids)
        return cos, sin

    def turned(query: Any, key: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        return tuple(new.to(query.dtype) for new in turn(query.float(), key.float(), cos, sin, *rest))

    kept = type(rotary).forward

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(type(rotary), "forward", tables), _replaced(module, "apply_rotary_pos_emb", turned):
            yield

    return both()


def _float32_residual(causal_lm: Any) -> Any:
    """The stream that the layers add to is not rounded; what they add is."""
    import torch

    kind, norm = type(causal_lm.model.layers[0]), type(causal_lm.model.norm)
    plain = norm.forward

    def layer(self: Any, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        stream = hidden_states.float()
        stream = stream + self.self_attn(hidden_states=self.input_layernorm(stream), **given)[0].float()
        return stream + self.mlp(self.post_attention_layernorm(stream)).float()

    def rounded(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == self.weight.dtype:
            return plain(self, hidden)
        wide = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(self.weight.dtype)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(kind, "forward", layer), _replaced(norm, "forward", rounded):
            yield

    return both()


def _float32_attention(causal_lm: Any) -> Any:
    """Scores, weights and sums of attention in float32, on rounded queries, keys and values."""
    from transformers import AttentionInterface

    from flotilla_trainer.rank import packed_rows

    name = packed_rows.PACKED_ATTENTION

    def wide(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        output, none = packed_rows.packed_attention(
            module, query.float(), key.float(), value.float(), mask, **given
        )
        return output.to(query.dtype), none

    @contextmanager
    def registered() -> Iterator[None]:
        AttentionInterface.register(name, wide)
        try:
            yield
        finally:
            AttentionInterface.register(name, packed_rows.packed_attention)

    return registered()


def _float32_gate(causal_lm: Any) -> Any:
    """Activation and gate of the MLP in float32, with one rounding of their product."""
    kind = type(causal_lm.model.layers[0].mlp)

    def forward(self: Any, hidden: Any) -> Any:
        product = self.act_fn(self.gate_proj(hidden).float()) * self.up_proj(hidden).float()
        return self.down_proj(product.to(hidden.dtype))

    return _replaced(kind, "forward", forward)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "none": lambda causal_lm: nullcontext(),
    "head": _float32_head,
    "norms": _float32_norms,
    "rotary": _float32_rotary,
    "residual": _float32_residual,
    "attention": _float32_attention,
    "gate": _float32_gate,
}


class Report:
    """Says figures, and keeps them in a folder."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def add(self, **figures: Any) -> None:
        """Report one line."""
        say(self._out, **figures)


async def _answers(model: Path, asked: argparse.Namespace, options: dict[str, Any]) -> list[Answer]:
    engine = engine_for(model, "bfloat16", options, eager=asked.eager)
    await engine.start()
    try:
        return await sampled(engine, chat_prompts(model, asked.prompts), asked.tokens)
    finally:
        await engine.stop()


def main() -> int:
    """Sample with each engine, then score."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", type=Path, required=True)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--prompts", type=int, default=64)
    cli.add_argument("--tokens", type=int, default=32)
    cli.add_argument("--eager", action="store_true", help="decode without graphs")
    cli.add_argument(
        "--engine", action="append", default=[], help="options of one more engine, as JSON; may be repeated"
    )
    asked = cli.parse_args()
    report = Report(asked.out)
    engines: dict[str, dict[str, Any]] = {"default": {}} | {text: json.loads(text) for text in asked.engine}
    drawn = {name: asyncio.run(_answers(asked.model, asked, options)) for name, options in engines.items()}
    gc.collect()
    wide, own = TrainerEnd(asked.model, "float32"), TrainerEnd(asked.model, "bfloat16")
    failed = False
    for name, answers in drawn.items():
        started = time.monotonic()
        truth, ours = wide.logprobs(answers), own.logprobs(answers)
        theirs = [answer.logprobs for answer in answers]
        a, b, both = distance(ours, truth), distance(theirs, truth), distance(ours, theirs)
        explained = float(np.hypot(a.mean(), b.mean()))
        report.add(
            figure="ends",
            engine=name,
            device=str(own.device),
            tokens=len(both),
            probability=round(float(np.exp(np.concatenate(truth)).mean()), 3),
            trainer_mean=float(a.mean()),
            trainer_max=float(a.max()),
            generator_mean=float(b.mean()),
            generator_max=float(b.max()),
            both_mean=float(both.mean()),
            both_max=float(both.max()),
            both_mean_error=float(both.std() / np.sqrt(both.size)),
            over_explained=round(float(both.mean()) / explained, 3),
            seconds=round(time.monotonic() - started, 1),
        )
        failed |= both.mean() > MOST_OVER_EXPLAINED * explained
    answers = drawn["default"]
    truth, theirs = wide.logprobs(answers), [answer.logprobs for answer in answers]
    whole = float(distance(own.logprobs(answers), truth).mean())
    for name, switched in SOURCES.items():
        with switched(own.policy.causal_lm):
            ours = own.logprobs(answers)
        left = float(distance(ours, truth).mean())
        report.add(
            figure="source",
            source=name,
            trainer_mean=left,
            both_mean=float(distance(ours, theirs).mean()),
            share=round(1 - (left / whole) ** 2, 3),
        )
    if failed:
        print("the ends differ by more than their distances from float32 explain", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
