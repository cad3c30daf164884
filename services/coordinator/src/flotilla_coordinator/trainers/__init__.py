"""Holds a run's sessions on trainer gangs: of models that learn, and of models that only score."""

from __future__ import annotations
