"""Keys of other programs for reinforcement learning, and the keys that mean the same here.

Invariants: a key of theirs is written as its last parts, as many as tell it apart; every key of ours exists in
`run.yaml` or `stack.yaml`, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flotilla_core.config.document import KeyPath

OURS = {
    # TRL
    "num_generations": "rollout.samples_per_prompt",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "generation_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "batching.tokens_per_microbatch",
    "steps_per_generation": "optimizer.steps_per_update",
    "num_iterations": "optimizer.epochs_per_update",
    "num_train_epochs": "steps",
    "epochs": "steps",
    "max_steps": "steps",
    "max_completion_length": "rollout.sampling.max_response_tokens",
    "max_new_tokens": "rollout.sampling.max_response_tokens",
    "max_tokens": "rollout.sampling.max_response_tokens",
    "min_new_tokens": "rollout.sampling.min_response_tokens",
    "temperature": "rollout.sampling.temperature",
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "delta": "algorithm.loss.dual_clip",
    "loss_type": "algorithm.aggregation.type",
    "scale_rewards": "algorithm.advantage.normalize_std",
    "reward_funcs": "rewards",
    "reward_weights": "rewards.weight",
    "train_dataset": "data.train",
    "eval_dataset": "evaluation.data",
    "eval_steps": "evaluation.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_updates",
    "warmup_ratio": "optimizer.warmup_updates",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.epsilon",
    "gradient_checkpointing": "batching.activation_checkpointing",
    "use_peft": "lora",
    "lora_r": "lora.rank",
    "lora.r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "model": "model",
    "model_name_or_path": "model",
    "output_dir": "state_dir",
    "report_to": "trackers",
    "run_name": "name",
    "bf16": "trainer.dtype",
    "torch_dtype": "trainer.dtype",
    "vllm_gpu_memory_utilization": "generator.memory_fraction",
    "vllm_tensor_parallel_size": "generator.tensor_parallel_size",
    "vllm_enable_sleep_mode": "generator.sleep_while_training",
    "vllm_importance_sampling_correction": "algorithm.correction.importance",
    # verl
    "train_files": "data.train",
    "val_files": "evaluation.data",
    "truncation": "data.overlong_prompts",
    "filter_overlong_prompts": "data.overlong_prompts",
    "val_before_train": "evaluation",
    "logger": "trackers",
    "prompt_key": "data.prompt_field",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.sampling.max_response_tokens",
    "response_length": "rollout.sampling.max_response_tokens",
    "train_batch_size": "rollout.prompts_per_step",
    "gen_batch_size": "rollout.dynamic_sampling.max_prompts_per_step",
    "filter_groups": "rollout.dynamic_sampling",
    "rollout.n": "rollout.samples_per_prompt",
    "val_kwargs.n": "evaluation.samples_per_prompt",
    "val_kwargs.temperature": "evaluation.temperature",
    "ppo_mini_batch_size": "optimizer.steps_per_update",
    "ppo_micro_batch_size": "batching.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "batching.tokens_per_microbatch",
    "log_prob_micro_batch_size_per_gpu": "batching.tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "batching.tokens_per_microbatch",
    "use_dynamic_bsz": "batching.tokens_per_microbatch",
    "use_remove_padding": "batching.packing",
    "ppo_epochs": "optimizer.epochs_per_update",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_warmup_steps": "optimizer.warmup_updates",
    "lr_warmup_steps_ratio": "optimizer.warmup_updates",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "loss_agg_mode": "algorithm.aggregation.type",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "use_kl_loss": "algorithm.kl.placement",
    "use_kl_in_reward": "algorithm.kl.placement",
    "target_kl": "algorithm.kl.target",
    "adv_estimator": "algorithm.advantage.type",
    "custom_reward_function": "rewards.reward",
    "total_epochs": "steps",
    "total_training_steps": "steps",
    "save_freq": "checkpoint.every_steps",
    "test_freq": "evaluation.every_steps",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "default_local_dir": "state_dir",
    "experiment_name": "name",
    "n_gpus_per_node": "trainer.nproc",
    "tensor_model_parallel_size": "generator.tensor_parallel_size",
    "ulysses_sequence_parallel_size": "trainer.sequence_parallel",
    "gpu_memory_utilization": "generator.memory_fraction",
    "free_cache_engine": "generator.sleep_while_training",
    "max_model_len": "generator.max_model_tokens",
    "max_num_seqs": "generator.max_running_samples",
    "enable_gradient_checkpointing": "batching.activation_checkpointing",
    "param_offload": "trainer.cpu_offload",
    "offload_policy": "trainer.cpu_offload",
}
"""Keys of run.yaml or stack.yaml, by the keys of other programs that mean the same."""

NOTES = {
    "per_device_train_batch_size": "counted in prompts of a whole step, on all devices together",
    "gradient_accumulation_steps": "the number of micro-batches follows from it",
    "ppo_mini_batch_size": "counted in optimizer steps of an update, not in samples",
    "num_train_epochs": "run plan shows the epochs that they make",
    "total_epochs": "run plan shows the epochs that they make",
    "epochs": "run plan shows the epochs that they make",
    "report_to": "a list of mappings such as {type: wandb}",
    "logger": "a list of mappings such as {type: wandb}",
    "val_before_train": "a run that evaluates does so before the first step too",
    "warmup_ratio": "counted in updates",
    "lr_warmup_steps_ratio": "counted in updates",
    "beta": "that of algorithm.type dpo is algorithm.beta",
}
"""The differences beside the name, by the key of the other program."""
_TURNS = "name an environment in `environment`, as {name: path.py:Class, max_turns: 8}: docs/environments.md"
NOT_OFFERED = {
    "tools": _TURNS,
    "tool_config_path": _TURNS,
    "multi_turn": _TURNS,
    "max_turns": _TURNS,
    "environment_factory": _TURNS,
    "judge": "name a judge in judges of stack.yaml, and in rewards of run.yaml as {judge: NAME}",
}
"""The reasons why this release has no such key, by the key of the other program; a loop of the user's own may do it."""
MOST_NAMED = 6
"""Keys that are named of one section of another program."""


def same_keys_here(path: KeyPath, value: Any) -> list[tuple[str, str, str]]:
    """Return (their key, ours, what differs) for an unknown key, or for the keys of an unknown section."""
    found = []
    for leaf in _leaves(path, value):
        names = [part for part in leaf if isinstance(part, str)]
        endings = (".".join(names[first:]) for first in range(len(names)))
        theirs = next((ending for ending in endings if ending in OURS), None)
        if theirs is not None:
            ours = OURS[theirs]
            if "critic" in names[:-1] and ours.startswith("optimizer."):
                ours = f"algorithm.critic.{ours}"
            found.append((".".join(names), ours, NOTES.get(theirs, "")))
    return found[:MOST_NAMED]


def not_offered(path: KeyPath, value: Any) -> str:
    """Return what this release does not do, where an unknown key, or a key of an unknown section, asks for that."""
    names = (part for leaf in _leaves(path, value) for part in leaf if isinstance(part, str))
    return next((NOT_OFFERED[name] for name in names if name in NOT_OFFERED), "")


def _leaves(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
