"""Reads the facts of a model folder from its `config.json` and the headers of its weights, and sizes a run's adapters.

Invariants: no weight is read, only the JSON header of each safetensors file; parameters are counted as they are stored,
so a tied head counts once. Layers get adapters by the trainer's rule: `all-linear` is every matrix of a repeated layer
that is no expert, and a target names the last whole parts of a layer's name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple, Self

from flotilla_coordinator.plan.chapter import Entries, refusal
from flotilla_core.config import GeneratorConfig, LoraConfig
from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.gpu_shares import BUCKETS_UNDER_WAY
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import inner_config, stored_shapes, weight_files, whole_number

LAYER = ".layers."
EXPERT = ".experts."
WEIGHT = ".weight"
VOCABULARY_HEAD = "lm_head"
AFTER_ROBERTA = (
    "camembert",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Encoders that count positions from behind that of their padding, which is 1."""
SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)

PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class ModelFacts:
    """The shape and size of one model."""

    folder: Path
    parameters: int
    outer_parameters: int
    """Parameters outside the layers: embedding, head and last norm."""
    layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward part; for experts, of all that one token visits, together."""
    heads: int
    """Number of attention heads."""
    query_size: int
    """Numbers in the queries of one token in one layer."""
    normalizes_heads: bool
    """True where queries and keys pass a norm of their own."""
    vocabulary_size: int
    longest_sequence: int
    key_value_size: int
    """Numbers that one token keeps in the KV cache of one layer."""
    matrices: dict[str, tuple[int, int]]
    """Rows and columns of every matrix but the embedding and the experts, by the name of its module."""
    shape: dict[str, Any]
    """Settings in which two models must agree to hold the same weights."""
    experts: int = 0
    """Experts of a layer among which a router chooses; 0 for a dense model."""
    visited_experts: int = 0
    """The number of them that one token visits."""
    expert_parameters: int = 0
    """Parameters of all experts of all layers."""
    largest_tensors: tuple[int, ...] = ()
    """Numbers in each of the few largest tensors."""
    shapes: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """The number of tensors of each shape."""

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        """Read a Hugging Face folder."""
        config = _config(folder)
        text = inner_config(config, str(folder)) or config
        number = partial(whole_number, text, where=str(folder))
        hidden, heads = number("hidden_size"), number("num_attention_heads")
        head_size = number("head_dim", default=max(1, hidden // heads))
        tensors = _tensors(folder)
        experts = len({_expert(name) for name in tensors} - {""})
        return cls(
            folder=folder,
            parameters=sum(map(math.prod, tensors.values())),
            outer_parameters=sum(math.prod(s) for name, s in tensors.items() if LAYER not in name),
            layers=number("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_intermediate_size(number),
            heads=heads,
            query_size=head_size * heads,
            normalizes_heads=any("q_norm" in name for name in tensors),
            vocabulary_size=number("vocab_size"),
            longest_sequence=number("max_position_embeddings")
            - 2 * (text.get("model_type") in AFTER_ROBERTA),
            key_value_size=2 * head_size * number("num_key_value_heads", default=heads),
            matrices=_matrices(tensors),
            shape={key: text.get(key) for key in SHAPE_KEYS} | {"experts": experts},
            experts=experts,
            visited_experts=number("num_experts_per_tok", default=0) if experts else 0,
            expert_parameters=sum(math.prod(s) for name, s in tensors.items() if _expert(name)),
            largest_tensors=tuple(nlargest(BUCKETS_UNDER_WAY, map(math.prod, tensors.values()))),
            shapes=Counter(shape for shape in tensors.values() if math.prod(shape)),
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the experts, those that it visits."""
        idle = self.experts - self.visited_experts
        return self.parameters - (self.expert_parameters * idle // self.experts if self.experts else 0)

    def with_value_head(self) -> ModelFacts:
        """Return the same body with a head of one number, in place of the vocabulary's."""
        head = math.prod(self.matrices.get(VOCABULARY_HEAD, (0,)))
        change = self.hidden_size - head
        return replace(
            self,
            parameters=self.parameters + change,
            outer_parameters=self.outer_parameters + change,
            matrices={name: shape for name, shape in self.matrices.items() if name != VOCABULARY_HEAD},
        )

    def inner_matrices(self) -> set[str]:
        """Return the names of the matrices that repeat from layer to layer."""
        return {name for name in self.matrices if LAYER in name}


def _matrices(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    return {
        name.removesuffix(WEIGHT): (shape[0], shape[1])
        for name, shape in tensors.items()
        if len(shape) == 2 and name.endswith(WEIGHT) and "embed" not in name and EXPERT not in name
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / "config.json")
    except FileNotFoundError:
        raise NotFound(
            "the model folder has no config.json", where=str(folder), next_step="give a Hugging Face folder"
        ) from None


def _intermediate_size(number: Callable[..., int]) -> int:
    dense = number("intermediate_size", default=4 * number("hidden_size"))
    experts = number("num_experts_per_tok", default=0)
    if not experts:
        return dense
    shared = number("shared_expert_intermediate_size", default=0)
    return experts * number("moe_intermediate_size", default=dense) + shared


def _expert(tensor: str) -> str:
    """Return the number of the expert that a tensor belongs to, or nothing."""
    number = tensor.partition(EXPERT)[2].partition(".")[0]
    return number if number.isdigit() else ""


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor by its name."""
    files = weight_files(folder)
    if not files:
        raise NotFound(
            "the model folder has no *.safetensors",
            where=str(folder),
            next_step="save the model as safetensors",
        )
    return {name: shape for file in files for name, shape in stored_shapes(file).items()}


@dataclass(frozen=True)
class AdapterFacts:
    """The place and size of the adapters of a run."""

    rank: int
    names: tuple[str, ...]
    """The last part of the name of each adapted layer, each once."""
    layers: int
    """Number of linear layers with a pair of adapters."""
    parameters: int
    """Number of trainable parameters."""

    @classmethod
    def of(cls, model: ModelFacts, lora: LoraConfig) -> Self:
        """Return the adapters of a run on this model."""
        shapes = {name: shape for name, shape in model.matrices.items() if _gets_adapters(name, lora, model)}
        return cls(
            rank=lora.rank,
            names=tuple(sorted({_last_part(name) for name in shapes})),
            layers=len(shapes),
            parameters=sum(lora.rank * (rows + columns) for rows, columns in shapes.values()),
        )


def adapter_errors(model: ModelFacts, lora: LoraConfig) -> Entries:
    """Find early what the trainer would refuse."""
    for target in () if lora.targets == "all-linear" else lora.targets:
        if not any(_ends_with(name, target) for name in model.matrices):
            layers = ", ".join(sorted({_last_part(name) for name in model.inner_matrices()}))
            yield refusal(f"lora.targets: the model has no linear layer {target!r}; its layers have {layers}")
    if lora.adapter is not None:
        try:
            read_json_object(lora.adapter / PEFT_CONFIG)
        except FileNotFoundError:
            yield refusal(
                f"lora.adapter: {lora.adapter} has no {PEFT_CONFIG}: give a folder in the layout of peft"
            )
        except InvalidConfig as error:
            yield refusal(f"lora.adapter: {error}")


def _gets_adapters(name: str, lora: LoraConfig, model: ModelFacts) -> bool:
    if lora.targets == "all-linear":
        return name in model.inner_matrices()
    return any(_ends_with(name, target) for target in lora.targets)


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


class SequenceLimit(NamedTuple):
    """The most tokens of a sequence: those of the model, or fewer where the stack says so."""

    model: int
    stack: int | None

    @classmethod
    def of(cls, model: ModelFacts, generator: GeneratorConfig) -> Self:
        """Return the limit of this model in these generators."""
        return cls(model.longest_sequence, generator.max_model_tokens)

    @property
    def tokens(self) -> int:
        """The limit itself."""
        return min(self.stack or self.model, self.model)

    def answers_beyond(self, longest: int) -> Entries:
        """Refuse given answers that are longer, with their prompts, than the limit."""
        way = "lower data.max_prompt_tokens or shorten the answers"
        return self._beyond("the longest prompt with its answer has", longest, way)

    def responses_beyond(self, prompt_tokens: int, response_tokens: int, key: str) -> Entries:
        """Refuse responses, as long as a key allows them, that are longer with their prompts than the limit."""
        what = f"the longest prompt ({prompt_tokens} tokens) and {key} = {response_tokens} need"
        return self._beyond(what, prompt_tokens + response_tokens, f"lower {key} or data.max_prompt_tokens")

    def episodes_beyond(self, tokens: int) -> Entries:
        """Refuse episodes whose histories may be longer than the limit."""
        return self._beyond("environment.episode_tokens is", tokens, "lower environment.episode_tokens")

    def _beyond(self, what: str, needed: int, way: str) -> Entries:
        """Say that something needs too many tokens, whose limit that is, and what to do."""
        if needed <= self.tokens:
            return
        limit = f"the model has {self.model}"
        if self.tokens != self.model:
            limit = f"and generator.max_model_tokens of the stack is {self.tokens} ({limit})"
            way = f"raise it to {needed}, or {way}" if needed <= self.model else way
        yield refusal(f"{what} {needed} tokens, {limit}: {way}")
