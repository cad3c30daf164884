"""The options of an update, and what each needs to mean something.

Invariant: a key that no table here names is found in the models of the configuration, and fails until it has values.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from flotilla_core.config import PolicyConfig
from flotilla_core.config.data import DynamicSamplingConfig
from flotilla_testing.option_axes import Axes, Choice, Settings, document

LIMIT = 7
"""rollout.sampling.max_response_tokens."""
TERM_WEIGHTS = (1.0, 0.5)
USER = Path(__file__).with_name("functions_of_a_user.py")
USERS = (f"{USER}:powered",)

A, L, C, K = "algorithm.advantage", "algorithm.loss", "algorithm.correction", "algorithm.kl"
T = "algorithm.teacher"
W = "algorithm.sample_weights"
WEIGHTED = [
    {f"{C}.importance": kind, f"{C}.proximal": "trainer"}
    for kind in ("token", "segment", "sequence", "icepop", "icepop_sequence")
]
PLACED: list[Settings] = [{f"{K}.placement": "loss"}, {f"{K}.placement": "reward"}]

AXES = Axes(
    values={
        f"{A}.type": [f"{USER}:powered"],
        f"{A}.parameters of {USER}:powered": [{"power": 2.0}],
        f"{A}.clip": [0.4],
        f"{A}.reward_clip": [0.8],
        f"{A}.overlong.buffer_tokens": [3],
        f"{A}.overlong.penalty": [0.7],
        f"{A}.reward_normalization.clip": [0.5],
        f"{A}.reward_normalization.scale": [2.0],
        f"{A}.keep_mean_above": [0.5],
        f"{A}.keep_mean_below": [0.9],
        f"{A}.gamma": [0.8],
        f"{A}.lam": [0.7],
        f"{A}.step_weight": [0.5],
        f"{A}.k": [2],
        f"{A}.right_at": [0.5],
        f"{A}.coefficient": [0.6],
        f"{A}.reward_weight": [0.5],
        f"{A}.weights": [(0.3, 1.2)],
        f"{A}.teachers": [{"math": 0.7, "code": 0.3}, {"code": 1.0}],
        f"{A}.teacher_field": ["domain"],
        f"{L}.type": [f"{USER}:soft"],
        f"{L}.parameters of {USER}:soft": [{"power": 2.0}],
        f"{L}.clip_low": [0.1],
        f"{L}.clip_high": [0.15],
        f"{L}.clip_low of cispo": [0.4],
        f"{L}.clip_high of cispo": [0.4],
        f"{L}.dual_clip": [1.3],
        f"{L}.tau_positive": [2.0],
        f"{L}.tau_negative": [3.0],
        f"{L}.share": [0.35],
        f"{L}.covariance_low": [-0.5],
        f"{L}.covariance_high": [0.3],
        f"{L}.penalty": [0.4],
        f"{L}.limit": [0.03],
        f"{L}.limit of dppo_kl": [0.01],
        f"{L}.limit_low": [0.02],
        f"{L}.limit_low of dppo_kl": [0.004],
        f"{L}.ratio_cap": [1.1],
        f"{L}.beta": [0.4],
        f"{L}.negative_cap": [0.7],
        f"{L}.tau": [0.5],
        "algorithm.aggregation.constant_tokens": [5],
        f"{K}.coefficient": [0.3],
        f"{K}.target": [0.05],
        f"{K}.horizon_samples": [50],
        # The scenes have five tokens.
        f"{T}.top_k": [2],
        f"{T}.coefficient": [0.4],
        f"{C}.importance_cap": [1.2],
        f"{C}.importance_floor": [0.9],
        f"{C}.sequence_low": [0.9],
        f"{C}.sequence_high": [1.1],
        f"{C}.staleness_decay": [0.5],
        # Each measure and each of what it is taken over.
        f"{C}.rejection": [
            ({"measure": "k1", "over": "token", "low": 0.55, "high": 1.7},),
            ({"measure": "k2", "over": "sequence_sum", "high": 0.25},),
            ({"measure": "k3", "over": "sequence_mean", "high": 0.08},),
            ({"measure": "difference", "over": "sequence_max", "low": -0.15, "high": 0.2},),
        ],
        f"{W}.power": [3.0],
        f"{W}.by_difficulty.easiest": [0.8],
        f"{W}.by_difficulty.hardest": [3.0],
        f"{W}.by_length.shortest": [3.0],
        f"{W}.by_length.longest": [0.2],
        "algorithm.entropy_coefficient": [0.1],
        "algorithm.entropy_cap": [1.0],
        "algorithm.critic.value_clip": [0.05, None],
        "algorithm.critic.warmup_steps": [1],
        "rollout.dynamic_sampling.max_prompts_per_step": [7],
    },
    needs={
        f"{A}.type=gae": [{"algorithm.critic": {}}],
        "algorithm.critic": [{f"{A}.type": "gae"}],
        f"{A}.teacher_field": [{f"{A}.teachers": {"math": 1.0, "code": 1.0}}],
        f"{A}.overlong": [{f"{A}.overlong.buffer_tokens": 4}],
        "algorithm.aggregation.constant_tokens": [{"algorithm.aggregation.type": "constant"}],
        "algorithm.entropy_cap": [{"algorithm.entropy_coefficient": 0.1}],
        f"{K}.estimator": PLACED,
        f"{K}.estimator=full": PLACED[:1],
        f"{K}.coefficient": PLACED,
        f"{K}.target": PLACED,
        f"{K}.horizon_samples": [{f"{K}.target": 0.02, **place} for place in PLACED],
        f"{C}.importance": [{f"{C}.proximal": "trainer"}, {f"{C}.proximal": "interpolated"}],
        f"{C}.importance_cap": WEIGHTED,
        f"{C}.importance_floor": WEIGHTED[3:],
        f"{C}.normalize_importance": WEIGHTED,
        f"{W}.power": [{f"{W}.by_reward": "pow"}],
    },
    beside={
        # Of a group that has no advantages the entropy alone is left in a sum, which it does not weigh down.
        "algorithm.aggregation.type=token_sum": {"algorithm.entropy_coefficient": 0.1},
        # Without a bound most advantages undo what is done to all rewards of a group alike.
        f"{A}.reward_normalization": {
            f"{A}.reward_normalization.mean": "batch",
            f"{A}.reward_normalization.clip": 0.6,
        },
        f"{A}.reward_normalization.mean": {f"{A}.reward_normalization.clip": 0.6},
        f"{A}.reward_normalization.std": {f"{A}.reward_normalization.clip": 0.6},
        f"{A}.reward_normalization.scale": {f"{A}.type": "reinforce"},
        f"{A}.baseline=none": {f"{A}.normalize_std": False},
        f"{L}.type=clip_cov": {f"{L}.share": 0.2, f"{L}.covariance_low": 0.1},
        f"{L}.type=kl_cov": {f"{L}.share": 0.2},
        f"{A}.type=pass_at_k": {f"{A}.k": 3},
        f"{K}.placement": {f"{K}.coefficient": 0.2},
        f"{K}.estimator": {f"{K}.coefficient": 0.2},
        f"{K}.target": {f"{K}.coefficient": 0.2, f"{K}.horizon_samples": 100},
        f"{K}.horizon_samples": {f"{K}.coefficient": 0.2},
        # Where all tokens come there are no others.
        f"{T}.tail": {f"{T}.top_k": 3},
    },
    outside={
        "algorithm.type": "fills in the other keys, and every one of these is tried",
        f"{K}.reference": "says who holds the reference, not what comes of it",
        f"{T}.teachers": "says who answers, not what comes of it",
        f"{T}.teacher_field": "the same",
        f"{C}.warn_at": "tells of a distance and changes no update",
        f"{C}.fail_at": "refuses an update and changes none",
        "algorithm.critic.optimizer": "takes the step that these gradients are for",
        "algorithm.critic.initial_weights": "says where the critic starts",
    },
)
CHOICES = [
    *AXES.choices(PolicyConfig, "algorithm"),
    Choice("rollout.dynamic_sampling", {}),
    *(
        Choice(f"rollout.dynamic_sampling.{name}", value, ({"rollout.dynamic_sampling": {}},))
        for name in DynamicSamplingConfig.model_fields
        for value in AXES.values[f"rollout.dynamic_sampling.{name}"]
    ),
]


OWNERS: dict[str, set[str]] = {}
"""Keys that belong to some types of their section alone, and to which."""
for _choice in CHOICES:
    for _section in (A, L):
        if _choice.key.startswith(f"{_section}.") and f"{_section}.type" in _choice.needs[0]:
            OWNERS.setdefault(_choice.key, set()).add(_choice.needs[0][f"{_section}.type"])

BELOW_ZERO = {
    "ppo": ("clip_low", "dual_clip"),
    "gspo": ("clip_low",),
    "gmpo": ("clip_low",),
    "clip_cov": ("clip_low",),
    "sapo": ("tau_negative",),
    "dppo_tv": ("limit_low",),
    "dppo_kl": ("limit_low",),
    "topr": ("negative_cap",),
}
"""What each loss does with negative advantages alone, which a few advantages never are."""

ASKED_FOR_BY = {f"{A}.drop_uniform_groups": "rollout.dynamic_sampling"}
"""What a key asks for, another one sees to already: both may stand there, as the preset `dapo` has it."""


def makes_no_sense(settings: Settings) -> bool:
    """Whether these settings have to be refused, and no others."""
    section = {name: settings.get(f"{name}.type") for name in (A, L)}
    kind, loss = section[A] or "grpo", section[L] or "ppo"
    has = settings.__contains__
    placement = settings.get(f"{K}.placement", "none")
    importance = settings.get(f"{C}.importance", "none")
    proximal = settings.get(f"{C}.proximal", "rollout")
    weighs = (
        importance != "none" or has(f"{C}.rejection") or has(f"{C}.sequence_low") or has(f"{C}.sequence_high")
    )
    has_ratio = loss != "reinforce"
    normalises = any(key.startswith(f"{A}.reward_normalization") for key in settings)
    shaped = normalises or any(key.startswith((f"{A}.reward_clip", f"{A}.overlong")) for key in settings)
    running = "running" in (
        settings.get(f"{A}.reward_normalization.mean"),
        settings.get(f"{A}.reward_normalization.std"),
    )
    divides = settings.get(f"{A}.normalize_std", kind in ("grpo", "grpo_passk", "step_reinforce", "gigpo"))
    baseline = settings.get(f"{A}.baseline", "group")
    own_scale = kind not in ("gae", *USERS) and (
        (divides and (kind != "grpo" or baseline != "running"))
        or has(f"{A}.whiten")
        or kind in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "distill")
    )
    chosen = any(has(f"{A}.{key}") for key in ("drop_uniform_groups", "keep_mean_above", "keep_mean_below"))
    dynamic = any(key.startswith("rollout.dynamic_sampling") for key in settings)
    has_critic = any(key.startswith("algorithm.critic") for key in settings)
    imitates = kind == "distill" and not settings.get(f"{A}.reward_weight")
    return any(
        [
            placement == "none" and any(key.startswith(K) for key in settings),
            has(f"{K}.horizon_samples") and not has(f"{K}.target"),
            placement == "reward" and settings.get(f"{K}.estimator") == "full",
            placement == "reward" and (kind in ("gdpo", "pass_at_k") or imitates),
            has(f"{K}.target") and has_critic,
            has_critic != (kind == "gae"),
            has("algorithm.shuffle_rewards") and (kind == "gdpo" or imitates),
            has(f"{A}.whiten") and kind in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"),
            has(f"{A}.whiten") and imitates and has(f"{A}.coefficient"),
            shaped and (kind in ("gdpo", "pass_at_k") or imitates),
            kind == "remax" and (normalises or any(key.startswith(f"{A}.overlong") for key in settings)),
            kind == "step_reinforce" and baseline == "none" and divides,
            kind == "grpo" and baseline == "running" and running,
            has_critic and running,
            kind == "grpo_passk"
            and not has(f"{A}.whiten")
            and (loss == "raft_plus_plus" or any(has(f"{L}.{key}") for key in BELOW_ZERO.get(loss, ()))),
            has(f"{A}.reward_normalization.scale") and own_scale and placement != "reward",
            imitates and (chosen or dynamic),
            imitates and any(key.startswith((f"{W}.by_reward", f"{W}.by_difficulty")) for key in settings),
            # One for each prompt, of several that count alike.
            has(f"{A}.teacher_field") and [*settings.get(f"{A}.teachers", {}).values()] != [1.0, 1.0],
            # Of several for one sample nobody has the likeliest tokens.
            any(key.startswith(T) for key in settings)
            and len(settings.get(f"{A}.teachers", {})) > 1
            and not has(f"{A}.teacher_field"),
            has(f"{W}.power") and settings.get(f"{W}.by_reward") != "pow",
            has(f"{C}.normalize_importance") and (importance == "none" or proximal != "trainer"),
            importance != "none" and has_ratio and proximal == "rollout",
            proximal != "rollout" and not has_ratio and not weighs,
            has(f"{C}.importance_cap") and importance == "none",
            has(f"{C}.importance_floor") and not importance.startswith("icepop"),
            has("algorithm.aggregation.constant_tokens")
            and settings.get("algorithm.aggregation.type") != "constant",
            *(
                any(is_foreign(key, name, chosen_kind) for key in settings)
                for name, chosen_kind in ((A, kind), (L, loss))
            ),
        ]
    )


def is_foreign(key: str, section: str, kind: str) -> bool:
    """Whether a key belongs to other types of a section alone."""
    owners = OWNERS.get(key)
    return key.startswith(f"{section}.") and owners is not None and kind not in owners


def run_of(settings: Settings) -> dict[str, Any]:
    """The document of a run with these settings."""
    made = document(settings)
    # Only an environment names states; the limit of its episodes is that of the samples.
    acts = settings.get(f"{A}.type") == "gigpo"
    return made | {
        "environment": {"name": "frozen_lake", "episode_tokens": LIMIT} if acts else None,
        "name": "pairs",
        "steps": 2,
        "data": {"train": "/train.jsonl"},
        "rewards": [{"reward": "exact", "weight": weight} for weight in TERM_WEIGHTS],
        "rollout": {
            "prompts_per_step": 3,
            "sampling": {"max_response_tokens": LIMIT},
            **made.get("rollout", {}),
        },
    }


def without(key: str, settings: Settings) -> Settings:
    """The settings with the key at its default."""
    return {name: value for name, value in settings.items() if name != key and not name.startswith(f"{key}.")}


def refines(choice: Choice) -> bool:
    """Whether it is a detail of another option, as a limit is one of a loss and an estimator one of a divergence."""
    stands_alone = (f"{A}.type", f"{L}.type", f"{C}.importance", "algorithm.critic")
    return choice.key not in stands_alone and any(choice.needs)


def together(one: Choice, other: Choice) -> Settings:
    """Both keys, with what they need as far as it does not contradict them."""
    explicit = {one.key: one.value, other.key: other.value}
    beside = one.beside | other.beside
    for mine, theirs in itertools.product(one.needs, other.needs):
        parts = [
            {key: value for key, value in mine.items() if key != one.key},
            {key: value for key, value in theirs.items() if key != other.key},
            explicit,
        ]
        if all(
            left[key] == right[key]
            for left, right in itertools.combinations(parts, 2)
            for key in left.keys() & right.keys()
        ):
            return beside | parts[0] | parts[1] | explicit
    return beside | one.needs[0] | other.needs[0] | explicit


def cannot_stand_together(one: Choice, other: Choice) -> bool:
    """Whether they are two values of one key, or belong to two types of one section.

    A key that several types have is tried with each of them by itself.
    """
    if one.key == other.key:
        return True
    for mine, theirs in ((one, other), (other, one)):
        for key in (f"{A}.type", f"{L}.type"):
            wanted, there = mine.needs[0].get(key), theirs.needs[0].get(key)
            if wanted is None:
                continue
            if there not in (None, wanted):
                return True
            if theirs.key == key and theirs.value != wanted and theirs.value in OWNERS.get(mine.key, ()):
                return True
    return False
