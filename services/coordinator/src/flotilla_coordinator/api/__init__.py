"""What the coordinator answers on the wire."""

from __future__ import annotations
