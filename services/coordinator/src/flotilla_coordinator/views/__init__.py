"""Read-only answers, each by one function: for gRPC, and for commands where no coordinator answers.

Invariants: nothing is written or changed here. An answer is the message that a client of the coordinator gets, so that
whoever prints it need not know who answered. What reads samples needs numpy, and is loaded when it is asked for: most
answers need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla_coordinator.views.samples import list_samples as list_samples
    from flotilla_coordinator.views.timeline import trace as trace

_MODULES = {"list_samples": "samples", "trace": "timeline"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
