"""What a worker runs: a built-in reward or a function of the user's, with its parameters.

Invariants: a target is plain data and travels as JSON; two targets with equal keys behave alike, so a worker
loads each once. A file that changed on disk is another target.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """Something that scores samples in a worker."""

    kind: Literal["builtin", "file", "entry_point"]
    source: str
    """Name of the built-in, absolute path of the file, or module of the entry point."""
    function: str = ""
    """Name within the file or module."""
    parameters: dict[str, Any] = field(default_factory=dict)
    stamp: str = ""
    """State of the file when the target was made."""

    @cached_property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
