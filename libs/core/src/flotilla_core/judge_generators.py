"""The generators of judges, as the stack file describes them.

Invariants: a judge that the fleet holds has generators of its own, named after it, which no run leases. Such a process
reads a stack whose generators and model are those of its judge, so nothing in it knows of other generators.
"""

from __future__ import annotations

from flotilla_core.config import EngineConfig, FleetJudgeConfig, GeneratorConfig, StackConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.roles import (
    JUDGE,
    holds_judge,
    name_of_role,
    named_role,
    role_of_process,
    section_of,
)


def judge_roles(stack: StackConfig) -> tuple[str, ...]:
    """Return the roles of the judges that the fleet holds, in the order of the file."""
    return tuple(
        named_role(JUDGE, name) for name, one in stack.judges.items() if isinstance(one, FleetJudgeConfig)
    )


def judge_of_role(stack: StackConfig, role: str) -> FleetJudgeConfig:
    """Return the section of the judge with this role."""
    judge = stack.judges.get(name_of_role(role))
    if not isinstance(judge, FleetJudgeConfig):
        raise FailedPrecondition(
            f"the fleet holds no judge {name_of_role(role)!r}",
            where=f"stack {stack.name!r}, judges",
            why=f"it holds {', '.join(map(name_of_role, judge_roles(stack))) or 'none'}",
            next_step=f"write {section_of(role)} with a model into stack.yaml",
        )
    return judge


def slots_of_judge(stack: StackConfig, role: str) -> list[str]:
    """Return the names of a judge's generators; several are numbered."""
    count = judge_of_role(stack, role).replicas
    return [role] if count == 1 else [f"{role}-{index}" for index in range(count)]


def section_of_generator(stack: StackConfig, name: str) -> EngineConfig:
    """Return the section that describes the generator of this name."""
    return judge_of_role(stack, role_of_process(name)) if holds_judge(name) else stack.generator


def read_by(stack: StackConfig, name: str) -> StackConfig:
    """Return the stack as the process of this name reads it."""
    if not holds_judge(name):
        return stack
    judge = judge_of_role(stack, role_of_process(name))
    section = GeneratorConfig(
        replicas=judge.replicas,
        dtype=judge.dtype,
        quantization=judge.quantization,
        tensor_parallel_size=judge.tensor_parallel_size,
        max_model_tokens=judge.max_model_tokens,
        max_running_samples=judge.max_running_samples,
        memory_fraction=judge.memory_fraction,
        kv_cache_gib=judge.kv_cache_gib,
        enforce_eager=judge.enforce_eager,
        engine_options=judge.engine_options,
        environment=judge.environment,
    )
    return stack.model_copy(update={"generator": section, "model": judge.model, "placement": "separate"})
