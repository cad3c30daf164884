"""Names of runs, instances, requests, groups, samples and updates, and the seeds derived from them.

Invariants: ids of groups, samples and updates are functions of their parts, so every service computes the
same one; everything else is unique. A derived seed depends on all its parts and on nothing else.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime

from flotilla_core.version import Version


def new_run_id(name: str) -> str:
    """Return a new name, for example arithmetic-20260314-0915-7f3a."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M}-{secrets.token_hex(2)}"


def new_instance_id(name: str) -> str:
    """Return a new name, for example generator-0-7f3a21; it differs after every restart."""
    return f"{name}-{secrets.token_hex(3)}"


def new_request_id() -> str:
    """Return an id for one call, including its retries."""
    return secrets.token_hex(8)


def group_id(run_id: str, epoch: int, prompt_index: int) -> str:
    """Return the id of one prompt in one pass over the data."""
    return f"{run_id}/{epoch}/{prompt_index}"


def prompt_of_group(group: str) -> tuple[int, int]:
    """Return the epoch and the prompt's index that `group_id` was given."""
    _, epoch, index = group.rsplit("/", 2)
    return int(epoch), int(index)


def sample_id(group: str, index: int) -> str:
    """Return the id of one response within a group."""
    return f"{group}/{index}"


def sample_seed(run_seed: int, sample_id: str) -> int:
    """Return the seed of a sample: it leaves out the run's name, so runs of the same seed draw the same."""
    _, _, place = sample_id.partition("/")
    return derive_seed(run_seed, place)


def update_id(run_id: str, version: Version) -> str:
    """Return the id of the update on one step's batch of a lineage, whether it moves the version or is skipped."""
    return f"{run_id}/{version}"


def derive_seed(*parts: str | int) -> int:
    """Return 63 bits that depend on every part and on their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(len(text).to_bytes(4, "little"))
        digest.update(text)
    return int.from_bytes(digest.digest(), "little") >> 1
