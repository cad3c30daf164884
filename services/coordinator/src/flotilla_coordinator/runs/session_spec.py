"""The run's configuration as the trainer wants to hear it."""

from __future__ import annotations

from pathlib import Path

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_coordinator.runs.objective import objective
from flotilla_core.config import RunConfig

SCHEDULES = {
    "constant": pb.SCHEDULE_CONSTANT,
    "linear": pb.SCHEDULE_LINEAR,
    "cosine": pb.SCHEDULE_COSINE,
}

PACKINGS = {"auto": pb.PACKING_UNSPECIFIED, "on": pb.PACKING_ON, "off": pb.PACKING_OFF}


def session_spec(config: RunConfig, dump_dir: Path) -> pb.SessionSpec:
    """Everything that a policy session needs to know about a run."""
    optimizer, batching = config.optimizer, config.batching
    return pb.SessionSpec(
        role=pb.ROLE_POLICY,
        initial_weights=str(config.initial_weights or ""),
        objective=objective(config),
        optimizer=pb.Optimizer(
            learning_rate=optimizer.learning_rate,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            epsilon=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            schedule=SCHEDULES[optimizer.schedule],
            warmup_updates=optimizer.warmup_updates,
            final_lr_ratio=optimizer.final_lr_ratio,
            offload=optimizer.offload,
        ),
        batching=pb.Batching(
            tokens_per_microbatch=batching.tokens_per_microbatch,
            logprob_chunk_tokens=batching.logprob_chunk_tokens,
            packing=PACKINGS[batching.packing],
            activation_checkpointing=batching.activation_checkpointing,
        ),
        seed=config.seed,
        total_updates=config.steps,
        max_skipped_updates=optimizer.max_skipped_updates,
        dump_dir=str(dump_dir),
    )
