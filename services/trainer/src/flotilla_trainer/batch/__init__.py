"""Samples of an update, from the wire to micro-batches: checked, laid out flat, cut into steps and packed."""

from __future__ import annotations
