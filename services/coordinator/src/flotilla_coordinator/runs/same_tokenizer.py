"""Token ids mean the same on both ends, or the run does not begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.errors import Mismatch
from flotilla_core.rpc import Replica


def require_same_tokenizer(replica: Replica[Any], tokenizer: Tokenizer, model: Path | str) -> None:
    """Refuse a service that was started with another tokenizer than the coordinator's."""
    digest = replica.registration.tokenizer_digest
    if digest and digest != tokenizer.digest:
        raise Mismatch(
            f"{replica.name} has another tokenizer than the coordinator",
            where=f"model {model}",
            why=f"digest {digest[:12]} there, {tokenizer.digest[:12]} here",
            next_step="start every service of the stack with model folders that have the same tokenizer",
        )
