"""Describes what the ranks of a run keep on their GPU and on their host, as lines of its plan, and what has no room."""

from __future__ import annotations

from flotilla_coordinator.plan import gpu_memory, size_limits
from flotilla_coordinator.plan.chapter import Entries, Line, shown_bytes
from flotilla_coordinator.plan.placement import seat_lines
from flotilla_coordinator.plan.run_facts import RunFacts
from flotilla_coordinator.plan.trainer_memory import (
    HostMemory,
    TrainerMemory,
    critic_memory,
    microbatch_tokens,
)
from flotilla_coordinator.trainers.spec import critic_of
from flotilla_core.config import CriticConfig, StackConfig, TrainerConfig
from flotilla_core.findings import warning


def memory_chapter(run: RunFacts) -> Entries:
    """Describe the memory of a trainer rank; refuse and warn of what does not fit on GPUs and hosts."""
    config, stack, model, trainer = run.config, run.stack, run.model, run.stack.trainer
    compiled = gpu_memory.compiles(trainer, run.gpu)
    need = TrainerMemory.of(model, config, trainer, run.longest, compiled=compiled)
    parts = f" of {microbatch_tokens(config, trainer, run.longest)} tokens {shown_bytes(need.activations)}"
    if need.logits:
        parts += f", logits of {config.batching.logprob_chunk_tokens} tokens {shown_bytes(need.logits)}"
    if need.reference:
        parts += f", frozen reference {shown_bytes(need.reference)}"
    yield _rank_line("trainer", trainer, need, parts)
    host = HostMemory.of(model, config, trainer)
    yield from host_lines("trainer", host, offload=config.optimizer.offload)
    critic = _critic_memory(run)
    kept = kept_on_host(stack, host, HostMemory(0, 0, 0) if critic is None else critic[1])
    yield from size_limits.host_errors(kept, run.host)
    yield from size_limits.trainer_errors(config, trainer, need.total + host.total, run.host)
    yield from map(warning, size_limits.bfloat16_warnings(stack))
    if run.gpu is not None:
        yield from seat_lines(stack, model, run.gpu)
        yield from gpu_memory.gpu_problems(config, stack, model, need, run.gpu)
        if critic is not None:
            yield from gpu_memory.critic_problems(config, stack, model, need, critic[0], run.gpu)
    if not run.given and config.loop == "coordinator":
        kv_cache = gpu_memory.kv_cache_bytes(model, stack, run.gpu)
        yield from gpu_memory.kv_cache_warnings(config, stack, model, run.data.longest_prompt, kv_cache)


def critic_chapter(run: RunFacts) -> Entries:
    """Describe the critic; a run without one has no such line."""
    critic, gang, memory = critic_of(run.config), run.stack.critic, _critic_memory(run)
    if critic is None or memory is None:
        return
    need, host = memory
    clip = "no clip" if critic.value_clip is None else f"values clipped at {critic.value_clip:g}"
    alone = f"; the first {critic.warmup_steps} steps teach it alone" if critic.warmup_steps else ""
    turns = "; learns after the policy, on the same GPUs" if gang.shares_gpus and run.gpu is not None else ""
    yield Line(
        "critic",
        f"learning rate {critic.optimizer.learning_rate:g}",
        f"{critic.optimizer.schedule}, {clip}; starts from {_critic_start(run, critic)}{alone}{turns}",
    )
    yield _rank_line("critic", gang, need, f" {shown_bytes(need.activations)}; it has no logits")
    yield from host_lines("critic", host, offload=critic.optimizer.offload)


def _rank_line(section: str, gang: TrainerConfig, need: TrainerMemory, activations: str) -> Line:
    return Line(
        f"memory of a {section} rank",
        f"about {shown_bytes(need.total)}",
        f"weights {shown_bytes(need.masters)}, gradients {shown_bytes(need.gradients)}, "
        f"AdamW {shown_bytes(need.moments)}, gathered {gang.dtype} layers {shown_bytes(need.gathered)}, "
        f"activations{activations}",
    )


def host_lines(section: str, host: HostMemory, *, offload: bool) -> Entries:
    """Describe what a rank of a gang keeps in host memory; nothing where it keeps all on its GPU."""
    if not host.total:
        return
    pinned = "weights and gradients" if host.moments else "weights"
    parts = f"{section}.cpu_offload: pinned {pinned} {shown_bytes(host.pinned)}"
    if host.moments:
        parts += f", AdamW {shown_bytes(host.moments)}"
        parts += "; optimizer.offload changes nothing, because AdamW runs there" if offload else ""
    reference = f", frozen reference {shown_bytes(host.reference)}" if host.reference else ""
    yield Line(f"host memory of a {section} rank", shown_bytes(host.total), parts + reference)


def kept_on_host(stack: StackConfig, trainer: HostMemory, critic: HostMemory) -> dict[str, int]:
    """Return what the gangs of a run that were started here keep in host memory, by their sections."""
    kept = {
        section: host.total * gang.ranks_here
        for section, gang, host in (("trainer", stack.trainer, trainer), ("critic", stack.critic, critic))
        if gang.attach is None
    }
    return {section: taken for section, taken in kept.items() if taken}


def _critic_memory(run: RunFacts) -> tuple[TrainerMemory, HostMemory] | None:
    critic = critic_of(run.config)
    if critic is None or run.critic is None:
        return None
    gang = run.stack.critic
    compiled = gpu_memory.compiles(gang, run.gpu)
    return critic_memory(run.critic, run.config, critic, gang, run.longest, compiled=compiled)


def _critic_start(run: RunFacts, critic: CriticConfig) -> str:
    if critic.initial_weights is not None:
        return str(critic.initial_weights)
    if run.stack.critic.model is not None:
        return f"{run.stack.critic.model} (stack: critic.model)"
    return f"the policy's weights, {run.config.initial_weights or run.stack.model}"
