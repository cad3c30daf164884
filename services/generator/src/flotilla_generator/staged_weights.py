"""A version that arrived, and whether it is what the sender sent.

Invariants: nothing here changes anything; every disagreement names the tensors that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import WeightsMismatch
from flotilla_core.version import Version
from flotilla_weights.manifest import Manifest

NAMED = 5
"""Tensors that a message names before it only counts."""


@dataclass(frozen=True)
class StagedWeights:
    """The weights that are staged: in addition to the live ones, or in their place."""

    version: Version
    manifest: Manifest
    digests: tuple[int, ...]
    elapsed_s: float
    in_place: bool = False
    """True where they replaced the live ones as they arrived."""

    def disagreement_with(self, expected: weights_pb2.WeightDigests) -> str:
        """Describe how the staged weights differ from the sent ones; empty if they do not."""
        version = Version.from_proto(expected.version)
        if version != self.version:
            return f"digests of version {version} were given"
        if expected.manifest_digest != self.manifest.digest:
            return "the sender published another manifest"
        sent = tuple(expected.tensor_digests)
        if sent != self.digests:
            return differing(self.manifest, self.digests, sent, "arrived otherwise than sent")
        return ""


def require_whole(manifest: Manifest, required: Mapping[str, Sequence[int]] | None) -> None:
    """A manifest must bring exactly the tensors of the model: vLLM would not notice one that is missing."""
    if required is None:
        return
    given = {spec.name: spec.shape for spec in manifest.tensors}
    faults = [f"missing: {name}" for name in required if name not in given]
    faults += [f"extra: {name}" for name in given if name not in required]
    faults += [
        f"{name} is {list(given[name])} instead of {list(shape)}"
        for name, shape in required.items()
        if name in given and given[name] != shape
    ]
    if faults:
        raise WeightsMismatch(
            "the manifest does not fit this replica's model",
            why=_listed(faults),
            next_step="trainer and generator must load the same model",
        )


def differing(manifest: Manifest, ours: tuple[int, ...], theirs: tuple[int, ...], what: str) -> str:
    """Describe the tensors whose digests differ, or a wrong number of them."""
    if len(ours) != len(theirs):
        return f"{len(theirs)} digests for {len(ours)} tensors"
    wrong = [
        spec.name
        for spec, mine, other in zip(manifest.all_tensors, ours, theirs, strict=True)
        if mine != other
    ]
    return f"{what}: {_listed(wrong)}"


def _listed(names: list[str]) -> str:
    rest = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
