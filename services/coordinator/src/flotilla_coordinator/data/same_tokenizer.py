"""Refuses replicas whose tokenizer differs from the coordinator's.

Invariant: token ids mean the same in both processes, or the run does not begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flotilla_core.errors import Mismatch
from flotilla_data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flotilla_core.rpc import Replica

ReplicaT = TypeVar("ReplicaT", bound="Replica[Any]")


def of_same_tokenizer(
    replicas: Sequence[ReplicaT],
    tokenizer: Tokenizer,
    model: Path | str,
    refuse: Callable[[ReplicaT, Mismatch], None],
) -> list[ReplicaT]:
    """Return the replicas with the coordinator's tokenizer, and refuse the others; raise where none is left."""
    refused: list[tuple[ReplicaT, Mismatch]] = []
    for replica in replicas:
        try:
            require_same_tokenizer(replica, tokenizer, model)
        except Mismatch as error:
            refused.append((replica, error))
    if refused and len(refused) == len(replicas):
        raise refused[0][1]
    for replica, why in refused:
        refuse(replica, why)
    strangers = {id(replica) for replica, _ in refused}
    return [replica for replica in replicas if id(replica) not in strangers]


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
