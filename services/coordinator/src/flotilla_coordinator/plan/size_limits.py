"""Refuses sizes that cannot work: more groups than the coordinator handles, or more bytes than its host or disk has.

Invariants: each refusal names the keys, the figure, the limit and what to lower. Counts have the same limit on every
host, because the groups of a step, and those of an evaluation, are admitted in one turn of the event loop. Bytes are
compared with the whole memory of the host and the whole disk of the stack. So a run that fitted once is not refused
because something else needs room now.

Checkpoints are counted as the loop makes them, one every `checkpoint.every_steps` and one at the end. Their size is
what the trainer writes: float32 weights and moments of all parameters that learn, and these weights once more in a
folder that other programs load. The old checkpoints stay until the newest one is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

from flotilla_coordinator.data.training_sets import held_out_sets
from flotilla_coordinator.plan.chapter import Entries, Line, refusal, shown_bytes
from flotilla_coordinator.plan.run_facts import RunFacts
from flotilla_coordinator.plan.sampling_lines import groups_under_way, held_bytes
from flotilla_core.config import RunConfig, StackConfig, TrainerConfig
from flotilla_core.findings import warning

MOST_GROUPS = 100_000
"""Limit of groups under way at one time; the event loop needs about 5 s to begin so many."""
MOST_SAMPLES = 2_000_000
"""Limit of samples under way at one time, or in one evaluation."""
LEDGER_ROW_BYTES = 600
"""Size of the rows of a sample and its events, which stay in the ledger until the run ends."""
ANSWER_BYTES_PER_TOKEN = 4 + 4 + 6 + 6
"""The token id, its log-probability, and the text of a held-out answer, twice: all are held until they are written."""
ANSWER_BYTES = 2048
ESTIMATE_MAY_BE_WRONG_BY = 2
_SIZES = ("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_staleness")
_GPUS = Path("/proc/driver/nvidia/gpus")
_CPU_FACTS = Path("/proc/cpuinfo")
_CPU_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}

PAYLOAD_BYTES_PER_TOKEN = 4 + 4 + 6  # token id, logprob, text in the ledger and in the samples file
MODEL = 4
STATE = 4 + 8
"""Bytes of a trainable parameter in a checkpoint: the weight and AdamW's two moments."""


def count_errors(config: RunConfig) -> Entries:
    """Refuse too many groups and samples at one time, by the configuration alone."""
    if config.loop == "coordinator" and config.draws_samples:
        groups = groups_under_way(config)
        samples = groups * config.rollout.samples_per_prompt
        under_way = "would be under way at one time, and"
        if groups > MOST_GROUPS:
            lower = _settings(config, "rollout.prompts_per_step", "rollout.max_staleness")
            yield refusal(f"{groups:,} groups {under_way} {MOST_GROUPS:,} is the limit: lower {lower}")
        if samples > MOST_SAMPLES:
            lower = _settings(config, *_SIZES)
            yield refusal(f"{samples:,} samples {under_way} {MOST_SAMPLES:,} is the limit: lower {lower}")
    if config.evaluation is not None:
        answers = sum(one.max_prompts * one.samples_per_prompt for one in held_out_sets(config))
        if answers > MOST_SAMPLES:
            lower = _settings(config, "evaluation.max_prompts", "evaluation.samples_per_prompt")
            limit = f"{MOST_SAMPLES:,} is the limit"
            yield refusal(f"an evaluation would ask for {answers:,} answers, and {limit}: lower {lower}")


def held_chapter(run: RunFacts) -> Entries:
    """Refuse what the coordinator would hold at one time, where its host has less memory."""
    config, evaluation = run.config, run.config.evaluation
    held = held_bytes(config, run.step_tokens)
    has = f"in the coordinator, and its host has {shown_bytes(run.host)}"
    if run.step_tokens and held > run.host:
        sampled = (
            "rollout.sampling.max_response_tokens"
            if config.environment is None
            else "environment.episode_tokens"
        )
        lower = _settings(config, *_SIZES, sampled)
        yield refusal(f"groups under way may take {shown_bytes(held)} {has}: lower {lower}")
    if evaluation is None or config.evaluates_pairs:
        return
    need = sum(
        file.kept * one.samples_per_prompt * (one.max_response_tokens * ANSWER_BYTES_PER_TOKEN + ANSWER_BYTES)
        for one, file in run.held_out
    )
    if need > run.host:
        limit = "rollout.sampling" if evaluation.max_response_tokens is None else "evaluation"
        lower = _settings(
            config, "evaluation.max_prompts", "evaluation.samples_per_prompt", f"{limit}.max_response_tokens"
        )
        yield refusal(f"the answers of an evaluation may take {shown_bytes(need)} {has}: lower {lower}")


def trainer_errors(config: RunConfig, trainer: TrainerConfig, rank_bytes: int, memory: int) -> Entries:
    """Refuse ranks that share the host's memory where twice that memory could not hold them; GPUs have their own.

    The bytes of a rank are all that it has, on its device and on its host.
    """
    ranks = trainer.ranks_here
    need = rank_bytes * ranks
    if trainer.attach is None and not has_gpus() and need > ESTIMATE_MAY_BE_WRONG_BY * memory:
        lower = _settings(config, "batching.tokens_per_microbatch", "batching.logprob_chunk_tokens")
        yield refusal(
            f"{ranks} trainer {'rank needs' if ranks == 1 else 'ranks need'} about "
            f"{shown_bytes(need)}, and the host has {shown_bytes(memory)} "
            f"and no GPU: lower {lower}, or the length of sequences"
        )


def host_errors(kept: dict[str, int], memory: int) -> Entries:
    """Refuse gangs that keep their weights in host memory where all of it is less; GPUs have the rest of them."""
    need = sum(kept.values())
    if has_gpus() and need > memory:
        shown = ", ".join(f"{section} {shown_bytes(each)}" for section, each in kept.items())
        yield refusal(
            f"what rests in host memory takes {shown_bytes(need)} ({shown}), and the host has {shown_bytes(memory)}: "
            f"set {' or '.join(f'{section}.cpu_offload' for section in kept)} to false, use lora, or spread the ranks "
            "over more hosts"
        )


def disk_chapter(run: RunFacts) -> Entries:
    """Say what a run writes; refuse what it writes for certain, however short its responses, on a smaller disk."""
    config, state_dir = run.config, run.stack.state_dir
    made, kept = _checkpoints(config)
    learning = (run.adapters or run.model).parameters + (run.critic.parameters if run.critic else 0)
    checkpoint = learning * (STATE + MODEL)
    if made:
        stay = f"every {config.checkpoint.every_steps} step(s) and at the end; the newest {kept} stay"
        yield Line("checkpoints", f"{made} x {shown_bytes(checkpoint)}", stay)
    else:
        lost = "checkpoint.every_steps is 0: after the loss of a trainer the run starts again at step 0"
        yield Line("checkpoints", "0", lost)
    samples = 0 if run.given else config.steps * run.samples
    rollouts = samples * run.response_tokens * PAYLOAD_BYTES_PER_TOKEN
    export = run.model.parameters * MODEL if config.export_final else 0
    certain = export + min(made, kept + 1) * checkpoint
    yield Line(
        "disk",
        f"at most {shown_bytes(rollouts + certain)}",
        f"samples in the ledger and the run directory {shown_bytes(rollouts)}, "
        f"exported model {shown_bytes(export)}, the rest checkpoints",
    )
    disk = shutil.disk_usage(existing(state_dir))
    whole = f"the disk of {state_dir} has {shown_bytes(disk.total)} in all"
    if certain > disk.total:
        yield refusal(
            f"checkpoints and the exported model take {shown_bytes(certain)}, and {whole}: lower "
            f"{_settings(config, 'checkpoint.keep')}, or set state_dir to a larger disk"
        )
    if (rows := samples * LEDGER_ROW_BYTES) > disk.total:
        lower = _settings(config, "steps", "rollout.prompts_per_step", "rollout.samples_per_prompt")
        yield refusal(
            f"the ledger's rows of the samples take {shown_bytes(rows)}, and {whole}: lower {lower}"
        )
    if rollouts + certain > disk.free:
        yield warning(
            f"the run may write {shown_bytes(rollouts + certain)}, but {state_dir} "
            f"has {shown_bytes(disk.free)} free"
        )


def _checkpoints(config: RunConfig) -> tuple[int, int]:
    """Return how many checkpoints a run makes, and how many of them stay."""
    every, best = config.checkpoint.every_steps, config.evaluation if config.checkpoint.best_by else None
    made = -(-config.steps // every) if every else 0
    if best is not None:
        made += config.steps // best.every_steps
    return made, min(made, config.checkpoint.keep + (best is not None))


def host_memory() -> int:
    """Return the bytes that the processes of this host, or of this container, may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical


def has_gpus() -> bool:
    """Return whether this host has GPUs."""
    return _GPUS.is_dir()


def processor_computes_bfloat16() -> bool:
    """Return whether this host's processor has instructions for bfloat16."""
    return bool(_CPU_BFLOAT16 & set(_CPU_FACTS.read_text().split()))


def bfloat16_warnings(stack: StackConfig) -> Iterator[str]:
    """Warn of bfloat16 on a processor that has no instructions for it."""
    sections = {"trainer": stack.trainer.attach is None, "generator": stack.generator.engine == "vllm"}
    asked = [
        f"{name}.dtype"
        for name, here in sections.items()
        if here and getattr(stack, name).dtype == "bfloat16"
    ]
    if asked and not has_gpus() and not processor_computes_bfloat16():
        yield (
            f"{' and '.join(asked)} {'is' if len(asked) == 1 else 'are'} bfloat16, and this processor has no "
            f"instructions for it ({', '.join(sorted(_CPU_BFLOAT16))}): steps take several times as long "
            "than in float32"
        )


def existing(path: Path) -> Path:
    """Return the nearest folder that exists."""
    path = path.absolute()
    while not os.path.exists(path):
        path = path.parent
    return path


def _settings(config: RunConfig, *keys: str) -> str:
    """List keys with their values, the last of them after `or`."""
    shown = [f"{key} = {reduce(getattr, key.split('.'), config)}" for key in keys]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
