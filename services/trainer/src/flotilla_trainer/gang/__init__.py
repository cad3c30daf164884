"""The gang of ranks as the front holds it: started, commanded, watched, replaced. Free of torch."""

from __future__ import annotations

from flotilla_trainer.gang.gang import Gang
from flotilla_trainer.gang.nursery import RankNursery
from flotilla_trainer.gang.plan import GangPlan

__all__ = ["Gang", "GangPlan", "RankNursery"]
