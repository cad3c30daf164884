"""Group policy gradient (GPG)."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


def gpg(outcomes: Outcomes, *, normalize_std: bool) -> Floats:
    """Group-relative advantages, scaled up by the share of samples whose group says something.

    Groups whose samples came to the same have no gradient; N / (N - M) for M samples in such groups makes up for their
    place in the mean over the update. Where these groups are left out they have no such place, and are not among N.
    """
    advantages = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    says = outcomes.group_sums(np.abs(advantages)) > 0
    speaking = max(int(outcomes.group_sizes[says].sum()), 1)
    scaled: Floats = np.asarray(advantages * (advantages.size / speaking))
    return scaled
