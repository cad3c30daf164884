"""A model whose parameters are sharded over the ranks; whole tensors are loaded into it and gathered from it.

Invariants: parameters and optimizer state are float32 whatever the forward pass computes in; gradients are reduced in
float32 and as sums, never as means; every rank walks the parameters in the same order, because each step is a
collective; names are those of the checkpoint, without tied duplicates. A frozen model has no gradients, its weights are
kept in the type that they are computed with, and only its adapters learn; two base models get the same digest only if
all of their parameters are equal, on any device and any number of ranks. With `cpu_offload` parameters rest in host
memory, and what is gathered from them passes through the device: its bytes and digests are those of a model that
rests there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import AutoConfig, PreTrainedModel

from flotilla_core.config import LoraConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, Mismatch
from flotilla_trainer.rank.activation_offload import RecomputedLayers, SelectiveLayers
from flotilla_trainer.rank.body_model import ValueBody
from flotilla_trainer.rank.compiled_layers import CompiledLayers
from flotilla_trainer.rank.cut import RankMesh, rows_of, scatter, visiting
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.model_checks import packing_refusal
from flotilla_trainer.rank.parameter_offload import materialize, resting_on_host
from flotilla_trainer.rank.peft_folder import read_adapters
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.sequence_parallel import SequenceParallel
from flotilla_trainer.rank.value_model import ScoreModel, ValueModel
from flotilla_weights.digest import pending_digest, tensor_digest

HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class BaseDigest:
    """A digest of the weights under adapters, over all of their bytes.

    It takes the parameters one after the other, on the device that holds them.
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, whole: torch.Tensor) -> None:
        """Add the next whole parameter; on a GPU the work is only queued."""
        self._parts.append(pending_digest(whole))

    @property
    def number(self) -> int:
        """The digest of all parameters so far; 0 for none."""
        # The digest loses one bit because it travels as a signed number.
        return tensor_digest(torch.stack(self._parts)) >> 1 if self._parts else 0


class ShardedModel:
    """The policy, or the model of another role, on all ranks."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        mesh: RankMesh,
        device: torch.device,
        kind: type[PolicyModel] | type[ValueModel] = PolicyModel,
        *,
        frozen: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.cpu_offload = cpu_offload
        self.dtype = dtype
        self.frozen = frozen
        self.base = 0
        """The digest of the weights where they are frozen, otherwise 0."""
        self.adapters: Adapters | None = None
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            causal_lm = kind.skeleton(config, torch.float32)
        if frozen:
            # This comes before the model is sharded: FSDP does not check again which parameters have gradients.
            causal_lm.requires_grad_(False)
            for parameter in causal_lm.parameters():
                parameter.data = parameter.data.to(dtype)
        self.lane = SequenceParallel(mesh.lane, mesh.place, mesh.width) if mesh.width > 1 else None
        # The skeleton comes from `kind` itself, so its type is the one that `kind` takes.
        self.policy = kind(cast(Any, causal_lm), self.lane)
        self.layers = repeated_layers(causal_lm)
        """The repeated blocks of the model; sharding renames their classes, by which they are found."""
        self.selective_layers = SelectiveLayers(self.layers)
        self.compiled_layers = CompiledLayers(self.layers)
        self.recomputed_layers = RecomputedLayers(self.layers)
        self._shard(causal_lm)
        if cpu_offload:
            materialize(self.policy, device)
        else:
            self.policy.to_empty(device=device)

    @property
    def causal_lm(self) -> PreTrainedModel | ValueBody:
        """The transformers model inside; that of a critic has a head of one number."""
        return self.policy.causal_lm

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence; 0 where the model does not say."""
        positions = int(getattr(self.causal_lm.config, "max_position_embeddings", 0) or 0)
        # Encoders after RoBERTa count positions from behind that of their padding.
        padding = getattr(getattr(self.causal_lm.base_model, "embeddings", None), "padding_idx", None)
        return positions if padding is None else positions - padding - 1

    def report_progress(self, moved: Callable[[], None]) -> None:
        """Call `moved` after every part of a pass."""
        self.policy.report_progress(self.layers, moved)

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, each once."""
        return list(self.causal_lm.parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimizer may change, by name: all, or the adapters of a frozen model."""
        if self.frozen:
            return self.adapters.named_parameters() if self.adapters is not None else {}
        return dict(self.causal_lm.named_parameters())

    def adapt(self, settings: LoraConfig | None, seed: int) -> None:
        """Replace the adapters with new ones, or with none."""
        if self.adapters is not None:
            self.adapters.remove()
            self.adapters = None
        if settings is None:
            return
        assert isinstance(self.causal_lm, PreTrainedModel), "the front lets policies alone have adapters"
        adapters = Adapters(self.causal_lm, settings, seed, self.device)
        try:
            if settings.adapter:
                adapters.set(read_adapters(settings.adapter, adapters))
        except FlotillaError:
            adapters.remove()
            raise
        self.adapters = adapters

    def load(self, folder: Path) -> None:
        """Replace all weights with those of a folder that has the same shapes; rank 0 reads it."""
        failure: FlotillaError | None = None
        source: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            try:
                source = self._read(folder)
            except FlotillaError as error:
                failure = error
        self.agree(failure)
        base = BaseDigest()
        with torch.no_grad():
            for name, parameter in self.causal_lm.named_parameters():
                # Rank 0 has the numbers; the other ranks pass an empty tensor of the same shape.
                whole = (
                    source[name].to(self.device)
                    if source
                    else torch.empty(parameter.shape, device=self.device)
                )
                if self.frozen and source:
                    base.add(whole)
                scatter(name, whole, parameter)
            for name, buffer in self.causal_lm.named_buffers():
                if source:
                    buffer.copy_(source[name])
                dist.broadcast(buffer, 0)
        if self.frozen:
            number = torch.tensor(base.number, device=self.device)
            dist.broadcast(number, 0)
            self.base = int(number)

    def agree(self, failure: FlotillaError | None) -> None:
        """Raise on all ranks if any rank has a failure."""
        failed = torch.tensor(int(failure is not None), device=self.device)
        dist.all_reduce(failed)
        if failed.item():
            raise failure or FailedPrecondition("another rank could not load the model")

    def check_head(self) -> None:
        """Refuse a policy whose logits are not its head on its last hidden states, and scores that padding changes."""
        if not isinstance(self.policy, PolicyModel | ScoreModel):
            return  # It has our own head.
        tokens = torch.arange(4, device=self.device)[None] % self.causal_lm.config.vocab_size
        with torch.no_grad():
            error = float(self.policy.head_error(tokens))
        if error <= HEAD_TOLERANCE[self.dtype]:
            return
        name = type(self.causal_lm).__name__
        if isinstance(self.policy, ScoreModel):
            raise FailedPrecondition(
                f"{name} gives no rewards", why=f"padding behind a text changes its scores by {error:.3g}"
            )
        raise FailedPrecondition(
            f"{name} cannot be trained",
            why=f"its logits differ by {error:.3g} from its head applied to its last hidden states",
            next_step="use a model whose head is one linear layer",
        )

    def packing_facts(self) -> dict[str, Any]:
        """Return why rows cannot be packed, if so, and the length at which attention costs as much as all the rest."""
        config = self.causal_lm.config.get_text_config()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        body: Any = self.causal_lm.base_model
        embedding = body.get_input_embeddings().weight
        inner = sum(parameter.numel() for parameter in self.parameters()) - embedding.numel()
        return {
            "packing_refusal": packing_refusal(self.policy, self.dtype, self.device),
            "attention_crossover_tokens": inner / (config.num_hidden_layers * width),
        }

    def specs(self, dtype: torch.dtype) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return name, type and whole shape of every tensor of the checkpoint, with weights stored as `dtype`."""
        return [
            (name, dtype if tensor.is_floating_point() else tensor.dtype, tensor.shape)
            for name, tensor in self._checkpoint().items()
        ]

    def whole_tensors(self, order: Iterable[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the checkpoint in full; all ranks have to iterate to the end."""
        for name, rows in self.rows_to_round(([name] for name in order), dtype):
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            yield name, whole.to(dtype) if whole.is_floating_point() else whole

    def rows_to_round(
        self, groups: Iterable[Iterable[str]], dtype: torch.dtype
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield the rows of the same, in parts, for a caller that rounds to `dtype` itself.

        The tensors of a group are gathered together, and those of the next one meanwhile.
        """
        # To detach a sharded tensor takes longer than to send a small one: `rows_of` reads what the ranks hold.
        tensors: dict[str, torch.Tensor] = dict(self.causal_lm.named_parameters()) | self._buffers()
        named = ([(name, tensors[name]) for name in names] for names in groups)
        if self.cpu_offload:
            named = ([(name, visiting(tensor)) for name, tensor in group] for group in named)
        return rows_of(named, dtype)

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        """Return the parameters, each once, and the buffers that are saved with them."""
        parameters = {name: parameter.detach() for name, parameter in self.causal_lm.named_parameters()}
        return parameters | self._buffers()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self.causal_lm.named_buffers() if name in self._saved}

    @cached_property
    def _saved(self) -> frozenset[str]:
        """The names of a checkpoint's tensors; to list them takes longer than to send a small model."""
        return frozenset(self.causal_lm.state_dict())

    def _shard(self, causal_lm: PreTrainedModel | ValueBody) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        wide = MixedPrecisionPolicy(param_dtype=torch.float32)
        shard = partial(
            fully_shard,
            mesh=self.mesh.weights,
            offload_policy=resting_on_host(self.device) if self.cpu_offload else OffloadPolicy(),
        )
        for layer in self.layers:
            shard(layer, mp_policy=policy)
        for part in self.policy.in_float32():
            shard(part, mp_policy=wide)
        # By default the root stays whole after a forward pass without a backward one. The optimizer, the loader and
        # the publisher would then find copies that FSDP discards.
        shard(self.policy, mp_policy=policy, reshard_after_forward=True)
        for method in ("head_error", "packing_errors", "lane_error", "hidden_states"):
            if hasattr(self.policy, method):
                register_fsdp_forward_method(self.policy, method)
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers of the folder, whole, in float32, on the host."""
        try:
            model, lacking = self.policy.read(folder)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise FailedPrecondition(
                "the model cannot be loaded", where=str(folder), why=str(error)
            ) from error
        missing = sorted(lacking)
        if missing:
            raise Mismatch(
                f"the checkpoint lacks {len(missing)} tensors",
                where=str(folder),
                why=f"no {', '.join(missing[:5])}",
                next_step="save the model again; training would start these from random numbers",
            )
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._check_shapes(folder, tensors)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _check_shapes(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        ours = {name: tuple(parameter.shape) for name, parameter in self.causal_lm.named_parameters()}
        theirs = {name: tuple(tensors[name].shape) for name in ours if name in tensors}
        wrong = [name for name, shape in ours.items() if theirs.get(name) != shape]
        if wrong:
            name = wrong[0]
            raise Mismatch(
                "the weights do not fit the model that this trainer was started with",
                where=str(folder),
                why=f"{name} is {theirs.get(name, 'absent')} there and {ours[name]} here",
                next_step="start a stack with this model, or choose weights of the same shapes",
            )


def repeated_layers(causal_lm: PreTrainedModel | ValueBody) -> list[nn.Module]:
    """Return the repeated blocks of a model that is not sharded yet."""
    blocks = set(causal_lm._no_split_modules or ())
    return [module for module in causal_lm.modules() if type(module).__name__ in blocks]
