"""Checkpoints as folders: how one is sealed, and those of a run. Free of torch: services and tools share it."""

from __future__ import annotations

from flotilla_core.checkpoint.manifest import Manifest
from flotilla_core.checkpoint.shelf import CheckpointShelf, not_written, on_disk

__all__ = ["CheckpointShelf", "Manifest", "not_written", "on_disk"]
