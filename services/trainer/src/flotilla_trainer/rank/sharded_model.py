"""A model whose parameters are spread over the ranks, and the ways of whole tensors in and out of it.

Invariants: parameters and optimizer state are float32 whatever the forward pass computes in; gradients are reduced in
float32 and as sums, never as means; every rank walks the parameters in the same order, because each step is a
collective; names are those of the checkpoint, without tied duplicates. A frozen model has no gradients, and its
weights are kept in the type that they are computed with: what learns are adapters beside them; two bases of one model
get the same number only where all of their parameters are equal, on any device and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PreTrainedModel

from flotilla_core.errors import FailedPrecondition, FlotillaError, Mismatch
from flotilla_trainer.rank.activation_offload import RecomputedLayers
from flotilla_trainer.rank.body_model import ValueBody
from flotilla_trainer.rank.compiled_layers import CompiledLayers
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.mesh import RankMesh
from flotilla_trainer.rank.model_checks import packing_refusal
from flotilla_trainer.rank.peft_folder import read_adapters
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.sequence_parallel import SequenceParallel
from flotilla_trainer.rank.value_model import ValueModel
from flotilla_trainer.wire.settings import LoraSettings
from flotilla_weights.digest import pending_digest, tensor_digest

HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class BaseDigest:
    """Which weights lie under adapters: told apart by all of their bytes.

    The number of a base, from its parameters as they pass by one after the other, where they are.
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, whole: torch.Tensor) -> None:
        """The next parameter, in full; on a GPU the work is only queued."""
        self._parts.append(pending_digest(whole))

    @property
    def number(self) -> int:
        """For all parameters so far; 0 for none."""
        # One bit less than the digest has: it travels as a signed number.
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
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.frozen = frozen
        self.base = 0
        """Digest of the weights, where they are frozen."""
        self.adapters: Adapters | None = None
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            causal_lm = kind.skeleton(config, torch.float32)
        if frozen:
            # Before the shards are cut: they never ask again which parameters have gradients.
            causal_lm.requires_grad_(False)
            for parameter in causal_lm.parameters():
                parameter.data = parameter.data.to(dtype)
        lane = SequenceParallel(mesh.lane, mesh.place, mesh.width) if mesh.width > 1 else None
        # Of the kind that `kind` takes, whichever it is: its own skeleton.
        self.policy = kind(cast(Any, causal_lm), lane)
        self.compiled_layers = CompiledLayers(self._layers(causal_lm))
        self.recomputed_layers = RecomputedLayers(self._layers(causal_lm))
        self._shard(causal_lm)
        self.policy.to_empty(device=device)

    @property
    def causal_lm(self) -> PreTrainedModel | ValueBody:
        """The transformers model inside; a critic's has a head of one number."""
        return self.policy.causal_lm

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        return list(self.causal_lm.parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """What an optimizer may change, by name: all parameters, or the adapters of a frozen model."""
        if self.frozen:
            return self.adapters.named_parameters() if self.adapters is not None else {}
        return dict(self.causal_lm.named_parameters())

    def adapt(self, settings: LoraSettings | None, seed: int) -> None:
        """Begin with new adapters, or with none, in place of those before."""
        if self.adapters is not None:
            self.adapters.remove()
            self.adapters = None
        if settings is None:
            return
        assert isinstance(self.causal_lm, PreTrainedModel), "the front lets policies alone have adapters"
        adapters = Adapters(self.causal_lm, settings, seed, self.device)
        try:
            if settings.adapter:
                adapters.set(read_adapters(Path(settings.adapter), adapters))
        except FlotillaError:
            adapters.remove()
            raise
        self.adapters = adapters

    def load(self, folder: Path) -> None:
        """Replace all weights by those of a folder that has the same shapes; rank 0 reads it."""
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
                # Rank 0 has the numbers; the others give a place of the same shape for theirs.
                whole = (
                    source[name].to(self.device)
                    if source
                    else torch.empty(parameter.shape, device=self.device)
                )
                if self.frozen and source:
                    base.add(whole)
                assert isinstance(parameter, DTensor), "all of them are cut into shards"
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
            for name, buffer in self.causal_lm.named_buffers():
                if source:
                    buffer.copy_(source[name])
                dist.broadcast(buffer, 0)
        if self.frozen:
            number = torch.tensor(base.number, device=self.device)
            dist.broadcast(number, 0)
            self.base = int(number)

    def agree(self, failure: FlotillaError | None) -> None:
        """All ranks go on, or none does."""
        failed = torch.tensor(int(failure is not None), device=self.device)
        dist.all_reduce(failed)
        if failed.item():
            raise failure or FailedPrecondition("another rank could not load the model")

    def check_head(self) -> None:
        """Refuse an architecture whose logits are not its head on its last hidden states; values have our own head."""
        if not isinstance(self.policy, PolicyModel):
            return
        tokens = torch.arange(4, device=self.device)[None] % self.causal_lm.config.vocab_size
        with torch.no_grad():
            error = float(self.policy.head_error(tokens))
        if not error <= HEAD_TOLERANCE[self.dtype]:
            raise FailedPrecondition(
                f"{type(self.causal_lm).__name__} cannot be trained",
                why=f"its logits differ by {error:.3g} from its head applied to its last hidden states",
                next_step="use a model whose head is one linear layer",
            )

    def packing_facts(self) -> dict[str, Any]:
        """Why rows cannot be packed, if so, and the length at which attention costs as much as all the rest."""
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
        """Name, type and whole shape of every tensor of the checkpoint, with weights stored as `dtype`."""
        return [
            (name, dtype if tensor.is_floating_point() else tensor.dtype, tensor.shape)
            for name, tensor in self._checkpoint().items()
        ]

    def whole_tensors(self, order: Iterable[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint in full, one after the other; all ranks have to walk to the end."""
        tensors = self._checkpoint()
        for name in order:
            whole = gathered(tensors[name])
            yield name, whole.to(dtype) if whole.is_floating_point() else whole

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        """Parameters, each once, and the buffers that are saved with them."""
        saved = self.causal_lm.state_dict().keys()
        parameters = {name: parameter.detach() for name, parameter in self.causal_lm.named_parameters()}
        return parameters | {n: buffer for n, buffer in self.causal_lm.named_buffers() if n in saved}

    @staticmethod
    def _layers(causal_lm: PreTrainedModel | ValueBody) -> list[nn.Module]:
        """The repeated blocks of the model."""
        blocks = set(causal_lm._no_split_modules or ())
        return [module for module in causal_lm.modules() if type(module).__name__ in blocks]

    def _shard(self, causal_lm: PreTrainedModel | ValueBody) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for layer in self._layers(causal_lm):
            fully_shard(layer, mesh=self.mesh.weights, mp_policy=policy)
        for part in self.policy.in_float32():
            fully_shard(
                part, mesh=self.mesh.weights, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)
            )
        # By default the root stays whole after a forward pass without a backward one, and then the parameters that
        # the optimizer, the loader and the publisher find are copies that nobody keeps.
        fully_shard(self.policy, mesh=self.mesh.weights, mp_policy=policy, reshard_after_forward=True)
        for method in ("head_error", "packing_errors", "lane_error", "hidden_states"):
            if hasattr(self.policy, method):
                register_fsdp_forward_method(self.policy, method)
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """All parameters and buffers of the folder, whole, in float32, on the host."""
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


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
