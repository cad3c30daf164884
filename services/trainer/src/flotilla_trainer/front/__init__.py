"""The front of the trainer: sessions, their updates, scores, checkpoints and weight groups. Free of torch."""

from __future__ import annotations
