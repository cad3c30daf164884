"""A run's sessions on trainer gangs: who learns, who only judges, and what they are told."""

from __future__ import annotations
