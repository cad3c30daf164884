"""Decides what a stack file leaves to the host: dtypes, how many ranks and generators, and who sits on which GPU.

Invariants: a key that the file gives stays as it is. Without GPUs nothing is decided. All GPUs of the host are used
where the file names neither ranks nor generators: each gets a rank and a generator if both fit while all weights learn,
because then no GPU waits for the work of another. Where the KV cache beside the rank is too small for a usual batch and
a larger one fits alternately, generators sleep during updates. Else ranks have half of them, or as many as learning
takes, and generators the rest, each with as many workers as its weights need. Where all weights cannot learn in either
way, those of the trainer rest in host memory. What cannot fit is refused before anything starts, with the key to
change. A stack that was placed names everything, so it is placed alike again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_coordinator.plan import size_limits
from flotilla_coordinator.plan.chapter import Line, shown_bytes
from flotilla_coordinator.plan.gpu_memory import (
    SharedGpu,
    generator_bytes,
    generator_process_bytes,
    kv_cache_bytes,
    longest_sample_bytes,
    share_beside_standby,
    token_bytes,
)
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.trainer_memory import HostMemory, frozen_bytes, offloads, resident_bytes
from flotilla_core.config import FleetJudgeConfig, StackConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.gangs import gang_of, model_of, named_gangs
from flotilla_core.gpu_shares import RANK_PROCESS
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import LEARNING, NAMED, holds_judge, role_of_process
from flotilla_launch.gpus import Gpus, computes_bfloat16, gpu_bytes, needed, needed_beside
from flotilla_launch.placement import Slot, slots_of

LEARNING_SHARE = 0.8
"""The most of a GPU that a rank may keep through a run; its activations need the rest."""
LEAST_CACHE_SHARE = 0.05
"""The least of a GPU that a KV cache has beside a rank whose weights rest on the host; else each has its own GPUs."""
READY_TIMEOUT_S = 480.0
"""The ready timeout on GPUs: the first start of a model compiles it and captures graphs, which takes two minutes, and
more with several generators."""
USUAL_TOKENS = 256 * 1024
"""The tokens that a KV cache should hold: a usual batch of one GPU, all of whose samples decode at the same time."""
WORTH_SLEEPING = 1.25
"""The times as large as beside the rank that a KV cache is with which generators sleep; each step waits for that."""
SECTIONS = ("generator", "trainer", "critic", "reference", "teacher")
Seat = tuple[str, str]
"""The name of a GPU, and who sits there with how much memory."""


def placed(stack: StackConfig) -> StackConfig:
    """Return the stack as this host starts it."""
    gpus = Gpus.of_host()
    if not gpus.names or stack.generator.engine != "vllm":
        return stack
    if computes_bfloat16():
        stack = _in_bfloat16(stack)
    if not stack.sets("ready_timeout_s"):
        stack = stack.model_copy(update={"ready_timeout_s": READY_TIMEOUT_S})
    total = gpu_bytes()
    if total is None:
        if not gpus.colocates(stack):
            return stack
        raise FailedPrecondition(
            "the memory of the GPUs is not known",
            where="placement: colocated",
            why="nvidia-smi does not tell it",
            next_step="put nvidia-smi on the PATH, or set placement to separate",
        )
    model = ModelFacts.read(model_folder(stack.model))
    stack = _spread(stack, gpus, model, total)
    gpus.require(stack, stack.generator.replicas)
    if not gpus.colocates(stack):
        stack = _beside_standby(stack, model, total)
        _require_room(stack, model, total)
        return stack.model_copy(update={"placement": "separate"})
    stack = _asleep_in_updates(stack, model, total)
    return SharedGpu.required(model, stack, total).applied(stack)


def seats(stack: StackConfig) -> tuple[list[Seat], list[str]]:
    """Return the GPUs of this host that a placed stack uses, and warnings of what no run on it can do."""
    gpus, total = Gpus.of_host(), gpu_bytes()
    if not gpus.names or total is None or stack.generator.engine != "vllm":
        return [], []
    model = ModelFacts.read(model_folder(stack.model))
    return list(_seats(stack, gpus, model, total)), list(_warnings(stack, model, total))


def seat_lines(stack: StackConfig, model: ModelFacts, total: int) -> Iterator[Line]:
    """Say in a plan who sits on which GPU, numbered as the launcher deals them."""
    if stack.generator.engine == "vllm":
        for name, who in _seats(stack, Gpus(tuple(map(str, range(needed(stack))))), model, total):
            yield Line(f"GPU {name}", shown_bytes(total), who)


def _in_bfloat16(stack: StackConfig) -> StackConfig:
    """Give bfloat16 to every section whose dtype the file leaves out."""
    sections: dict[str, Any] = {name: getattr(stack, name) for name in SECTIONS}
    changed = {name: _half(section) for name, section in sections.items() if not section.sets("dtype")}
    for kind, named in named_gangs(stack).items():
        own = {name: gang if gang.sets("dtype") else _half(gang) for name, gang in named.items()}
        changed[NAMED[kind]] = own
    changed["judges"] = {
        name: _half(one) if isinstance(one, FleetJudgeConfig) and not one.sets("dtype") else one
        for name, one in stack.judges.items()
    }
    return stack.model_copy(update=changed)


def _half(section: Any) -> Any:
    return section.model_copy(update={"dtype": "bfloat16"})


def _spread(stack: StackConfig, gpus: Gpus, model: ModelFacts, total: int) -> StackConfig:
    """Give ranks and generators all GPUs that other gangs leave, where the file names neither."""
    trainer, generator = stack.trainer, stack.generator
    by_hand = trainer.sets("nproc") or trainer.hosts or generator.sets("replicas")
    by_hand = by_hand or len({*gpus.names}) < len(gpus.names)
    elsewhere = trainer.attach is not None or trainer.backend == "gloo" or not trainer.replicas
    if by_hand or elsewhere or stack.autoscale is not None:
        return stack
    free = len(gpus.names) - needed_beside(stack)
    ranks = free // trainer.replicas
    if ranks < 1 or free < 2:
        return stack
    spread = [_arranged(stack, free, ranks, model, total)]
    if not trainer.sets("cpu_offload"):
        resting = stack.model_copy(update={"trainer": trainer.model_copy(update={"cpu_offload": True})})
        found = _arranged(resting, free, ranks, model, total)
        each = HostMemory.of_all_weights(model, found.trainer).total * found.trainer.ranks_here
        if each * trainer.replicas <= size_limits.host_memory():
            spread.append(found)
    return next((found for found in spread if _learns(found, model, total)), spread[0])


def _learns(stack: StackConfig, model: ModelFacts, total: int) -> bool:
    """Return whether all weights can learn on the ranks of a stack, in the memory of their GPUs."""
    if stack.placement != "colocated":
        return resident_bytes(model, stack.trainer) <= LEARNING_SHARE * total
    shared, generator = SharedGpu.of(model, stack, total), stack.generator
    wanted = generator.max_running_samples * shared.least_kv_cache
    useful = generator.kv_cache_gib is not None or shared.kv_cache >= min(wanted, LEAST_CACHE_SHARE * total)
    return shared.learns and (useful or not offloads(stack.trainer))


def _arranged(stack: StackConfig, free: int, ranks: int, model: ModelFacts, total: int) -> StackConfig:
    """Give so many free GPUs to ranks and generators, at most so many of them to the ranks of one gang."""
    trainer, generator = stack.trainer, stack.generator
    if generator.tensor_parallel_size == 1 and stack.placement != "separate":
        both = _counted(stack, ranks, ranks * trainer.replicas, "colocated")
        if stack.placement == "colocated" or _learns(both, model, total):
            return both
    stack = _with_workers(stack, model, total, free // 2)
    each, ranks = stack.generator.tensor_parallel_size, max(1, ranks // 2)
    while not _learns(_counted(stack, ranks, 1, "separate"), model, total):
        if free - (ranks + 1) * trainer.replicas < each:
            break
        ranks += 1
    return _counted(stack, ranks, max(1, (free - ranks * trainer.replicas) // each), "separate")


def _with_workers(stack: StackConfig, model: ModelFacts, total: int, most: int) -> StackConfig:
    """Give generators the fewest workers on whose GPUs they fit, unless the file says how many."""
    wider, workers = stack, 1
    while not stack.generator.sets("tensor_parallel_size") and workers <= most:
        update = {"tensor_parallel_size": workers}
        wider = stack.model_copy(update={"generator": stack.generator.model_copy(update=update)})
        if _decodes(wider, model, total):
            break
        workers *= 2
    return wider


def _beside_standby(stack: StackConfig, model: ModelFacts, total: int) -> StackConfig:
    """Keep what the weights that arrive take free of the engine, where the file does not say what it may have."""
    generator = stack.generator
    if generator.sets("memory_fraction") or generator.kv_cache_gib is not None:
        return stack
    share = min(generator.memory_fraction, share_beside_standby(model, stack, total))
    return stack.model_copy(update={"generator": generator.model_copy(update={"memory_fraction": share})})


def _decodes(stack: StackConfig, model: ModelFacts, total: int) -> bool:
    """Return whether the KV cache of a generator holds one sample as long as it allows."""
    stack = _beside_standby(stack, model, total)
    return kv_cache_bytes(model, stack, total) >= longest_sample_bytes(model, stack.generator)


def _asleep_in_updates(stack: StackConfig, model: ModelFacts, total: int) -> StackConfig:
    """Let generators sleep during updates where that makes a KV cache large enough, if the file does not say it.

    They then receive weights in place: decoding stands still for an update anyway, and no memory is for a second copy.
    """
    generator = stack.generator
    by_hand = generator.sets("sleep_while_training") or generator.kv_cache_gib is not None
    one_trainer = stack.trainer.replicas == 1 and stack.trainer.attach is None
    if by_hand or generator.attach or not one_trainer or stack.autoscale is not None:
        return stack
    update: dict[str, Any] = {"sleep_while_training": True}
    if not generator.sets("apply_weights"):
        update["apply_weights"] = "direct"
    asleep = stack.model_copy(update={"generator": generator.model_copy(update=update)})
    beside, alternately = SharedGpu.of(model, stack, total), SharedGpu.of(model, asleep, total)
    enough = beside.fits and beside.kv_cache >= USUAL_TOKENS * token_bytes(model, generator)
    larger = alternately.kv_cache >= WORTH_SLEEPING * max(beside.kv_cache, 1)
    return asleep if alternately.fits and larger and not enough else stack


def _counted(stack: StackConfig, ranks: int, generators: int, placement: str) -> StackConfig:
    generator = stack.generator.model_copy(update={"replicas": generators})
    trainer = stack.trainer.model_copy(update={"nproc": ranks})
    return stack.model_copy(update={"generator": generator, "trainer": trainer, "placement": placement})


def _require_room(stack: StackConfig, model: ModelFacts, total: int) -> None:
    """Refuse a generator without room for a sample and a rank without room for frozen weights, on GPUs of their own."""
    trainer, generator = stack.trainer, stack.generator
    kv_cache = kv_cache_bytes(model, stack, total)
    if generator.replicas and not _decodes(stack, model, total):
        raise FailedPrecondition(
            f"a generator does not fit on a GPU of {shown_bytes(total)}",
            where="generator",
            why=f"its weights and working memory take {shown_bytes(generator_bytes(model, generator))} a worker, and "
            f"with generator.memory_fraction = {generator.memory_fraction} {shown_bytes(kv_cache)} are left for the KV "
            f"cache, where the longest sample takes {shown_bytes(longest_sample_bytes(model, generator))}",
            next_step="raise generator.tensor_parallel_size or generator.memory_fraction, or lower "
            "generator.max_model_tokens or generator.max_running_samples",
        )
    least = frozen_bytes(model, trainer)
    if trainer.replicas and trainer.attach is None and trainer.backend != "gloo" and least > total:
        raise FailedPrecondition(
            f"a trainer rank does not fit on a GPU of {shown_bytes(total)}",
            where="trainer",
            why=f"weights that do not learn take {shown_bytes(least)} of it, two layers gathered",
            next_step="raise trainer.nproc, which spreads the weights over more GPUs, or set trainer.cpu_offload",
        )


def _warnings(stack: StackConfig, model: ModelFacts, total: int) -> Iterator[str]:
    """Warn of ranks on which no run fits in which all weights learn."""
    room = SharedGpu.of(model, stack, total).room_beside if stack.placement == "colocated" else total
    need = resident_bytes(model, stack.trainer)
    if need > room and stack.trainer.replicas and stack.trainer.backend != "gloo":
        yield (
            f"a trainer rank keeps {shown_bytes(need)} while all weights learn, and has {shown_bytes(room)}: "
            "use lora or optimizer.offload in run files, set trainer.cpu_offload, or raise trainer.nproc"
        )


def _seats(stack: StackConfig, gpus: Gpus, model: ModelFacts, total: int) -> Iterator[Seat]:
    memory = {slot.name: _memory(slot, stack, model, total) for slot in slots_of(stack)}
    for name, who in gpus.seats(stack).items():
        yield name, ", ".join(f"{seat}{memory[seat.partition(' ')[0]]}" for seat in who)


def _memory(slot: Slot, stack: StackConfig, model: ModelFacts, total: int) -> str:
    """Say what a process keeps on its GPU; nothing of one with a model of its own, which is not read for this."""
    if holds_judge(slot.name):
        return ""
    if slot.kind == ServiceKind.SERVICE_KIND_GENERATOR:
        cache = kv_cache_bytes(model, stack, total)
        most = generator_process_bytes(model, stack, total)
        asleep = _asleep(stack, model, total) if stack.generator.sleep_while_training else ""
        return f" (up to {shown_bytes(most)}, KV cache {shown_bytes(cache)} of it{asleep})"
    role = role_of_process(slot.name)
    if slot.kind != ServiceKind.SERVICE_KIND_TRAINER or model_of(stack, role) != stack.model:
        return ""
    gang = gang_of(stack, role)
    if gang.memory_fraction is not None:
        rests = ", weights rest on the host" if offloads(gang) else ""
        most = round(gang.memory_fraction * total) + RANK_PROCESS
        return f" (up to {shown_bytes(most)}{rests})"
    kept = resident_bytes if role in LEARNING else frozen_bytes
    return f" ({shown_bytes(kept(model, gang))})"


def _asleep(stack: StackConfig, model: ModelFacts, total: int) -> str:
    """Say what generators that sleep during updates win."""
    update = {"sleep_while_training": False, "kv_cache_gib": None}
    awake = stack.model_copy(update={"generator": stack.generator.model_copy(update=update)})
    return f", the rank's during updates, {shown_bytes(kv_cache_bytes(model, awake, total))} without that"
