"""One whole update in float64, from the definitions of the papers: what the trainer's own mathematics is compared with.

Invariants: nothing here imports the code that it judges, flotilla_algorithms or a service; every denominator, mean and
deviation is written out where it is used; a step gives its loss and the gradient by the logits.
"""

from __future__ import annotations

from flotilla_testing.exact_update.rollouts import Policies, Rollouts
from flotilla_testing.exact_update.update import ExactUpdate, Setting, Step, exact_update

__all__ = ["ExactUpdate", "Policies", "Rollouts", "Setting", "Step", "exact_update"]
