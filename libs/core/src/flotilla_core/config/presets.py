"""Algorithms by name: the values that `algorithm.type` gives to keys that the file leaves out.

Invariants: a preset always names its advantage and its loss; the file wins key by key, and a section of another
type than the preset's starts from that type's own defaults. Presets made for engines that differ from the trainer
do not fail because of that difference.
"""

from __future__ import annotations

from typing import Any

PPO, GRPO = {"type": "ppo"}, {"type": "grpo"}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": {"type": "gae", "whiten": True}, "loss": PPO, "critic": {}},
    "pf_ppo": {
        "advantage": {"type": "gae", "whiten": True},
        "loss": PPO,
        "critic": {},
        "sample_weights": {"by_reward": "pow"},
    },
    "distillation": {"advantage": {"type": "distill"}, "loss": PPO},
    "grpo": {"advantage": GRPO, "loss": PPO},
    "dr_grpo": {
        "advantage": {"type": "grpo", "normalize_std": False},
        "loss": PPO,
        "aggregation": {"type": "constant"},
    },
    "dapo": {
        "advantage": {"type": "grpo", "drop_uniform_groups": True},
        "loss": {"type": "ppo", "clip_high": 0.28},
    },
    "rloo": {
        "advantage": {"type": "rloo"},
        "loss": {"type": "reinforce"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "reinforce": {
        "advantage": {"type": "reinforce"},
        "loss": {"type": "reinforce"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "reinforce_plus_plus": {"advantage": {"type": "reinforce_plus_plus"}, "loss": PPO},
    "reinforce_plus_plus_baseline": {"advantage": {"type": "reinforce_plus_plus_baseline"}, "loss": PPO},
    "opo": {"advantage": {"type": "opo"}, "loss": {"type": "reinforce"}},
    "gpg": {"advantage": {"type": "gpg"}, "loss": {"type": "reinforce"}},
    "pass_at_k": {"advantage": {"type": "pass_at_k"}, "loss": PPO},
    "gdpo": {"advantage": {"type": "gdpo"}, "loss": PPO},
    "grpo_passk": {"advantage": {"type": "grpo_passk"}, "loss": PPO},
    "step_reinforce": {"advantage": {"type": "step_reinforce"}, "loss": PPO},
    "gigpo": {"advantage": {"type": "gigpo"}, "loss": PPO},
    "optimal_token_baseline": {"advantage": {"type": "optimal_token_baseline"}, "loss": PPO},
    "tir_optimal_token_baseline": {"advantage": {"type": "tir_optimal_token_baseline"}, "loss": PPO},
    "lite_ppo": {
        "advantage": {"type": "reinforce", "reward_normalization": {"mean": "group", "std": "batch"}},
        "loss": PPO,
    },
    "remax": {
        "advantage": {"type": "remax"},
        "loss": {"type": "reinforce"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "gspo": {
        "advantage": GRPO,
        "loss": {"type": "gspo"},
        "aggregation": {"type": "sequence_mean_of_token_mean"},
        # Its clip is narrower than the numeric difference of engine and trainer. Against the rollout it would cut
        # sequences because of that difference, which affects correct samples and not wrong ones.
        "correction": {"proximal": "trainer"},
    },
    "gmpo": {
        "advantage": GRPO,
        "loss": {"type": "gmpo"},
        "aggregation": {"type": "sequence_mean_of_token_mean"},
    },
    "sapo": {
        "advantage": GRPO,
        "loss": {"type": "sapo"},
        "aggregation": {"type": "sequence_mean_of_token_mean"},
    },
    "cispo": {"advantage": GRPO, "loss": {"type": "cispo"}},
    "clip_cov": {"advantage": GRPO, "loss": {"type": "clip_cov"}},
    "kl_cov": {"advantage": GRPO, "loss": {"type": "kl_cov"}},
    "dppo_tv": {"advantage": GRPO, "loss": {"type": "dppo_tv"}},
    "dppo_kl": {"advantage": GRPO, "loss": {"type": "dppo_kl"}},
    "topr": {
        "advantage": {"type": "grpo", "normalize_std": False},
        "loss": {"type": "topr"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "kimi": {
        "advantage": {"type": "grpo", "normalize_std": False},
        "loss": {"type": "kimi"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "dro": {
        "advantage": {"type": "grpo", "normalize_std": False},
        "loss": {"type": "dro"},
        "aggregation": {"type": "sequence_mean_of_token_sum"},
    },
    "raft_plus_plus": {
        # The reward itself: a sample with reward 0 teaches nothing.
        "advantage": {"type": "reinforce"},
        "loss": {"type": "raft_plus_plus"},
        "aggregation": {"type": "sequence_mean_of_token_mean"},
    },
    "tis_grpo": {
        "advantage": GRPO,
        "loss": PPO,
        "correction": {"proximal": "trainer", "importance": "token", "fail_at": None},
    },
    "icepop_grpo": {
        "advantage": GRPO,
        "loss": PPO,
        "correction": {"proximal": "trainer", "importance": "icepop", "fail_at": None},
    },
}


def with_preset(written: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the section `algorithm` as written, merged over the preset of this name."""
    preset = PRESETS[name]
    return preset | {key: _over(preset.get(key), value) for key, value in written.items()}


def _over(base: Any, value: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(value, dict):
        return value
    another = "type" in value and value["type"] != base.get("type")
    return value if another else base | value
