"""This package turns the samples of an update into micro-batches: it checks, flattens, splits and packs them."""

from __future__ import annotations
