"""The training of a model and the transfer of its weights: optimizer, batching, LoRA, checkpoints and weight sync.

Also the models that learn or score beside the policy: the critic, and the teachers that a run learns from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, model_validator

from flotilla_core.config.model import AgreementLimit, ConfigModel, FolderOrUrl, GangName, checked_url
from flotilla_core.roles import MOST_NAMED, TEACHER, teacher_role

MomentDecay = Annotated[float, Field(ge=0, lt=1)]

UNCHOSEN_MICROBATCH_TOKENS = 8192


class OptimizerConfig(ConfigModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_updates: int = Field(default=0, ge=0, le=10_000_000)
    """Updates of linear warm-up."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.999)
    """Moment decays."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e9)
    """Limit on the global gradient norm; 0 is off."""
    max_skipped_updates: int = Field(default=3, ge=1, le=10_000_000)
    """The run fails after this many non-finite updates in a row."""
    steps_per_update: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps of one pass over an update, each on a mini-batch of whole groups with its own mean."""
    epochs_per_update: int = Field(default=1, ge=1, le=1000)
    """Passes over the samples of an update. The schedule counts updates, not optimizer steps."""
    offload: bool = False
    """Keep AdamW's moments in host memory between updates: frees 8 bytes per parameter on the GPUs, costs transfers."""

    @property
    def steps_of_an_update(self) -> int:
        """The optimizer steps of an update, over all passes."""
        return self.steps_per_update * self.epochs_per_update


class BatchingConfig(ConfigModel):
    """Section `batching` of `run.yaml`: memory, never the result.

    It divides an update to fit into memory, and never changes the result.
    """

    tokens_per_microbatch: Literal["auto"] | Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = "auto"
    """Tokens of one forward pass on one rank, padding included; `auto`: what a GPU has memory for, else 8192."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Join sequences in one row, without padding; `auto`: on GPUs, if the model allows it."""
    activation_checkpointing: Literal["auto", "selective"] | StrictBool = "auto"
    """`true`: layers keep their inputs and recompute the rest in the backward pass, 1/3 more work; `selective`: they
    keep narrow products and attention too, 1/6 more; `auto`: the least that the memory of a GPU demands."""
    activation_offload: bool = False
    """Move the inputs that `activation_checkpointing` keeps to host memory until the backward pass (GPU only)."""
    logprob_chunk_tokens: int = Field(default=2048, ge=1, le=10_000_000)
    """Tokens whose logits exist at the same time; kernels on GPUs take four times as many, in the same memory."""

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> BatchingConfig:
        if self.activation_offload and not self.recomputes_layers:
            raise ValueError(
                "batching.activation_offload moves the inputs that activation_checkpointing keeps: set both to true"
            )
        return self

    @property
    def microbatch_budget(self) -> int:
        """The tokens of a micro-batch; where nobody has chosen them, so many that small GPUs have memory for them."""
        tokens = self.tokens_per_microbatch
        return UNCHOSEN_MICROBATCH_TOKENS if tokens == "auto" else tokens

    @property
    def recomputes_layers(self) -> bool:
        """True where layers keep their inputs alone."""
        return self.activation_checkpointing is True

    @property
    def recomputes_wide_parts(self) -> bool:
        """True where layers keep what is dear to compute as well."""
        return self.activation_checkpointing == "selective"


class LoraConfig(ConfigModel):
    """`lora` of run.yaml: only small matrices in addition to the weights learn, the weights stay frozen.

    Low-rank adapters: a linear layer W becomes W + alpha / rank * B A, and only B and A learn.
    """

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Weight of the adapters, as `lora_alpha` in peft."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(max_length=1000)] = "all-linear"
    """Linear layers by the end of their names, as q_proj; `all-linear`: every one except the head."""
    adapter: Path | None = None
    """Folder in peft's layout to continue from, of the same rank, alpha and targets; empty: B starts at zero."""


def _empty_or_url(place: str) -> str:
    return checked_url(place) if place else place


class CheckpointConfig(ConfigModel):
    """Section `checkpoint` of `run.yaml`: the saved states from which a run can continue.

    A sealed state serves the run itself or a later one.
    """

    every_steps: int = Field(default=20, ge=0, le=10_000_000)
    """Steps between two checkpoints; after the loss of a trainer the updates since the newest are repeated on recorded
    samples. 0 makes no checkpoints."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest checkpoints that are kept; the one before is used if the newest is damaged."""
    best_by: str = Field(default="", max_length=256)
    """Metric of the evaluations, such as `eval/accuracy` or `eval/<set>/reward_mean`: the checkpoint where it is
    highest stays beside the newest, and an evaluation that finds a new best is saved. Empty keeps the newest alone."""
    copy_to: Annotated[str, AfterValidator(_empty_or_url)] = ""
    """Place in object storage, such as s3://bucket/runs, to which each checkpoint is copied while training continues;
    `flotilla run resume <copy_to>/<run>` continues from there on any host. Empty copies none."""


class CanaryConfig(ConfigModel):
    """Comparison of trainer and generator logprobs on the same tokens after every sync."""

    prompts: int = Field(default=8, ge=0, le=10_000)
    """Number of prompts; 0 is off."""
    tokens: int = Field(default=32, ge=1, le=100_000)
    """Tokens generated for each prompt."""
    temperatures: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(default=(1.0,), max_length=16)
    """Sampling temperatures, one pass for each."""
    warn_at: AgreementLimit = "auto"
    """Mean difference over all answers that raises a warning in two checks in a row; `auto` is what rounding explains,
    as a bfloat16 trainer measures it against float32."""
    fail_at: AgreementLimit = "auto"
    """Mean difference over all answers of one generator that evicts it, after a second look: it decodes with other
    weights. The run fails where no other generator is left. `auto` as for `warn_at`."""


AUTO_BUCKET_MIB = {"gloo": 32, "nccl": 512}


def bucket_size_mib(setting: int | Literal["auto"], backend: str) -> int:
    """Return the largest size of one broadcast by this backend."""
    return AUTO_BUCKET_MIB[backend] if setting == "auto" else setting


class WeightSyncConfig(ConfigModel):
    """The transfer of new weights to the generators."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` takes nccl if trainer and generators have GPUs."""
    bucket_mib: Annotated[int, Field(ge=1, le=65_536, strict=True)] | Literal["auto"] = "auto"
    """Largest size of one broadcast; `auto` is 512 with nccl and 32 with gloo. Above 256, a model moves in four at
    least."""
    update: Literal["in_flight", "between_samples"] = "in_flight"
    """Running samples continue under new weights and record from which token on; or each replica finishes its running
    samples first, and starts none meanwhile."""
    kv_policy: Literal["auto", "recompute", "reuse", "drain"] = "auto"
    """KV cache of running samples at a commit: recomputed (exact), or kept as older weights made it; `drain` is
    what `update: between_samples` does. `auto` keeps it where `rollout.max_staleness` is above 0."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Longest wait for one member in one sync; then it is evicted and the others continue."""
    canary: CanaryConfig = Field(default_factory=CanaryConfig)
    """The check of generator against trainer after every sync."""


TOP_BYTES = 4 + 4
"""Size of one token of a teacher at one position: its id and its log-probability."""
MOST_SAMPLE_BYTES = 48 << 20
"""Limit on all scores of a teacher for one sample, which travel in one message."""


class AskedTeachers(ConfigModel):
    """The keys of a section that needs teachers."""

    asked_by: ClassVar[str] = "advantage"
    """The section that names the teachers, for messages."""

    teachers: dict[GangName, Annotated[float, Field(gt=0, le=1e6)]] = Field(default={}, max_length=MOST_NAMED)
    """Weights by the names in the stack's `teachers`; every sample is compared with the weighted mean of their
    log-probabilities. Empty: the stack's `teacher` alone."""
    teacher_field: str | None = None
    """Column of the data that names which of `teachers` scores the samples of a prompt; empty: all score all."""

    @property
    def teacher_shares(self) -> dict[str, float]:
        """The weights by role, scaled to the sum 1."""
        total = sum(self.teachers.values())
        return {teacher_role(name): weight / total for name, weight in self.teachers.items()} or {
            TEACHER: 1.0
        }

    @property
    def averages_teachers(self) -> bool:
        """Return whether each sample is scored by several teachers."""
        return self.teacher_field is None and len(self.teachers) > 1

    @model_validator(mode="after")
    def _chooses_among_equals(self) -> Self:
        field, teachers = f"{self.asked_by}.teacher_field", f"{self.asked_by}.teachers"
        if self.teacher_field is None:
            return self
        if len(self.teachers) < 2:
            raise ValueError(
                f"{field} chooses among {teachers}, which names {len(self.teachers) or 'none'}: name two or more "
                "there, or leave it out"
            )
        if len(set(self.teachers.values())) > 1:
            raise ValueError(
                f"{field} gives each prompt one teacher, and the weights of {teachers} differ, which would change "
                "nothing: write the same weight for each, or leave it out"
            )
        return self


class TeacherConfig(AskedTeachers):
    """The divergence from a teacher over the tokens that it finds likeliest, as a term of the loss."""

    asked_by: ClassVar[str] = "teacher"

    top_k: int = Field(default=64, ge=1, le=1024)
    """Tokens of the teacher at each position; a smaller vocabulary is reported whole."""
    divergence: Literal["forward", "reverse"] = "forward"
    """Direction, with q the teacher and p the policy: the sum of q (log q - log p), or of p (log p - log q)."""
    coefficient: float = Field(default=1.0, gt=0, le=1000)
    """Factor of the divergence."""
    tail: bool = True
    """Count all other tokens together as one more, so that the sum is a divergence and never negative."""

    @property
    def bytes_per_token(self) -> int:
        """The size of a teacher's scores for one response token."""
        return self.top_k * TOP_BYTES


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, separate from the policy's."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate; a critic usually learns faster than its policy."""


class CriticConfig(ConfigModel):
    """A model that learns the expected reward, which advantages are measured against."""

    optimizer: CriticOptimizerConfig = Field(default_factory=CriticOptimizerConfig)
    """AdamW of the critic."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """A value that moves further than this from the one that the advantages used gains nothing by it; empty is off."""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """Number of first steps in which only the critic learns."""
    initial_weights: FolderOrUrl | None = None
    """Folder, or s3://bucket/prefix, with a model of the critic's shape, with or without a value head; empty:
    critic.model of the stack or, if that is empty too, the weights that the policy starts from."""
