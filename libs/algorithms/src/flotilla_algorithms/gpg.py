"""Group policy gradient (GPG)."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.difficulty import uniform_groups
from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


def gpg(outcomes: Outcomes, *, normalize_std: bool) -> Floats:
    """Group-relative advantages, scaled up by the share of samples whose group says something.

    Groups of equal rewards have no gradient; N / (N - M) for M samples in such groups makes up for their place in the
    mean over the update.
    """
    advantages = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    silent = outcomes.group_sizes[uniform_groups(outcomes)].sum()
    speaking = max(advantages.size - int(silent), 1)
    scaled: Floats = np.asarray(advantages * (advantages.size / speaking))
    return scaled
