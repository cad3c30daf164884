"""What `run plan` says of how the ranks of a gang are arranged."""

from __future__ import annotations

from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_core.config import AlgorithmConfig, PolicyConfig, StackConfig, TrainerConfig
from flotilla_core.gangs import gang_of, model_of, roles_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import POLICY, section_of


def mesh_errors(algorithm: AlgorithmConfig, stack: StackConfig) -> list[str]:
    """Heads that the ranks on one row cannot share evenly, for each gang that the run needs."""
    beside = algorithm.gangs_beside_the_policy if isinstance(algorithm, PolicyConfig) else ()
    errors = []
    for role in (role for role in (POLICY, *beside) if role in roles_of(stack)):
        width = gang_of(stack, role).sequence_parallel
        heads = ModelFacts.read(model_folder(model_of(stack, role))).heads if width > 1 else 0
        if heads % width:
            errors.append(
                f"{section_of(role)}.sequence_parallel is {width}, but the model has {heads} attention heads "
                f"= {heads // width} x {width} + {heads % width}: each rank takes as many as the others"
            )
    return errors


def mesh_line(trainer: TrainerConfig) -> Line:
    """Copies of the weights, and who works on a micro-batch."""
    shards, width = trainer.nproc // trainer.replicate, trainer.sequence_parallel
    parts = f"each micro-batch on {width} ranks" if width > 1 else "each rank with micro-batches of its own"
    compiled = {"auto": "compiled where there are GPUs", "on": "compiled", "off": "not compiled"}
    return (
        "trainer",
        f"{trainer.nproc} rank(s)",
        f"copies of the weights: {trainer.replicate}, each over {shards} rank(s); {parts}; "
        f"layers {compiled[trainer.compile]}",
    )
