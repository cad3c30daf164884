"""Every advantage that a run can name.

Invariant: each takes the outcomes and its parameters by keyword, and gives one number a sample or one a token.
"""

from __future__ import annotations

from collections.abc import Callable

from flotilla_algorithms.distill import distill
from flotilla_algorithms.gae import gae_of_values
from flotilla_algorithms.gdpo import gdpo_of_terms
from flotilla_algorithms.gpg import gpg
from flotilla_algorithms.grpo import grpo
from flotilla_algorithms.grpo_passk import grpo_passk
from flotilla_algorithms.opo import opo
from flotilla_algorithms.optimal_token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from flotilla_algorithms.outcomes import Floats
from flotilla_algorithms.pass_at_k import pass_at_k
from flotilla_algorithms.reinforce import reinforce
from flotilla_algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from flotilla_algorithms.remax import remax_of_greedy_rewards
from flotilla_algorithms.rloo import rloo
from flotilla_algorithms.step_reinforce import step_reinforce_of_turns

AdvantageFunction = Callable[..., Floats]

ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "grpo_passk": grpo_passk,
    "step_reinforce": step_reinforce_of_turns,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "gae": gae_of_values,
    "distill": distill,
    "gdpo": gdpo_of_terms,
    "remax": remax_of_greedy_rewards,
}
