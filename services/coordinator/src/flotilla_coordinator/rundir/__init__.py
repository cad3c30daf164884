"""The directory that a run leaves behind."""

from __future__ import annotations

from flotilla_coordinator.rundir.directory import RunDirectory

__all__ = ["RunDirectory"]
