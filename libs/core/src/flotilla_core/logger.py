"""The one door to structlog, through which it comes without rich.

Its console for developers, which no process of ours shows, would import rich and cost each start 0.1 s.
"""

from __future__ import annotations

from flotilla_core.optional_imports import left_out

with left_out("rich"):
    import structlog
    from structlog import get_logger
    from structlog.typing import EventDict

__all__ = ["EventDict", "get_logger", "structlog"]
