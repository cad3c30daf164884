"""The engine without a model, for load and fault tests."""

from __future__ import annotations
