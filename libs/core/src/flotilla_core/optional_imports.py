"""Leaves out packages that a dependency of ours imports where they are installed, and that we do not need of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_out(module: str) -> Iterator[None]:
    """Let the imports inside find that an optional `module` is not installed, unless it is loaded already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's own mark of what cannot be imported
    try:
        yield
    finally:
        del sys.modules[module]
