"""Estimates the peak memory of one trainer rank, and what it keeps on its host, from the shape of the model alone.

Invariant: the estimate counts what the ranks hold. Float32 masters, gradients and AdamW moments are spread over the
ranks of one copy. Where adapters are trained, the weights in the type of the computation are spread in the same way,
and every rank holds the adapters with their gradients and moments whole. Every rank holds the weights of the outer part
and of two layers whole, the activations that autograd saves for its part of one micro-batch, and the logits of one
chunk. The peak is the backward pass through the head of the last micro-batch, when all of this is held at once. Buffers
of NCCL, the CUDA context and the overhead of allocators come on top. With `trainer.cpu_offload` masters, gradients and
moments are on the host, and a rank holds float32 weights and gradients of one layer, or of the outer part, on their
way. What the host keeps is counted exactly: the blocks of pinned memory are powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts
from flotilla_core.config import (
    AlgorithmConfig,
    BatchingConfig,
    CriticConfig,
    DpoConfig,
    PolicyConfig,
    RunConfig,
    TrainerConfig,
)

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
MOMENTS = 8
LOGIT_COPIES = 4
"""Scaled logits, probabilities, their product and a gradient, in float32."""
TAUGHT_COPIES = {True: 3, False: 1}
"""Copies for a divergence from a teacher; with a tail, the logits without the teacher's tokens are copied as well."""
TAUGHT_BYTES = 4 + 8 + 4
"""A token id as it arrives and as an index, and a log-probability."""
KEPT_SHARE = 0.9
"""The share of free memory that the ranks use for whole weights and gradients (`kept_whole.py` of the trainer)."""
VISITING_BYTES = 512 << 20
"""Moments of an offloaded optimizer that are on the device at one time."""


@dataclass(frozen=True)
class TrainerMemory:
    """The memory of one rank, in bytes."""

    masters: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    logits: int
    reference: int
    """The frozen copy of the first policy, with its hidden states, head and logits where whole distributions are
    compared; 0 where there is none."""

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())

    @property
    def state(self) -> int:
        """Return the bytes that no batch changes: masters, gradients and moments."""
        return self.masters + self.gradients + self.moments

    @property
    def kept(self) -> int:
        """Return what is there between updates as well."""
        return self.masters + self.moments + self.reference

    @classmethod
    def of(
        cls,
        model: ModelFacts,
        config: RunConfig,
        trainer: TrainerConfig,
        longest_sequence: int,
        *,
        compiled: bool = False,
    ) -> TrainerMemory:
        """Return the memory that a run needs whose sequences have up to `longest_sequence` tokens.

        Layers that are `compiled` keep less for the backward pass.
        """
        batching, size = config.batching, BYTES[trainer.dtype]
        adapters = None if config.lora is None else AdapterFacts.of(model, config.lora)
        share, away = _share(model, trainer), offloads(trainer)
        learning = share if adapters is None else adapters.parameters
        moments = learning * MOMENTS
        if config.optimizer.offload:
            moments = min(moments, VISITING_BYTES)
        layer = _layer_parameters(model)
        row = microbatch_tokens(config, trainer, longest_sequence)
        tokens = -(-row // trainer.sequence_parallel)
        chunk = min(batching.logprob_chunk_tokens, tokens)
        return cls(
            masters=_masters(model, trainer, size, adapters),
            gradients=_visiting(model, trainer) if away and adapters is None else learning * MASTER,
            moments=0 if away and adapters is None else moments,
            # Two layers are gathered, one of them ahead of its use; the outer part's gradient is held whole as well.
            gathered=(2 * layer + (2 if adapters is None else 1) * model.outer_parameters) * size,
            activations=tokens * _token_activations(model, size, adapters, batching, compiled=compiled),
            logits=0
            if config.trains_reward_model
            else chunk * model.vocabulary_size * 4 * LOGIT_COPIES + _taught(model, config, row, chunk),
            reference=(
                learning * MASTER
                if _keeps_reference(config.algorithm) and not (away and adapters is None)
                else 0
            )
            + (_compared(model, size, tokens, chunk) if _compares_wholly(config.algorithm) else 0),
        )


@dataclass(frozen=True)
class HostMemory:
    """The memory of one rank on its host with `trainer.cpu_offload`, in bytes."""

    pinned: int
    """Weights, gradients where all weights learn, and those of the last modules twice while they add up."""
    moments: int
    reference: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())

    @classmethod
    def of(cls, model: ModelFacts, config: RunConfig, trainer: TrainerConfig) -> HostMemory:
        """Return the memory of a run; nothing where the weights are on the device."""
        if not offloads(trainer):
            return cls(0, 0, 0)
        if config.lora is not None:
            return cls(_pinned(model, trainer, BYTES[trainer.dtype]), 0, 0)
        reference = _share(model, trainer) * MASTER if _keeps_reference(config.algorithm) else 0
        return replace(cls.of_all_weights(model, trainer), reference=reference)

    @classmethod
    def of_all_weights(cls, model: ModelFacts, trainer: TrainerConfig) -> HostMemory:
        """Return the memory of a rank whose weights all learn and rest there."""
        pinned = 2 * _pinned(model, trainer, MASTER) + 2 * _visiting(model, trainer)
        return cls(pinned, _share(model, trainer) * MOMENTS, 0)


def critic_memory(
    model: ModelFacts, config: RunConfig, critic: CriticConfig, gang: TrainerConfig, longest: int
) -> tuple[TrainerMemory, HostMemory]:
    """Return the memory of such a run's critic: a head of one number has no logits, and no reference is kept."""
    own = config.model_copy(update={"optimizer": critic.optimizer, "lora": None})
    need = replace(TrainerMemory.of(model, own, gang, longest), logits=0, reference=0)
    return need, replace(HostMemory.of(model, own, gang), reference=0)


def kept_bytes(model: ModelFacts, config: RunConfig, trainer: TrainerConfig) -> int:
    """Return the free memory beside a micro-batch in which a rank keeps weights and gradients whole in an update."""
    gradients = MASTER if config.lora is None else 0
    return int(model.parameters * (BYTES[trainer.dtype] + gradients) / KEPT_SHARE)


def offloads(trainer: TrainerConfig) -> bool:
    """Return whether a gang keeps its weights elsewhere than it computes; on a CPU both are one."""
    return trainer.cpu_offload and trainer.backend != "gloo"


def microbatch_tokens(config: RunConfig, trainer: TrainerConfig, longest_sequence: int) -> int:
    """Return the most tokens of one micro-batch, which never has more than its share of a step."""
    rollout = config.rollout
    given = 2 if config.learns_from_pairs else 1 if config.algorithm.type == "sft" else None
    sequences = rollout.prompts_per_step * (given or rollout.samples_per_prompt)
    step = -(-sequences // trainer.lanes) * longest_sequence
    return min(max(config.batching.microbatch_budget, longest_sequence), step)


def resident_bytes(model: ModelFacts, trainer: TrainerConfig) -> int:
    """Return what a rank keeps through every run in which all weights learn, whatever its batches are."""
    gathered = (2 * _layer_parameters(model) + 2 * model.outer_parameters) * BYTES[trainer.dtype]
    if offloads(trainer):
        return 2 * _visiting(model, trainer) + gathered
    return _share(model, trainer) * (2 * MASTER + MOMENTS) + gathered


def frozen_bytes(model: ModelFacts, trainer: TrainerConfig) -> int:
    """Return what a rank keeps of weights that do not learn, whatever its batches are."""
    gathered = 2 * _layer_parameters(model) + model.outer_parameters
    resting = 0 if offloads(trainer) else _share(model, trainer)
    return (resting + gathered) * BYTES[trainer.dtype]


def scoring_bytes(model: ModelFacts, config: RunConfig, gang: TrainerConfig) -> int:
    """Return what a rank of a gang that only scores takes with one micro-batch: its weights rest in float32."""
    size = BYTES[gang.dtype]
    gathered = (2 * _layer_parameters(model) + model.outer_parameters) * size
    tokens = -(-config.batching.microbatch_budget // gang.sequence_parallel)
    resting = 0 if offloads(gang) else _share(model, gang) * MASTER
    return resting + gathered + tokens * layer_activations(model, size)


def _share(model: ModelFacts, trainer: TrainerConfig) -> int:
    return -(-model.parameters // (trainer.nproc // trainer.replicate))


def _masters(model: ModelFacts, trainer: TrainerConfig, size: int, adapters: AdapterFacts | None) -> int:
    """Return the bytes of weights on the device between passes, and of those on their way to a pass."""
    if adapters is None:
        return _visiting(model, trainer) if offloads(trainer) else _share(model, trainer) * MASTER
    return adapters.parameters * MASTER + (0 if offloads(trainer) else _share(model, trainer) * size)


def _visiting(model: ModelFacts, trainer: TrainerConfig) -> int:
    """Return the bytes of a rank's float32 numbers of one layer, or of the outer part, that are on their way."""
    part = max(_layer_parameters(model), model.outer_parameters)
    return -(-part // (trainer.nproc // trainer.replicate)) * MASTER


def _pinned(model: ModelFacts, trainer: TrainerConfig, size: int) -> int:
    """Return the bytes of a rank's pinned blocks for all weights, of which torch rounds each up to a power of two."""
    shards = trainer.nproc // trainer.replicate
    blocks = (
        count * (1 << (-(-shape[0] // shards) * math.prod(shape[1:]) * size - 1).bit_length())
        for shape, count in model.shapes.items()
    )
    return max(sum(blocks), _share(model, trainer) * size)


def _layer_parameters(model: ModelFacts) -> int:
    return (model.parameters - model.outer_parameters) // model.layers


def _keeps_reference(algorithm: AlgorithmConfig) -> bool:
    if isinstance(algorithm, PolicyConfig):
        return algorithm.kl.placement != "none" and algorithm.kl.reference == "frozen"
    return isinstance(algorithm, DpoConfig) and not algorithm.reference_free


def _compares_wholly(algorithm: AlgorithmConfig) -> bool:
    if not isinstance(algorithm, PolicyConfig) or algorithm.kl.placement == "none":
        return False
    return algorithm.kl.estimator == "full"


def _taught(model: ModelFacts, config: RunConfig, tokens: int, chunk: int) -> int:
    """Return the bytes of a teacher's answers for a micro-batch, and of the logits that are compared with them."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    if teacher is None:
        return 0
    named = min(teacher.top_k, model.vocabulary_size)
    copies = TAUGHT_COPIES[teacher.tail and named < model.vocabulary_size]
    return tokens * named * TAUGHT_BYTES + chunk * model.vocabulary_size * 4 * copies


def _compared(model: ModelFacts, size: int, tokens: int, chunk: int) -> int:
    states = (tokens + model.vocabulary_size) * model.hidden_size * size
    return states + chunk * model.vocabulary_size * 4 * LOGIT_COPIES


def _token_activations(
    model: ModelFacts, size: int, adapters: AdapterFacts | None, batching: BatchingConfig, *, compiled: bool
) -> int:
    """Return the bytes that one token keeps for the backward pass, over all layers."""
    layer = layer_activations(model, size, adapters)
    if compiled and adapters is None:
        layer = compiled_activations(model, size)
    last_norm = (4 + 2 * size) * model.hidden_size
    if batching.recomputes_layers:
        # With activations on the host, the device holds those of two layers: one in transfer and one in computation.
        kept = 2 if batching.activation_offload else model.layers
        return kept * model.hidden_size * size + layer + last_norm
    if batching.recomputes_wide_parts:
        narrow = 3 * model.hidden_size + 2 * model.query_size + model.key_value_size
        return model.layers * narrow * size + layer + last_norm
    return model.layers * layer + last_norm


def layer_activations(model: ModelFacts, size: int, adapters: AdapterFacts | None = None) -> int:
    """Return the bytes that one token keeps for the backward pass in one layer, where a number has `size` bytes.

    A norm keeps its input in float32, the normalised numbers and its output. Attention keeps queries, keys, values and
    its output twice, as it comes from the kernels and joined. The feed-forward part keeps four intermediates. With
    adapters there is the output of each A as well; a frozen norm keeps less than is counted here.
    """
    norm = 4 + 2 * size
    asked = model.query_size * 3 * size + model.key_value_size * size
    if model.normalizes_heads:
        asked += (model.query_size + model.key_value_size // 2) * (4 + size)
    inner = 0 if adapters is None else adapters.rank * size * adapters.layers // model.layers
    return 2 * norm * model.hidden_size + asked + 4 * size * model.intermediate_size + inner


def compiled_activations(model: ModelFacts, size: int) -> int:
    """Return the same for a compiled layer, whose norms and products are computed again where that is cheaper.

    It keeps both inputs of the residual stream and what their norms give, queries, keys and values as they come from
    the matrices, queries and keys once more with their positions, the output of attention, and three intermediates of
    the feed-forward part.
    """
    asked = 3 * model.query_size + model.key_value_size + model.key_value_size // 2
    return size * (4 * model.hidden_size + asked + 3 * model.intermediate_size)
