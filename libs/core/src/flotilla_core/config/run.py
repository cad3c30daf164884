"""`run.yaml`: one training run, the same for every fleet.

Names carry units. Nothing has to divide anything: accumulation, packing and data-parallel shares are derived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flotilla_core.config.advantages import GdpoAdvantage
from flotilla_core.config.algorithm import AlgorithmConfig, PolicyConfig
from flotilla_core.config.data import DataConfig
from flotilla_core.config.lora import LoraConfig
from flotilla_core.config.model import ConfigModel
from flotilla_core.config.optimizer import OptimizerConfig
from flotilla_core.config.preferences import DpoConfig, RewardModelConfig
from flotilla_core.config.user_function import function_path


class SamplingConfig(ConfigModel):
    """How responses are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 is refused for training rollouts: the trainer could not reproduce the logprobs."""
    top_k: int = Field(default=0, ge=0)
    """0 is off; above 0 is refused for training rollouts."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Longest response."""
    min_response_tokens: int = Field(default=0, ge=0)
    """No end of sequence before so many tokens."""


class DynamicSamplingConfig(ConfigModel):
    """Groups whose rewards are all equal are left out, and other prompts are drawn in their place."""

    max_prompts_per_step: int | None = Field(default=None, ge=1)
    """Prompts drawn for one step at most; with fewer groups that teach the batch is smaller. Empty takes four times
    rollout.prompts_per_step."""


class RolloutConfig(ConfigModel):
    """What one step generates."""

    prompts_per_step: int = Field(default=64, ge=1)
    """Groups of a batch; prompts drawn for a step where nothing below draws more."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Size of a group."""
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Updates between the oldest token of a sample and the update that trains it. 0: samples come from the version that
    they train; k: generation runs up to k steps ahead of training."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    sample_timeout_s: float = Field(default=300.0, gt=0)
    """A group that is not done after so long is issued again; one that is admitted n steps ahead has n times longer."""
    max_attempts: int = Field(default=5, ge=1)
    """Times that a sample is issued before the run fails, naming the generators' last error."""
    resume_partial: bool = False
    """A sample that a generator gives up part-way (it drains, or a sync broke it) goes on elsewhere after the tokens
    that it has; otherwise it begins anew."""
    max_reward_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's samples that may end as reward error or timeout; above it the run fails."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train only groups that teach; absent: every group is trained."""
    over_issue: float = Field(default=0.0, ge=0, le=1)
    """So many more groups are under way than a batch needs, as a share of it; it is made of the first that end, and the
    others count for the next step where `max_staleness` lets them, or are given up."""

    @model_validator(mode="after")
    def _replaces_what_can_be_judged(self) -> RolloutConfig:
        if self.dynamic_sampling is None:
            return self
        limit = self.dynamic_sampling.max_prompts_per_step
        if limit is not None and limit < self.prompts_per_step:
            raise ValueError(
                f"dynamic_sampling.max_prompts_per_step is {limit}, less than prompts_per_step = "
                f"{self.prompts_per_step}: no batch could be full"
            )
        if self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling compares the rewards of a group, and samples_per_prompt is 1: "
                "set it to 2 or more (8 is usual)"
            )
        return self

    @property
    def longest_sample_s(self) -> float:
        """The limit of a group that is admitted as early as it may be."""
        return self.sample_timeout_s * (1 + self.max_staleness)


class RewardTermConfig(ConfigModel):
    """One term of the weighted sum."""

    reward: str
    """Built-in name, entry point, or path.py:function."""
    weight: float = 1.0
    """Factor of this term."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Limit for one sample; then it counts as a timeout, never as a score."""

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"reward": function_path(self.reward, directory)})


class BatchingConfig(ConfigModel):
    """How an update is cut for memory. Never changes the result."""

    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens of one forward pass on one rank, padding included."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Sequences one after the other in one row, without padding; `auto`: on GPUs, where the model allows it."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the layers and compute the rest again backward: less memory, a third more work."""
    activation_offload: bool = False
    """With `activation_checkpointing`: these inputs lie in host memory until the backward pass (GPU only)."""
    logprob_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at one time."""

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> BatchingConfig:
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError(
                "batching.activation_offload moves the inputs that activation_checkpointing keeps: set both to true"
            )
        return self


class EvaluationConfig(ConfigModel):
    """Evaluation on held-out prompts or pairs; before, during and after."""

    data: Path
    """JSONL file with the same columns as the training data."""
    every_steps: int = Field(default=0, ge=0)
    """0: only before and after."""
    max_prompts: int = Field(default=500, ge=1)
    """Prompts taken from the file."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Empty takes the rollout's limit."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers drawn for each prompt; above 1 `eval/mean@n` and `eval/pass@k` are measured as well."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy, of which more than one answer would all be equal."""
    pinned: bool = False
    """Evaluate beside the training that follows: of two generators or more one keeps the version until it is done."""

    @model_validator(mode="after")
    def _answers_differ(self) -> EvaluationConfig:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but greedy answers to one prompt are all equal: "
                "set temperature above 0 (1.0 is that of the rollouts), or samples_per_prompt to 1"
            )
        return self


class StopConfig(ConfigModel):
    """End early on an evaluation."""

    accuracy_at_least: float
    """Stop at the first evaluation that reaches it."""
    accuracy_at_most: float | None = None
    """The run fails when the evaluation that stopped it is above."""


class CanaryConfig(ConfigModel):
    """Trainer against generator logprobs on the same tokens after every sync."""

    prompts: int = Field(default=8, ge=0)
    """0 is off."""
    tokens: int = Field(default=16, ge=1)
    """Tokens generated for each prompt."""
    temperatures: tuple[float, ...] = (1.0,)
    """One pass for each."""
    warn_at: float = Field(default=0.005, gt=0)
    """Mean difference that raises a warning."""
    fail_at: float = Field(default=0.01, gt=0)
    """Mean difference that fails the run: the generator does not hold the trainer's weights."""


class WeightSyncConfig(ConfigModel):
    """How new weights reach the generators."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` takes nccl where trainer and generators have GPUs."""
    bucket_mib: int = Field(default=32, ge=1)
    """Size of one broadcast."""
    update: Literal["in_flight", "between_samples"] = "in_flight"
    """Running samples go on under new weights, and say from which token on; or each replica lets them end first, while
    it begins none."""
    kv_policy: Literal["recompute", "reuse", "drain"] = "recompute"
    """KV cache of running samples at a commit: computed again (exact), or kept as older weights made it; `drain` is
    what `update: between_samples` does."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for one member in one sync; then it is evicted and the others go on."""
    canary: CanaryConfig = CanaryConfig()
    """The live check."""


class CheckpointConfig(ConfigModel):
    """Sealed states of the run that it, or a later one, goes on from."""

    every_steps: int = Field(default=20, ge=0)
    """Steps between two; a lost trainer repeats at most so many updates, on recorded samples. 0: none is made."""
    keep: int = Field(default=2, ge=1)
    """Newest ones that stay; the one before is used where the newest is damaged."""


class RunConfig(ConfigModel):
    """A whole run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    """Names the run; the id adds date and random digits."""
    seed: int = Field(default=0, ge=0)
    """Every other seed derives from it."""
    steps: int = Field(ge=1)
    """Steps of the loop; one optimizer update each."""
    loop: Literal["coordinator", "client"] = "coordinator"
    """Who makes the steps: the coordinator by itself, or a client of yours, call by call, any number of them."""
    loop_idle_timeout_s: float = Field(default=1800.0, gt=0)
    """With `loop: client`: after so long without a call the run saves its state and stops, and frees the fleet."""
    resume: Literal["automatic", "by_user"] = "automatic"
    """After the death of the coordinator: `automatic` goes on as soon as it is back, `by_user` waits for
    `flotilla run resume`, as every run with `loop: client` does."""
    initial_weights: Path | None = None
    """Hugging Face folder to start from; empty takes the stack's model."""
    lora: LoraConfig | None = None
    """Train adapters beside weights that stay; empty trains all weights."""
    data: DataConfig
    """Training prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation; `sft`, `dpo` and `reward_model` use `prompts_per_step` alone, as answers or pairs a step."""
    rewards: tuple[RewardTermConfig, ...] = ()
    """Weighted sum; evaluation uses the same terms."""
    algorithm: AlgorithmConfig = PolicyConfig()
    """What is optimised."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    batching: BatchingConfig = BatchingConfig()
    """Memory, never the result."""
    evaluation: EvaluationConfig | None = None
    """Held-out accuracy: share of answers whose reward total is at least 1; of pairs that are ranked right where the
    run learns from pairs and names no rewards."""
    stop: StopConfig | None = None
    """End early."""
    weights: WeightSyncConfig = WeightSyncConfig()
    """Weight synchronisation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How often the state is kept, and how many times over; the end of a run is kept as well."""
    export_final: bool = True
    """Write the final policy as a Hugging Face folder into the run directory."""

    @property
    def learns_from_pairs(self) -> bool:
        """Whether every prompt comes with an answer that is preferred and one that is not."""
        return isinstance(self.algorithm, DpoConfig | RewardModelConfig)

    @property
    def trains_reward_model(self) -> bool:
        """Whether what learns gives rewards, and generates nothing."""
        return isinstance(self.algorithm, RewardModelConfig)

    @property
    def learns_by_rewards(self) -> bool:
        """Whether samples teach nothing where their rewards are equal."""
        return isinstance(self.algorithm, PolicyConfig) and self.algorithm.needs_rewards

    @property
    def evaluates_pairs(self) -> bool:
        """Whether an evaluation asks how many held-out pairs are ranked right, and generates nothing."""
        return self.evaluation is not None and self.learns_from_pairs and not self.rewards

    @model_validator(mode="after")
    def _has_groups_for_its_steps(self) -> RunConfig:
        steps, groups = self.optimizer.steps_per_update, self.rollout.prompts_per_step
        if steps > groups:
            raise ValueError(
                f"optimizer.steps_per_update is {steps}, but an update has {groups} groups and none is divided: "
                f"set it to {groups} or less, or raise rollout.prompts_per_step"
            )
        if self.learns_from_pairs and self.optimizer.steps_of_an_update > 1:
            raise ValueError(
                f"optimizer.steps_per_update and epochs_per_update are not for {self.algorithm.type}, whose gradients "
                "come from scores before the update: leave both at 1 and take smaller updates"
            )
        return self

    @model_validator(mode="after")
    def _asks_a_reward_model_for_no_text(self) -> RunConfig:
        wrong = {
            "rewards": (self.rewards, "it writes no answers that they could judge; evaluation ranks pairs"),
            "lora": (self.lora, "adapters are trained beside a language model alone"),
            "loop: client": (
                self.loop == "client",
                "a client samples, and no generator can hold its weights",
            ),
        }
        for key, (is_set, why) in wrong.items():
            if self.trains_reward_model and is_set:
                raise ValueError(f"{key} is not for algorithm.type reward_model: {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _learns_without_what_a_client_does_not_ask(self) -> RunConfig:
        if self.loop != "client" or not isinstance(self.algorithm, PolicyConfig):
            return self
        asked = list(self.algorithm.gangs_beside_the_policy)
        if self.algorithm.advantage.needs_greedy_reward:
            asked.append("greedy responses")
        if asked:
            raise ValueError(
                f"loop is client, which asks no {' and no '.join(asked)}: "
                "send advantages of your own, or leave the steps to the coordinator"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if isinstance(self.algorithm, PolicyConfig):
            name, least = self.algorithm.type, self.algorithm.advantage.min_group_samples
            if self.rollout.samples_per_prompt < least:
                raise ValueError(
                    f"rollout.samples_per_prompt is {self.rollout.samples_per_prompt}, but {name} compares the "
                    f"samples of one prompt with each other: set it to {least} or more (8 is usual), "
                    "or take an advantage that compares over the whole batch"
                )
            advantage = self.algorithm.advantage
            weights = advantage.weights if isinstance(advantage, GdpoAdvantage) else ()
            if weights and len(weights) != len(self.rewards):
                raise ValueError(
                    f"algorithm.advantage.weights has {len(weights)} numbers, rewards has {len(self.rewards)} terms: "
                    "write one for each, or none to take their own"
                )
            if not self.rewards and self.algorithm.needs_rewards:
                raise ValueError(f"rewards is empty: {name} needs at least one reward term")
            if self.rollout.dynamic_sampling is not None and not self.algorithm.needs_rewards:
                raise ValueError(
                    f"rollout.dynamic_sampling leaves out groups of equal rewards, and {name} learns without rewards: "
                    "leave it out"
                )
            if self.rollout.sampling.temperature == 0:
                raise ValueError("rollout.sampling.temperature is 0: greedy samples of a group are all equal")
            if self.rollout.sampling.top_p < 1 or self.rollout.sampling.top_k > 0:
                raise ValueError(
                    "rollout.sampling.top_p below 1 or top_k above 0 changes the logprobs in a way that the "
                    "trainer cannot reproduce: leave them at 1 and 0 for training rollouts"
                )
        if self.rollout.resume_partial and self.weights.update == "between_samples":
            raise ValueError(
                "rollout.resume_partial goes on with samples under newer weights, which weights.update between_samples "
                "rules out: leave one of them at its default"
            )
        if self.stop is not None and (self.evaluation is None or self.evaluation.every_steps == 0):
            raise ValueError("stop needs evaluation.every_steps above 0")
        if self.evaluates_pairs and self.evaluation is not None and self.evaluation.temperature > 0:
            raise ValueError(
                "evaluation.temperature is above 0, but pairs are ranked and nothing is generated: "
                "leave it out, or name rewards"
            )
        if self.evaluation is not None and not self.rewards and not self.learns_from_pairs:
            raise ValueError("evaluation needs at least one reward term")
        return self
