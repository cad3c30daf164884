from __future__ import annotations

from flotilla_testing.tiny_stacks import stacks

__all__ = ["stacks"]
