"""`run.yaml`: one training run, the same for every fleet.

Names carry units. No value needs to divide another: accumulation, packing and data-parallel shares are derived.

Invariants: no key, token or password is part of a configuration, for it is saved with the run and shown. Those of
trackers come from the environment of the coordinator, or from a file that the configuration only names. What an episode
may take is bounded by the run, whatever its environment asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from flotilla_core.config.advantages import GdpoAdvantage, GigpoAdvantage
from flotilla_core.config.algorithm import AlgorithmConfig, DpoConfig, PolicyConfig, RewardModelConfig
from flotilla_core.config.data import (
    DataConfig,
    EvaluationConfig,
    RolloutConfig,
    StopConfig,
)
from flotilla_core.config.model import (
    ConfigModel,
    FolderOrUrl,
    Parameters,
    function_path,
    kind_of,
    possible_function,
)
from flotilla_core.config.rewards import RewardMode, RewardTermConfig, can_combine
from flotilla_core.config.training import (
    MOST_SAMPLE_BYTES,
    BatchingConfig,
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    WeightSyncConfig,
)
from flotilla_core.roles import REWARD_MODEL, named_role

DIRECT = "none"
"""The value of `proxy` that uses none, whatever the environment says."""
LIVE_KEYS = (
    "steps",
    "rollout.max_staleness",
    "optimizer.learning_rate",
    "evaluation.every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
)
"""The settings that an active run can take from its next step on."""
PATHS = {"harbor": "tasks", "search": "corpus"}
"""The built-in environments that read files of the user's, and the parameters that name these."""
SHORT = {"gymnasium": "id", "mcp": "url", "openenv": "url", "textarena": "id", **PATHS}
"""The parameters that the name of a built-in environment may hold, as `gymnasium:FrozenLake-v1` does."""
AGENT = "agent"
"""The built-in environment in which a program of the user's plays, `command` or `function` in `folder`."""
SECRETS = frozenset({"api_key", "key", "token", "password", "hf_token", "username"})
"""Names under which other programs take secrets."""


def _without_credentials(url: str) -> str:
    if "@" in urlsplit(url).netloc:
        raise ValueError(
            "the address carries credentials, and a configuration is saved: write them to a file of mode 0600 and "
            "name it in secrets_file"
        )
    return url


Address = Annotated[str, AfterValidator(_without_credentials)]
Proxy = Annotated[
    str, Field(pattern=r"^((https?|socks5h?)://.+|none)$"), AfterValidator(_without_credentials)
]


class TrackerConfig(ConfigModel):
    """The keys that every tracker has."""

    samples: int = Field(default=8, ge=0, le=1000)
    """Samples in each table, from the best reward to the worst; 0 sends none."""
    samples_every_steps: int = Field(default=10, ge=1, le=10_000_000)
    """Steps between two tables of samples."""


class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    type: Literal["tensorboard"] = "tensorboard"
    directory: Path | None = None
    """Folder that gets a folder for each run; empty takes the run directory."""


class HostedTrackerConfig(TrackerConfig):
    """The keys of trackers that may be reached over a network."""

    proxy: Proxy | None = None
    """Proxy of this tracker alone, http://host:port; `none` uses none, empty takes that of the environment."""
    secrets_file: Path | None = None
    """File (mode 0600) of NAME=value lines that this tracker alone gets as its environment: keys, a proxy with a
    password."""

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, values: Any) -> Any:
        for key in SECRETS & set(values) if isinstance(values, dict) else ():
            raise ValueError(
                f"{key} is no key of a configuration, which is saved: set it in the environment of `flotilla up`, or "
                "write it to a file of mode 0600 and name that in secrets_file"
            )
        return values


class WandbConfig(HostedTrackerConfig):
    """Weights & Biases; its key is WANDB_API_KEY."""

    type: Literal["wandb"] = "wandb"
    project: str = Field(default="flotilla", min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team; empty takes the default of the key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files into the run directory; `wandb sync` sends them later."""
    base_url: Address | None = None
    """Server of your own; empty takes the public one."""


class MlflowConfig(HostedTrackerConfig):
    """MLflow; its credentials are MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    type: Literal["mlflow"] = "mlflow"
    experiment: str = Field(default="flotilla", min_length=1)
    """Experiment of the run."""
    tracking_uri: Address | None = None
    """Server, or file:/folder without one; empty takes MLFLOW_TRACKING_URI, else a folder of the stack."""


class TrackioConfig(HostedTrackerConfig):
    """Trackio: a database on this host, or a Space, whose key is HF_TOKEN."""

    type: Literal["trackio"] = "trackio"
    project: str = Field(default="flotilla", min_length=1, pattern=r"^[A-Za-z0-9 _-]+$")
    """Project of the run."""
    directory: Path | None = None
    """Folder of the databases; empty takes TRACKIO_DIR, else trackio's own in the home folder."""
    space_id: str | None = None
    """Space that gets the run, owner/name; empty keeps it on this host."""


TrackerSection = Annotated[
    Annotated[TensorBoardConfig, Tag("tensorboard")]
    | Annotated[WandbConfig, Tag("wandb")]
    | Annotated[MlflowConfig, Tag("mlflow")]
    | Annotated[TrackioConfig, Tag("trackio")],
    Discriminator(kind_of),
]


def named_trackers(value: Any) -> Any:
    """Return the list with each bare name written as a section; one of a type at most."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    sections = [{"type": item} if isinstance(item, str) else item for item in value]
    kinds = [kind_of(section) for section in sections]
    for kind in kinds:
        if kind is not None and kinds.count(kind) > 1:
            raise ValueError(f"{kind} is named twice: a run shows itself once in each tracker")
    return sections


def spelled_out(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of an environment, and the parameter that it holds, if it does."""
    short, colon, value = name.partition(":")
    if colon and value and short in SHORT:
        return short, {SHORT[short]: value}
    return name, {}


class EnvironmentConfig(ConfigModel):
    """The environment that answers the policy; each sample is an episode of several turns."""

    name: Annotated[str, AfterValidator(possible_function)] = Field(min_length=1)
    """Built-in name, entry point, or path.py:Class. With one parameter: `gymnasium:ID`, `textarena:ID`, `openenv:URL`,
    `mcp:URL`, `harbor:FOLDER`, `search:CORPUS`."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the environment by keyword. A relative `corpus` of `search`, `tasks` of `harbor` or `folder` of `agent`
    starts at the folder of the command."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Limit of the turns of an episode; then the environment gives its rewards for what there is. A turn has at most
    `rollout.sampling.max_response_tokens`."""
    episode_tokens: int = Field(default=4096, ge=2, le=10_000_000)
    """Limit of the tokens of one history: prompt, turns, and what the environment says between them. Where no room is
    left, the environment gives its rewards for what there is."""
    episode_timeout_s: float = Field(default=600.0, gt=0, le=604_800)
    """Limit of the time that the environment takes in one episode, all its answers together and waits for a worker or a
    processor aside; where it takes longer the episode has no reward and is not trained."""
    call_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time limit of one answer of the environment; one that takes longer has failed."""
    trusted: bool = False
    """Run an environment of yours outside of the jail, as the environment service itself: with its files, its network
    and its variables."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(name := given.get("name"), str):
            return given
        name, own = spelled_out(name)
        parameters = given.get("parameters") or {}
        if isinstance(parameters, dict) and (twice := own.keys() & parameters):
            raise ValueError(f"{min(twice)} is named twice: in name and in parameters")
        return given | {"name": name} | ({"parameters": parameters | own} if own else {})

    def with_paths_from(self, directory: Path) -> Self:
        given, key = self.parameters, PATHS.get(self.name, "")
        if isinstance(path := given.get(key), str):
            given = given | {key: str(directory / os.path.expanduser(path))}
        if self.name == AGENT and isinstance(folder := given.get("folder", "."), str):
            given = given | {"folder": os.path.normpath(directory / os.path.expanduser(folder))}
        return self.model_copy(update={"name": function_path(self.name, directory), "parameters": given})


class RunConfig(ConfigModel):
    """One training run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    """Names the run; the id adds date and random digits."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Every other seed is derived from it."""
    steps: int = Field(ge=1, le=10_000_000)
    """Steps of the loop, with one optimizer update each."""
    loop: Literal["coordinator", "client"] = "coordinator"
    """Driver of the steps: the coordinator by itself, or a client of yours, call by call and any number of them."""
    loop_idle_timeout_s: float = Field(default=1800.0, gt=0, le=2_592_000)
    """Longest time without a call with `loop: client`; then the run saves its state, stops and frees the fleet."""
    resume: Literal["automatic", "by_user"] = "automatic"
    """Continuation after the death of the coordinator: `automatic` continues as soon as it is back, `by_user` waits for
    `flotilla run resume`, as every run with `loop: client` does."""
    initial_weights: FolderOrUrl | None = None
    """Hugging Face folder, or s3://bucket/prefix, to start from; empty takes the stack's model."""
    lora: LoraConfig | None = None
    """Train adapters and keep the weights frozen; empty trains all weights."""
    data: DataConfig
    """Training prompts."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Generation; `sft`, `dpo` and `reward_model` use `prompts_per_step` alone, as answers or pairs per step."""
    environment: EnvironmentConfig | None = None
    """Environment that the policy acts in; absent: a sample is one prompt and one response."""
    rewards: tuple[RewardTermConfig, ...] = Field(default=(), max_length=64)
    """The terms of a sample's reward; evaluation uses the same, unless a held-out set names its own. Of an episode they
    judge the last turn, and the rewards of its environment are added."""
    reward_mode: RewardMode = "weighted"
    """Combination of weight x value of the terms: their sum (`weighted`), their sum or 0 where a term is below its
    `gate_at` (`gated`), the smallest (`min`), the largest (`max`), their product, or the first that is not 0."""
    algorithm: AlgorithmConfig = Field(default_factory=PolicyConfig)
    """The objective."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Learning rate, its schedule, and the optimizer steps of an update."""
    batching: BatchingConfig = Field(default_factory=BatchingConfig)
    """Division of an update for memory; never changes the result."""
    evaluation: EvaluationConfig | None = None
    """Held-out mean reward, and accuracy: the share of answers whose total reward is at least `success_at`; or of pairs
    ranked correctly, if the run learns from pairs and names no rewards."""
    stop: StopConfig | None = None
    """Stop early on an evaluation."""
    weights: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Weight synchronisation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Interval of the saves of the state, and number of saved states that are kept; the end of a run is saved too."""
    export_final: bool = True
    """Write the final policy as a Hugging Face folder into the run directory."""
    export_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the exported weights; `auto` takes the one that the trainer computes in (`trainer.dtype` of the stack).
    """
    trackers: Annotated[tuple[TrackerSection, ...], BeforeValidator(named_trackers)] = Field(
        default=(), max_length=16
    )
    """Trackers of the run's metrics beside its own files: names (`[tensorboard, wandb]`), or sections with keys."""

    @property
    def all_rewards(self) -> tuple[RewardTermConfig, ...]:
        """The terms by which its samples and its held-out answers are scored."""
        held_out = () if self.evaluation is None else self.evaluation.sets_of_data
        return (*self.rewards, *(term for one in held_out for term in one.rewards))

    @property
    def reward_models(self) -> list[str]:
        """The names of the reward models that it asks, each once."""
        return [*dict.fromkeys(term.model.model for term in self.all_rewards if term.model is not None)]

    @property
    def gangs_beside_the_policy(self) -> list[str]:
        """The roles for which the run needs a gang in addition to the policy's."""
        learning = self.algorithm.gangs_beside_the_policy if isinstance(self.algorithm, PolicyConfig) else []
        return [*learning, *(named_role(REWARD_MODEL, name) for name in self.reward_models)]

    @property
    def most_sample_tokens(self) -> int:
        """Return the most tokens of a sample: of a response, or of a whole episode."""
        if self.environment is None:
            return self.rollout.sampling.max_response_tokens
        return self.environment.episode_tokens

    @property
    def is_rewarded(self) -> bool:
        """Return whether its samples earn rewards, by terms or by their environment."""
        return bool(self.rewards) or self.environment is not None

    @property
    def learns_from_pairs(self) -> bool:
        """Return whether every prompt comes with a preferred answer and another one."""
        return isinstance(self.algorithm, DpoConfig | RewardModelConfig)

    @property
    def trains_reward_model(self) -> bool:
        """Return whether the trained model gives rewards, and generates nothing."""
        return isinstance(self.algorithm, RewardModelConfig)

    @property
    def draws_samples(self) -> bool:
        """Return whether its samples come from the policy, rather than from its data."""
        return isinstance(self.algorithm, PolicyConfig) and not self.data.recorded

    @property
    def learns_by_rewards(self) -> bool:
        """Return whether samples teach nothing when their rewards are equal."""
        return isinstance(self.algorithm, PolicyConfig) and self.algorithm.needs_rewards

    @property
    def judged_terms(self) -> tuple[RewardTermConfig, ...]:
        """Return the terms whose judges have labelled examples to agree with, each once."""
        asked = [term for term in self.all_rewards if term.agreement is not None]
        return tuple(term for place, term in enumerate(asked) if term not in asked[:place])

    @property
    def evaluates_pairs(self) -> bool:
        """Return whether an evaluation counts how many held-out pairs are ranked correctly, and generates nothing."""
        if self.evaluation is None or not self.learns_from_pairs or self.rewards:
            return False
        return not any(one.rewards for one in self.evaluation.sets_of_data)

    @property
    def evaluates_answers(self) -> bool:
        """Return whether an evaluation draws answers from the generators."""
        return self.evaluation is not None and not self.evaluates_pairs

    @property
    def needs_generators(self) -> bool:
        """Return whether the run has generators: for its samples, or for its evaluations."""
        return self.draws_samples or self.loop == "client" or self.evaluates_answers

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
        sets = () if self.evaluation is None else self.evaluation.sets_of_data
        judged = self.rewards or any(one.rewards for one in sets)
        wrong = {
            "rewards": (judged, "it writes no answers that they could judge; evaluation ranks pairs"),
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
            cure = (
                "send advantages of your own"
                if self.algorithm.teacher is None
                else "leave algorithm.teacher out"
            )
            raise ValueError(
                f"loop is client, which asks no {' and no '.join(asked)}: {cure}, or leave the steps to the coordinator"
            )
        return self

    @model_validator(mode="after")
    def _sends_each_sample_in_one_message(self) -> RunConfig:
        teacher = self.algorithm.teacher if isinstance(self.algorithm, PolicyConfig) else None
        longest = self.most_sample_tokens
        if teacher is not None and teacher.bytes_per_token * longest > MOST_SAMPLE_BYTES:
            limit = MOST_SAMPLE_BYTES // teacher.bytes_per_token
            key = (
                "rollout.sampling.max_response_tokens"
                if self.environment is None
                else "environment.episode_tokens"
            )
            raise ValueError(
                f"algorithm.teacher.top_k is {teacher.top_k}, and with it one message holds a sample of at most "
                f"{limit:,} tokens, but {key} is {longest:,}: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _solved_prompts_are_known(self) -> RunConfig:
        if not self.data.learns_outcomes:
            return self
        why = ""
        if not isinstance(self.algorithm, PolicyConfig):
            why = f"algorithm.type {self.algorithm.type} generates no answers"
        elif self.loop == "client":
            why = "with loop: client the client decides what it trains"
        elif not self.is_rewarded:
            why = "rewards is empty"
        if why:
            rests = "data.rest_epochs lets prompts rest whose answers earn a reward of 1"
            rises = "data.curriculum.reward raises levels by rewards"
            raise ValueError(f"{rests if self.data.rest_epochs else rises}, and {why}: leave it out")
        return self

    @model_validator(mode="after")
    def _combines_its_rewards(self) -> RunConfig:
        advantage = self.algorithm.advantage if isinstance(self.algorithm, PolicyConfig) else None
        weighs_itself = isinstance(advantage, GdpoAdvantage) and bool(advantage.weights)
        counts = self.learns_by_rewards and not weighs_itself
        can_combine(self.reward_mode, self.rewards, counts=counts)
        for one in () if self.evaluation is None else self.evaluation.sets_of_data:
            can_combine(one.reward_mode, one.rewards, f" of {one.shown}")
        if isinstance(advantage, GdpoAdvantage) and self.reward_mode != "weighted":
            raise ValueError(
                f"reward_mode is {self.reward_mode}, and algorithm.advantage.type gdpo normalises each reward by "
                "itself before it adds them: leave reward_mode out, or take another advantage"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if isinstance(self.algorithm, PolicyConfig):
            name, least = self.algorithm.type, self.algorithm.advantage.needed_group_samples
            if self.rollout.samples_per_prompt < least:
                raise ValueError(
                    f"rollout.samples_per_prompt is {self.rollout.samples_per_prompt}, but {name} compares the "
                    f"samples of one prompt with each other: set it to {least} or more (8 is usual), "
                    "or take an advantage that compares over the whole batch"
                )
            advantage = self.algorithm.advantage
            weights = advantage.weights if isinstance(advantage, GdpoAdvantage) else ()
            if weights and len(weights) != len(self.rewards) and not self.data.recorded:
                raise ValueError(
                    f"algorithm.advantage.weights has {len(weights)} numbers, rewards has {len(self.rewards)} terms: "
                    "write one for each, or none to take their own"
                )
            if not self.is_rewarded and self.algorithm.needs_rewards and not self.data.recorded:
                raise ValueError(f"rewards is empty: {name} needs at least one reward term")
            if self.rollout.dynamic_sampling is not None and not self.algorithm.needs_rewards:
                raise ValueError(
                    "rollout.dynamic_sampling leaves out groups of equal rewards, which may be empty for "
                    f"algorithm.advantage.type {advantage.type} while advantage.reward_weight is 0: leave it out, or "
                    "set advantage.reward_weight above 0"
                )
            if self.rollout.sampling.temperature == 0:
                raise ValueError("rollout.sampling.temperature is 0: greedy samples of a group are all equal")
            if self.rollout.sampling.top_p < 1 or self.rollout.sampling.top_k > 0:
                raise ValueError(
                    "rollout.sampling.top_p below 1 or top_k above 0 changes the logprobs in a way that the "
                    "trainer cannot reproduce: leave them at 1 and 0 for training rollouts"
                )
        drains = self.weights.update == "between_samples" or self.weights.kv_policy == "drain"
        if self.rollout.resume_partial and drains:
            raise ValueError(
                "rollout.resume_partial continues samples under newer weights, which weights.update between_samples "
                "and weights.kv_policy drain rule out: leave it out, or them at their defaults"
            )
        if self.stop is not None and (self.evaluation is None or self.evaluation.every_steps == 0):
            raise ValueError("stop needs evaluation.every_steps above 0")
        return self

    @model_validator(mode="after")
    def _acts_where_it_samples(self) -> RunConfig:
        advantage = self.algorithm.advantage if isinstance(self.algorithm, PolicyConfig) else None
        if isinstance(advantage, GigpoAdvantage) and self.environment is None and not self.data.recorded:
            raise ValueError(
                "algorithm.advantage.type gigpo compares turns that were asked in the same state, which an environment "
                "names, and environment is not set: set it, take grpo, or compute advantages in a loop of your own "
                "(loop: client) with flotilla_algorithms.gigpo"
            )
        if self.environment is None:
            return self
        why = ""
        if advantage is None:
            why = f"algorithm.type {self.algorithm.type} samples nothing"
        elif self.loop == "client":
            why = "with loop: client the client plays the turns itself"
        elif isinstance(advantage, GdpoAdvantage):
            why = "algorithm.advantage.type gdpo normalises the terms of `rewards`, of which an environment's are none"
        if why:
            raise ValueError(f"environment is set, and {why}: leave it out")
        return self

    @model_validator(mode="after")
    def _learns_what_was_recorded(self) -> RunConfig:
        if self.rollout.record and (self.loop == "client" or not isinstance(self.algorithm, PolicyConfig)):
            why = "leaves to the client what is trained" if self.loop == "client" else "draws no samples"
            of = "loop: client" if self.loop == "client" else f"algorithm.type {self.algorithm.type}"
            raise ValueError(f"rollout.record is true, and {of} {why}: leave one of them out")
        if not self.data.recorded:
            return self
        advantage = self.algorithm.advantage if isinstance(self.algorithm, PolicyConfig) else None
        if isinstance(advantage, GdpoAdvantage) and not advantage.weights:
            raise ValueError(
                "algorithm.advantage.weights is empty, and data.recorded leaves nothing to take them from: write one "
                "for each term of the recorded rewards"
            )
        for key, why in self._idle_beside_records():
            raise ValueError(f"data.recorded is true, and {key} {why}: leave one of them out")
        return self

    def _idle_beside_records(self) -> Iterator[tuple[str, str]]:
        """Return the settings that recorded samples have no use for, each with the reason."""
        algorithm, rollout = self.algorithm, self.rollout
        if not isinstance(algorithm, PolicyConfig):
            yield f"algorithm.type {algorithm.type}", "learns from given answers, not from samples"
            return
        if self.loop == "client":
            yield "loop: client", "leaves the samples to the client"
        for key in ("max_staleness", "over_issue", "dynamic_sampling", "resume_partial", "record"):
            if getattr(rollout, key):
                yield f"rollout.{key}", "is about samples that are drawn"
        if self.data.learns_outcomes:
            yield "data.rest_epochs or data.curriculum", "goes by the rewards of new samples"
        if self.data.difficulty_field:
            yield "data.difficulty_field", "names a column of prompts"
        if algorithm.correction.staleness_decay != 1 or algorithm.correction.proximal == "interpolated":
            key = "staleness_decay" if algorithm.correction.staleness_decay != 1 else "proximal interpolated"
            yield (
                f"algorithm.correction.{key}",
                "counts the updates since a sample was drawn, which nobody knows of recorded samples",
            )
        if algorithm.asked_teachers is not None and algorithm.asked_teachers.teacher_field is not None:
            yield "teacher_field", "names a column of prompts"

    @model_validator(mode="after")
    def _judges_what_it_evaluates(self) -> RunConfig:
        if self.evaluation is None:
            return self
        sets = self.evaluation.sets_of_data
        if self.evaluates_pairs and any([self.evaluation.temperature, *(one.temperature for one in sets)]):
            raise ValueError(
                "evaluation.temperature is above 0, but pairs are ranked and nothing is generated: "
                "leave it out, or name rewards"
            )
        if self.evaluates_answers and not self.is_rewarded and not all(one.rewards for one in sets):
            raise ValueError("evaluation needs at least one reward term")
        return self

    @model_validator(mode="after")
    def _can_find_its_best_checkpoint(self) -> RunConfig:
        best_by, evaluation = self.checkpoint.best_by, self.evaluation
        if not best_by:
            return self
        if evaluation is None or evaluation.every_steps == 0 or self.checkpoint.every_steps == 0:
            raise ValueError(
                "checkpoint.best_by needs evaluation.every_steps and checkpoint.every_steps above 0"
            )
        known = evaluation.rising_metrics(pairs=self.evaluates_pairs)
        if best_by not in known:
            raise ValueError(
                f"checkpoint.best_by is {best_by}, and the evaluations of this run measure {', '.join(known)}: name one"
            )
        return self
