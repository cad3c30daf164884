"""Works out what a run will do and cost, and whether it can work, before anything is loaded or trained."""

from __future__ import annotations

from flotilla_coordinator.plan.batching_choice import batching_of_run
from flotilla_coordinator.plan.chapter import remarks
from flotilla_coordinator.plan.gpu_memory import sleeps_in
from flotilla_coordinator.plan.plan import plan_run

__all__ = ["batching_of_run", "plan_run", "remarks", "sleeps_in"]
