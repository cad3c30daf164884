"""Divides the memory of GPUs between trainer and generator, from the shape of the model, and finds what cannot fit.

Division: a GPU that a trainer rank and a generator share is divided before either starts, so neither takes what the
other one counts on: the generator gets a KV cache of a fixed size, and the rank has the rest. First come what the rank
keeps in every full run (weights, gradients, moments, gathered layers) or, where all weights cannot learn, frozen
weights; the generator's weights, live and staged; and the buckets of both ends for weights on their way. Of what
remains, the KV cache takes what the samples of the generator can fill, at most half. Whether the activations of a run
fit into the other half is known when the run is planned.

Other gangs: what the ranks of critic, reference, teachers and reward models keep on the GPUs of the trainer is set
aside with their processes, for the whole run. What one of them takes while it computes comes from the part of the
trainer's rank, because they compute in turns and then return it.

Sleep: with `generator.sleep_while_training` the KV cache and the activations are never there at the same time, so each
may have all that remains, the KV cache without what a rank computes for live checks. Where all weights cannot learn it
has half of it, as ever, because nobody knows yet what the rank will keep. A run for which generators do not sleep has
what the KV cache leaves.

Refusals: an estimate is refused where twice the memory would not suffice, and else warned of; so is what a rank keeps
between updates, where the KV cache leaves less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flotilla_coordinator.plan.chapter import Entries, refusal, shown_bytes
from flotilla_coordinator.plan.gangs_beside import bytes_beside, role_bytes, sections_beside
from flotilla_coordinator.plan.model_facts import ModelFacts, SequenceLimit
from flotilla_coordinator.plan.sampling_lines import groups_under_way
from flotilla_coordinator.plan.size_limits import ESTIMATE_MAY_BE_WRONG_BY, has_gpus
from flotilla_coordinator.plan.trainer_memory import (
    BYTES,
    TrainerMemory,
    frozen_bytes,
    offloads,
    resident_bytes,
    resting_bytes,
)
from flotilla_core.config import GeneratorConfig, RunConfig, StackConfig, TrainerConfig, bucket_size_mib
from flotilla_core.errors import FailedPrecondition
from flotilla_core.findings import warning
from flotilla_core.gangs import gang_of, roles_on_shared_gpus, with_gang
from flotilla_core.gpu_shares import (
    ENGINE_PROCESS,
    SAME_GPU_BUCKET_BYTES,
    SAME_GPU_BUCKETS,
    ring_bytes,
    set_aside,
    share_beside,
)
from flotilla_core.roles import CRITIC, REWARD_MODEL, kind_of_role
from flotilla_launch.gpus import gpu_bytes

GIB = 1 << 30
SLEEP = "generator.sleep_while_training"
CPU_KV_CACHE_GIB = 1.0
STEP_TOKENS = 16_384
"""Tokens of one step of the engine, whose activations exist at one time."""
SAMPLED_COPIES = 3
"""Logits of the samples that decode, as computed, and as processed and sorted."""
CHECK_BYTES = 2 << 30
"""The memory that a rank needs while its generator is awake, for forward passes over the samples of a live check."""


@dataclass(frozen=True)
class SharedGpu:
    """The memory of one GPU that a trainer rank and a generator share, in bytes."""

    total: int
    resident: int
    """The memory that the trainer rank keeps in every run in which all weights learn."""
    frozen: int
    """The memory that it keeps where adapters learn beside frozen weights."""
    generator: int
    """The generator without its KV cache."""
    kv_cache: int
    least_kv_cache: int
    """The KV cache of one sample as long as the generator allows."""
    aside: int
    """The memory that neither of them counts on, with the buckets of a weight sync at both ends and between them, and
    with what other gangs keep there."""
    buckets: int
    """The part of it that the rank takes, for its end of a weight sync and for what lies between both."""
    sleeps: bool
    """True where the rank has the memory of the KV cache during updates."""

    @classmethod
    def of(cls, model: ModelFacts, stack: StackConfig, total: int) -> SharedGpu:
        """Divide a GPU of `total` bytes."""
        generator = stack.generator
        resident, frozen = resident_bytes(model, stack.trainer), frozen_bytes(model, stack.trainer)
        engine = generator_bytes(model, generator)
        longest = longest_sample_bytes(model, generator)
        end = sync_bytes(model, stack)
        buckets = end + SAME_GPU_BUCKETS * SAME_GPU_BUCKET_BYTES
        aside = set_aside(total, end + buckets) + bytes_beside(model, stack)
        sleeps = generator.sleep_while_training
        # Reward models score samples as they end, beside a live check.
        judging = [role for role in roles_on_shared_gpus(stack) if kind_of_role(role) == REWARD_MODEL]
        awake = CHECK_BYTES * (1 + len(judging))
        room, at_rest = total - aside - engine, resident + (awake if sleeps else 0)
        learns = at_rest + longest <= room
        left = max(room - (at_rest if learns else frozen), 0)
        wanted = generator.max_running_samples * longest
        kv_cache = min(wanted, left if sleeps and learns else left // 2)
        if generator.kv_cache_gib is not None:
            kv_cache = int(generator.kv_cache_gib * GIB)
        return cls(total, resident, frozen, engine, kv_cache, longest, aside, buckets, sleeps)

    @classmethod
    def required(cls, model: ModelFacts, stack: StackConfig, total: int) -> SharedGpu:
        """Divide a GPU; refuse one that is too small for both, even if the weights are frozen."""
        shared, advice = cls.of(model, stack, total), ""
        if shared.fits:
            return shared
        asleep = stack.generator.model_copy(update={"sleep_while_training": True})
        other = cls.of(model, stack.model_copy(update={"generator": asleep}), total)
        if other.fits:
            advice = (
                f"set {SLEEP} to true, with which the KV cache has {shown_bytes(other.kv_cache)} and the rank "
                f"{shown_bytes(other.rank_room)} alternately, "
            )
        beside = ""
        if sections := sections_beside(stack):
            advice += f"set cpu_offload or placement: separate for {sections}, "
            beside = f"{sections} keep {shown_bytes(bytes_beside(model, stack))} there, "
        raise FailedPrecondition(
            f"a trainer rank and a generator do not fit on one GPU of {shown_bytes(total)}",
            where="placement: colocated",
            why=f"{beside}the rank keeps {shown_bytes(shared.frozen)} of weights alone, the generator "
            f"{shown_bytes(shared.generator)} of weights, live and staged, and working memory; what remains for the KV "
            f"cache is {shown_bytes(max(shared.kv_cache, 0))}, and one sample of generator.max_model_tokens takes "
            f"{shown_bytes(shared.least_kv_cache)}",
            next_step=f"{advice}raise trainer.nproc, which spreads the rank's part over more GPUs, set "
            "trainer.cpu_offload, set placement to separate, or lower generator.max_model_tokens, "
            "generator.max_running_samples or generator.kv_cache_gib",
        )

    @property
    def rank_room(self) -> int:
        """Return the bytes that the trainer rank may use during an update."""
        return self.room_alone if self.sleeps else self.room_beside

    @property
    def room_beside(self) -> int:
        """Return the bytes that the rank may have while the generator decodes."""
        return self.room_alone - self.kv_cache

    @property
    def room_alone(self) -> int:
        """Return the bytes that the rank may have while the KV cache has none."""
        return self.total - self.aside - self.generator

    @property
    def learns(self) -> bool:
        """Return whether both fit while all weights learn."""
        return self.resident <= self.room_beside and self.least_kv_cache <= self.kv_cache

    @property
    def fits(self) -> bool:
        """Return whether both fit, if need be with frozen weights."""
        return self.frozen <= self.room_beside and self.least_kv_cache <= self.kv_cache

    def applied(self, model: ModelFacts, stack: StackConfig) -> StackConfig:
        """Return the stack with the memory of both as divided here."""
        # vLLM refuses to start where less than this share is free, also where the KV cache has a fixed size.
        share = max(0.01, round((self.generator + self.kv_cache) / self.total, 2))
        memory = {"kv_cache_gib": self.kv_cache / GIB, "memory_fraction": min(1.0, share)}
        generator, trainer = stack.generator.model_copy(update=memory), stack.trainer
        if trainer.memory_fraction is None:
            # Without a limit torch keeps what it once took, and the generator dies when its samples need theirs.
            limit = (self.rank_room + self.buckets) / self.total
            trainer = trainer.model_copy(update={"memory_fraction": limit})
        stack = self._with_limits_of_gangs(model, stack)
        return stack.model_copy(update={"generator": generator, "trainer": trainer, "placement": "colocated"})

    def _with_limits_of_gangs(self, model: ModelFacts, stack: StackConfig) -> StackConfig:
        """Let a rank of another gang take what it keeps, and what the trainer's rank has for an update."""
        policy = resting_bytes(model, stack.trainer, learns=True) if self.learns else self.frozen
        for role in roles_on_shared_gpus(stack):
            gang = gang_of(stack, role)
            if gang.memory_fraction is None:
                limit = min(1.0, (self.rank_room - policy + role_bytes(model, stack, role)) / self.total)
                stack = with_gang(stack, role, gang.model_copy(update={"memory_fraction": limit}))
        return stack


def token_bytes(model: ModelFacts, generator: GeneratorConfig) -> int:
    """Return the bytes of one token in the KV cache of one worker."""
    return model.layers * model.key_value_size * BYTES[generator.dtype] // generator.tensor_parallel_size


def sync_bytes(model: ModelFacts, stack: StackConfig) -> int:
    """Return what one end of a weight sync between GPUs keeps for buckets, where the run does not set their size."""
    size = BYTES[stack.trainer.dtype]
    asked = bucket_size_mib("auto", "nccl") << 20
    return ring_bytes(model.parameters * size, (numbers * size for numbers in model.largest_tensors), asked)


def share_beside_standby(model: ModelFacts, stack: StackConfig, total: int) -> float:
    """Return the most of a GPU of so many bytes that an engine may take, beside the second copy of its weights."""
    return share_beside(standby_bytes(model, stack.generator), sync_bytes(model, stack), total)


def longest_sample_bytes(model: ModelFacts, generator: GeneratorConfig) -> int:
    """Return the KV cache in one worker of a sample as long as the generator allows."""
    longest = SequenceLimit.of(model, generator).tokens
    return longest * token_bytes(model, generator)


def kv_cache_bytes(model: ModelFacts, stack: StackConfig, gpu: int | None) -> int:
    """Return the KV cache of one worker, on a GPU of so many bytes or on the CPU."""
    generator = stack.generator
    if generator.kv_cache_gib is not None:
        return int(generator.kv_cache_gib * GIB)
    if gpu is None:
        return int(CPU_KV_CACHE_GIB * GIB)
    if stack.placement == "colocated":
        return SharedGpu.of(model, stack, gpu).kv_cache
    engine = generator_bytes(model, generator) - standby_bytes(model, generator)
    return max(0, int(gpu * generator.memory_fraction) - engine)


def gpu_of_this_host() -> int | None:
    """Return the bytes of the smallest GPU of this host; None where it has none."""
    return gpu_bytes() if has_gpus() else None


def compiles(trainer: TrainerConfig, gpu: int | None) -> bool:
    """Return whether the layers of a gang are compiled on a host with such GPUs, or with none."""
    return trainer.compile == "on" or (trainer.compile == "auto" and gpu is not None)


def sleeps_in(config: RunConfig, stack: StackConfig) -> bool:
    """Return whether the generators of a stack sleep during the updates of a run.

    Nobody knows when a client's loop needs its next samples. Generators that a run does not have stay awake.
    """
    generators, wanted = stack.generator, config.rollout.generators
    whole = wanted is None or wanted >= generators.replicas
    return generators.sleep_while_training and config.needs_generators and config.loop != "client" and whole


def rank_room(config: RunConfig, model: ModelFacts, stack: StackConfig, gpu: int) -> int:
    """Return the bytes that a trainer rank may use of a GPU of so many bytes."""
    if stack.placement == "colocated":
        shared = SharedGpu.of(model, stack, gpu)
        room, buckets = shared.rank_room if sleeps_in(config, stack) else shared.room_beside, shared.buckets
    else:
        buckets = sync_bytes(model, stack)
        room = gpu - set_aside(gpu, buckets) - bytes_beside(model, stack)
    limit = stack.trainer.memory_fraction
    return room if limit is None else min(room, round(gpu * limit) - buckets)


def gpu_problems(
    config: RunConfig, stack: StackConfig, model: ModelFacts, need: TrainerMemory, gpu: int
) -> Entries:
    """Refuse what cannot fit on a GPU of so many bytes, and warn of what may not, or is slow."""
    trainer, has = stack.trainer, f"and a GPU of {shown_bytes(gpu)} has"
    shared = SharedGpu.of(model, stack, gpu) if stack.placement == "colocated" else None
    sleeps = sleeps_in(config, stack)
    if shared is not None and sleeps:
        room = shared.room_beside
        yield from _beyond(
            f"a trainer rank keeps about {shown_bytes(need.kept)} between updates, while the generator has its KV "
            f"cache of {shown_bytes(shared.kv_cache)}, {has} {shown_bytes(max(room, 0))} for it: lower "
            "generator.kv_cache_gib, or set optimizer.offload, or raise trainer.nproc",
            need.kept,
            room,
            beside=CHECK_BYTES,
        )
    if trainer.attach is None and trainer.backend != "gloo":
        room = rank_room(config, model, stack, gpu)
        neighbour = ""
        if shared is not None:
            cache = f"{shown_bytes(shared.kv_cache)} {'sleeps meanwhile' if sleeps else 'stays'}"
            neighbour = f" beside the generator, whose KV cache of {cache}"
        state_fits = need.state <= room or offloads(trainer)
        if not state_fits:
            neighbour += f", less than the {shown_bytes(need.state)} of its weights, gradients and moments"
        ways = ", or ".join(_ways_to_fit(config, shared, sleeps=sleeps, state_fits=state_fits))
        yield from _beyond(
            f"a trainer rank needs about {shown_bytes(need.total)}, {has} {shown_bytes(max(room, 0))} for it"
            f"{neighbour}: {ways}",
            need.total,
            room,
        )
    if stack.generator.engine == "vllm":
        yield from _generator_problems(config, stack, model, gpu)


def critic_problems(
    config: RunConfig,
    stack: StackConfig,
    model: ModelFacts,
    policy: TrainerMemory,
    critic: TrainerMemory,
    gpu: int,
) -> Entries:
    """Refuse a critic that cannot compute on the trainer's GPUs in its turn, and warn of one that may not."""
    if not stack.critic.shares_gpus or offloads(stack.critic):
        return
    room = rank_room(config, model, stack, gpu) - policy.kept + role_bytes(model, stack, CRITIC)
    yield from _beyond(
        f"a critic rank needs about {shown_bytes(critic.total)}, and beside the policy and its generator a GPU of "
        f"{shown_bytes(gpu)} has {shown_bytes(max(room, 0))} for it: set algorithm.critic.optimizer.offload, or "
        f"critic.cpu_offload or critic.placement: separate in the stack file, or lower "
        f"batching.tokens_per_microbatch = {config.batching.microbatch_budget}",
        critic.total,
        room,
    )


def _beyond(sentence: str, need: int, room: int, *, beside: int = 0) -> Entries:
    """Refuse an estimate that twice the room would not hold, and warn of one that with what is beside is above it."""
    if need + beside > room:
        yield refusal(sentence) if need > ESTIMATE_MAY_BE_WRONG_BY * room else warning(sentence)


def _ways_to_fit(
    config: RunConfig, shared: SharedGpu | None, *, sleeps: bool, state_fits: bool
) -> Iterator[str]:
    """Say what makes a rank smaller, or its part of a GPU larger."""
    batching = config.batching
    if not state_fits:
        yield "set trainer.cpu_offload in the stack file"
        if not config.lora:
            yield "use lora"
    yield (
        f"lower batching.tokens_per_microbatch = {batching.microbatch_budget} or batching.logprob_chunk_tokens = "
        f"{batching.logprob_chunk_tokens}"
    )
    yield "set batching.activation_checkpointing or optimizer.offload"
    if shared is not None and not sleeps:
        yield f"lower generator.kv_cache_gib = {shared.kv_cache / GIB:.3g}"
        if shared.sleeps:
            yield f"set {SLEEP} in stack.yaml to false, with which the KV cache is smaller"
        elif config.needs_generators and config.loop != "client":
            yield f"set {SLEEP} in stack.yaml, with which it has {shown_bytes(shared.room_alone)}"
    yield "raise trainer.nproc"


def _generator_problems(config: RunConfig, stack: StackConfig, model: ModelFacts, gpu: int) -> Entries:
    """Refuse a generator without a KV cache; warn of one without room for new weights, or without captured graphs."""
    generator, share = stack.generator, share_beside_standby(model, stack, gpu)
    if not kv_cache_bytes(model, stack, gpu):
        yield refusal(
            f"the weights of a generator leave no KV cache on a GPU of {shown_bytes(gpu)}: raise "
            "generator.tensor_parallel_size or generator.memory_fraction"
        )
    divided = stack.placement == "colocated" or generator.kv_cache_gib is not None
    if not divided and generator.memory_fraction > share and config.lora is None:
        yield warning(
            f"generator.memory_fraction = {generator.memory_fraction} leaves a GPU of {shown_bytes(gpu)} no room for "
            "the second copy of the weights, which each sync fills beside decoding: it waits in host memory, and each "
            f"commit stalls decoding for longer; lower it to {share}"
        )
    if generator.enforce_eager:
        yield warning(
            "generator.enforce_eager is true: without captured graphs a GPU decodes two to three times slower; leave "
            "it out, unless the start must be quick"
        )


def kv_cache_warnings(
    config: RunConfig, stack: StackConfig, model: ModelFacts, prompt_tokens: int, kv_cache: int
) -> Entries:
    """Warn of a KV cache that cannot hold the samples in flight when half of their responses are written."""
    rollout, generator = config.rollout, stack.generator
    if generator.engine != "vllm":
        return
    under_way = groups_under_way(config) * rollout.samples_per_prompt
    running = min(-(-under_way // max(generator.replicas, 1)), generator.max_running_samples)
    # The samples of a group share the blocks of their prompt.
    prompts = -(-running // rollout.samples_per_prompt)
    tokens = prompts * prompt_tokens + running * rollout.sampling.max_response_tokens // 2
    need = tokens * token_bytes(model, generator)
    if need > kv_cache:
        yield warning(
            f"{running} samples in flight on a generator need about {shown_bytes(need)} of KV cache when half of their "
            f"responses are written, and it has {shown_bytes(kv_cache)}: samples are set back and computed again; "
            "raise generator.kv_cache_gib or generator.memory_fraction, or lower generator.max_running_samples"
        )


def generator_bytes(model: ModelFacts, generator: GeneratorConfig) -> int:
    """Return the memory of one worker without its KV cache: weights, live and staged, and what a step computes."""
    size = BYTES[generator.dtype]
    weights = model.parameters * size // generator.tensor_parallel_size
    computed = STEP_TOKENS * (4 * model.hidden_size + 3 * model.intermediate_size) * size
    sampled = generator.max_running_samples * model.vocabulary_size * 4 * SAMPLED_COPIES
    return weights + standby_bytes(model, generator) + computed + sampled


def generator_process_bytes(model: ModelFacts, stack: StackConfig, gpu: int) -> int:
    """Return what the process of a generator takes of a GPU of so many bytes at most, as the driver counts it."""
    tensors = generator_bytes(model, stack.generator) + kv_cache_bytes(model, stack, gpu)
    return tensors + sync_bytes(model, stack) + ENGINE_PROCESS


def standby_bytes(model: ModelFacts, generator: GeneratorConfig) -> int:
    """Return the memory of the second copy of one worker's weights; none where they arrive in the live ones."""
    if generator.apply_weights == "direct":
        return 0
    return model.parameters * BYTES[generator.dtype] // generator.tensor_parallel_size
