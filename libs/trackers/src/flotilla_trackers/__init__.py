"""Shows runs in trackers: TensorBoard, Weights & Biases, MLflow and Trackio, several at once.

Each tracker of a run is a process of its own (`feed`), which reads the files of the run and gives them to the client of
the tracker. The coordinator (`follow`) starts it, hears how it goes and ends it, and waits for nothing of it.
"""

from __future__ import annotations

SHOWS = "shows the run"
"""The words in the notice of a tracker that says where people find the run."""
