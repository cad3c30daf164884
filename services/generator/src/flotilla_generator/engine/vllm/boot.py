"""The start of vLLM: environment, arguments, and the differences between CPU and GPU.

Invariants: `prepare_environment` runs before vLLM is imported anywhere in the process; a variable that the user has
set wins, and so does an option of `generator.engine_options`: it reaches vLLM as it is, or the engine does not start.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.config.training import bucket_size_mib
from flotilla_core.errors import InvalidConfig
from flotilla_core.gpu_shares import ring_bytes, share_beside
from flotilla_core.logger import get_logger
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.vllm.parent_watch import SERVICE_PID

CACHE = Path("cache") / "vllm"
"""Where a stack keeps what its engines compile, below its folder."""
WORKER_EXTENSION = "flotilla_generator.engine.vllm.worker.WeightWorker"
SCHEDULER = "flotilla_generator.engine.vllm.scheduler.recording_scheduler"

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stdout",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a peer that goes away is reported by us, in one line
    "VLLM_PLUGINS": "",  # our extension needs no plugin, and scanning entry points costs start-up time
}
GPU_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "INFO",  # a start takes long there: the log says when each of its phases ended
}
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # a compiled helper on the logprobs path costs 3 to 21 s at the first request
    "VLLM_CPU_CI_ENV": "1",  # skips the compile warm-up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its own choice pins every replica of a host to the same cores
}

CPU_KV_CACHE_GIB = 1.0
CPU_BATCHED_TOKENS = 8192
GPU_BATCHED_TOKENS = 16_384
"""Tokens of one step at most. vLLM takes 2,048 for an engine inside a service, which cuts prompts into many steps."""

QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""Quantizations as vLLM names them: one scale for each output of a matrix and one for each token, both from what is
multiplied."""
FP8_CAPABILITY = (8, 9)

WHOLE_LOGITS = {"head_dtype": "float32"}
"""The product of the head keeps what it was summed in. Rounded to bfloat16, logits of 20 would be wrong by 0.06, which
is most of what sets a generator apart from its trainer. On a GPU this costs nothing: the sampler wants float32."""

LEAST_BESIDE_WEIGHTS = 0.1
"""Share of a GPU that an engine needs for its cache and its steps."""

KEYS_OF_OPTIONS = {
    "model": "model",
    "dtype": "generator.dtype",
    "tensor_parallel_size": "generator.tensor_parallel_size",
    "max_model_len": "generator.max_model_tokens",
    "max_num_seqs": "generator.max_running_samples",
    "gpu_memory_utilization": "generator.memory_fraction",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "enforce_eager": "generator.enforce_eager",
    "enable_sleep_mode": "generator.sleep_while_training",
    "quantization": "generator.quantization",
    "quantization_config": "generator.quantization",
}
"""Options that are refused, since another key of the stack sets them."""
DECIDED_OPTIONS = {
    "skip_tokenizer_init": "a generator takes and returns token ids",
    "generation_config": "the sampling of a run is what its file says, and nothing else",
    "logprobs_mode": "log-probabilities are those that the tokens were sampled with",
    "scheduling_policy": "requests have priorities",
    "scheduler_cls": "it records log-probabilities and versions",
    "worker_extension_cls": "it receives weights",
    "data_parallel_size": "each replica is one engine: raise generator.replicas",
    "logits_processors": "the trainer would compute log-probabilities without them",
    "pipeline_parallel_size": "each worker receives the weights of all layers",
}
"""Options that are refused, and why they are as they are."""

T = TypeVar("T")

logger = get_logger()


def prepare_environment(config: GeneratorConfig, cache: Path | None = None) -> None:
    """Set what vLLM reads from the environment, here and in its children; `cache` keeps all code that they compile."""
    import torch

    # As vLLM does: another look for GPUs starts CUDA, which no fork of this process could use any more.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    variables = dict(ENVIRONMENT)
    if cache is not None:
        variables |= {
            "VLLM_CACHE_ROOT": str(cache),
            "FLASHINFER_WORKSPACE_BASE": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
    if torch.cuda.is_available():
        variables |= GPU_ENVIRONMENT
    else:
        # The other half of the cores is for the trainer, and for decoding's own front end.
        threads = max(1, len(os.sched_getaffinity(0)) // (2 * config.tensor_parallel_size))
        variables |= CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ[SERVICE_PID] = str(os.getpid())


def engine_arguments(
    config: GeneratorConfig,
    checkpoint: Checkpoint,
    worker_extension: str = WORKER_EXTENSION,
    *,
    eager: bool = True,
    share: float | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`; an `eager` engine neither compiles nor captures graphs.

    It takes this `share` of its GPU, or what the stack says.
    """
    import torch

    arguments: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": config.max_running_samples,
        "enforce_eager": eager,
        "worker_extension_cls": worker_extension,
        "scheduler_cls": SCHEDULER,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,  # they cost time for each token, and nobody reads them
    }
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = config.memory_fraction if share is None else share
        if config.kv_cache_gib is not None:
            # vLLM then measures nothing, which a neighbour on the same GPU would disturb.
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
        if config.sleep_while_training:
            # By an allocator whose memory can be unmapped, under addresses that stay.
            arguments["enable_sleep_mode"] = True
        arguments["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
        if not eager:
            sizes = graph_sizes(config.max_running_samples)
            arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if config.quantization is None:
            # It measures kernels that only quantized layers have.
            arguments["enable_flashinfer_autotune"] = False
            if config.dtype == "bfloat16":
                arguments["hf_overrides"] = WHOLE_LOGITS
        else:
            arguments["quantization"] = QUANTIZATIONS[config.quantization]
    else:
        arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gib or CPU_KV_CACHE_GIB) * (1 << 30))
        arguments["disable_custom_all_reduce"] = True
        # A seeded request whose prompt is prefilled in pieces kills the worker: vLLM winds its random generator
        # back, which a CPU generator cannot do. Whole prompts only, and room for the longest one in a step.
        arguments["enable_chunked_prefill"] = False
        longest = config.max_model_tokens or checkpoint.longest_sequence
        arguments["max_num_batched_tokens"] = max(longest, CPU_BATCHED_TOKENS)
        if config.tensor_parallel_size == 1:
            # In the engine's own process, as on a GPU: between two processes every step waits in a tight loop for the
            # other one. Given as a class, since vLLM takes the name for one that cannot set its number of threads,
            # which our environment has done.
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            arguments["distributed_executor_backend"] = UniProcExecutor
    return arguments | _with_overrides(config.engine_options, arguments.get("hf_overrides", {}))


def _with_overrides(options: dict[str, Any], ours: dict[str, str]) -> dict[str, Any]:
    """Return the options of a user, whose overrides of the model's configuration do not end ours for other keys."""
    given = options.get("hf_overrides")
    return options | {"hf_overrides": ours | given} if ours and isinstance(given, dict) else options


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of samples that get a graph, up to `most`; a step is filled up to the next one.

    By default vLLM captures 83 graphs of each kind for 1,024 samples, and none for more than 512 of them. Steps of an
    eighth make that 43, and above 64 samples at most an eighth of a step is for nothing.
    """
    sizes = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        sizes.append(size)
        size += max(8, size // 64 * 8)
    return [*sizes, most]


def require_quantization(config: GeneratorConfig) -> None:
    """Refuse a quantization that the device cannot compute with."""
    import torch

    if config.quantization is None:
        return
    name, next_step = f"generator.quantization {config.quantization}", "remove generator.quantization"
    if not torch.cuda.is_available():
        raise InvalidConfig(f"{name} needs a GPU, and this host has none", next_step=next_step)
    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise InvalidConfig(
            f"{name} needs a GPU with compute capability 8.9 or newer (Ada, Hopper)",
            why=f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}",
            next_step=next_step,
        )


def engine_share(config: GeneratorConfig, checkpoint: Checkpoint, total: int) -> float:
    """Return the share of a GPU of so many bytes that the engine takes.

    If the stack does not say it, the engine leaves room for the standby, if it has one, and for weights on their way. A
    stack that was placed says it. A standby that has no room beside the weights at all lies in host memory.
    """
    import torch

    if config.sets("memory_fraction") or config.kv_cache_gib is not None:
        return config.memory_fraction
    size = getattr(torch, config.dtype).itemsize
    tensors = [math.prod(shape) * size for shape in checkpoint.tensors.values()]
    weights = sum(tensors) // config.tensor_parallel_size
    rings = ring_bytes(sum(tensors), tensors, bucket_size_mib("auto", "nccl") << 20)
    standby = weights if config.apply_weights == "prefetch" else 0
    share = min(config.memory_fraction, share_beside(standby, rings, total))
    return share if share * total - weights >= LEAST_BESIDE_WEIGHTS * total else config.memory_fraction


def check_options(options: Iterable[str], known: Collection[str]) -> None:
    """Refuse the options that vLLM does not know, and those that are not the user's to set."""
    for option in options:
        name = f"generator.engine_options.{option}"
        if (key := KEYS_OF_OPTIONS.get(option)) is not None:
            raise InvalidConfig(f"{name} has a key of its own", next_step=f"set {key} instead")
        if (why := DECIDED_OPTIONS.get(option)) is not None:
            raise InvalidConfig(f"{name} cannot be set", why=why, next_step="remove it")
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            raise InvalidConfig(
                f"{name} is no engine argument of this release of vLLM"
                + (f"; did you mean {near[0]}?" if near else "")
            )


def booted(boot: Callable[[bool], T], config: GeneratorConfig) -> T:
    """Return what `boot` makes, told whether to be eager; on GPUs it is not, unless the stack says so or that fails."""
    import torch

    if config.enforce_eager is not None or not torch.cuda.is_available():
        return boot(config.enforce_eager is not False)
    try:
        return boot(False)
    # vLLM raises whatever stopped the engine: a missing compiler, a failed capture, or too little memory for graphs.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "the engine did not start with compiled graphs, and starts without them: decoding is slower",
            why=f"{type(error).__name__}: {error}",
            next_step="set generator.enforce_eager to true to start like this at once, or see the log of the engine",
        )
        return boot(True)


def accepts(function: Any, parameter: str) -> bool:
    """Return whether this release of vLLM knows a parameter."""
    return parameter in inspect.signature(function).parameters
