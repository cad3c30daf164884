"""Makes the runs whose steps a client makes."""

from __future__ import annotations
