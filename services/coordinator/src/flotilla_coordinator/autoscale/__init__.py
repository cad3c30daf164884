"""How many generators a run needs: measured, decided, said or done."""

from __future__ import annotations

from flotilla_coordinator.autoscale.autoscaler import Autoscaler
from flotilla_coordinator.autoscale.idle_shares import IdleShares

__all__ = ["Autoscaler", "IdleShares"]
