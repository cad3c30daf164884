"""Every policy loss that a run can name.

Invariant: each takes the tokens of a micro-batch and its parameters by keyword, and gives one loss a token; what it
knows of the update beyond its micro-batch came with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from flotilla_trainer.losses.cispo import cispo
from flotilla_trainer.losses.clip_cov import clip_cov
from flotilla_trainer.losses.dppo import dppo_kl, dppo_tv
from flotilla_trainer.losses.dro import dro
from flotilla_trainer.losses.gmpo import gmpo
from flotilla_trainer.losses.gspo import gspo
from flotilla_trainer.losses.kimi import kimi
from flotilla_trainer.losses.kl_cov import kl_cov
from flotilla_trainer.losses.policy_tokens import TokenLosses
from flotilla_trainer.losses.ppo import ppo
from flotilla_trainer.losses.raft_plus_plus import raft_plus_plus
from flotilla_trainer.losses.reinforce import reinforce
from flotilla_trainer.losses.sapo import sapo
from flotilla_trainer.losses.topr import topr

PolicyLoss = Callable[..., TokenLosses]

LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "kimi": kimi,
    "dro": dro,
    "raft_plus_plus": raft_plus_plus,
}
