"""The front of the trainer holds sessions, their updates, scores, checkpoints and weight groups, without torch."""

from __future__ import annotations
