"""A sample in pieces: what generators wrote of it before they gave it up, and the last of them ended.

Invariants: each token keeps the log-probability and the version of its own time; a piece is decoded after all pieces
before it, with a seed of its own, because the first one's would draw the same numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flotilla.common.v1 import version_pb2
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_core import ids
from flotilla_core.tensors import from_tensor, to_tensor


@dataclass
class PartialSample:
    """The pieces of one sample, in order."""

    sample_id: str
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[version_pb2.VersionSpan] = field(default_factory=list)

    def add(self, piece: pb.GeneratedSample, most_tokens: int) -> None:
        """The next piece; one that leaves no room for a last one is drawn again."""
        if len(self.token_ids) + len(from_tensor(piece.token_ids)) < most_tokens:
            self._append(piece)

    def slot(self, run_seed: int) -> pb.SampleSlot:
        """What a generator is asked for."""
        written = len(self.token_ids)
        if not written:
            return pb.SampleSlot(sample_id=self.sample_id, seed=ids.sample_seed(run_seed, self.sample_id))
        return pb.SampleSlot(
            sample_id=self.sample_id,
            seed=ids.sample_seed(run_seed, f"{self.sample_id}/from/{written}"),
            prefix_token_ids=to_tensor(self.token_ids),
        )

    def whole(self, last: pb.GeneratedSample) -> pb.GeneratedSample:
        """The response with its last piece."""
        if not len(self.token_ids):
            return last
        self._append(last)
        return pb.GeneratedSample(
            sample_id=self.sample_id,
            token_ids=to_tensor(self.token_ids),
            logprobs=to_tensor(self.logprobs),
            finish_reason=last.finish_reason,
            version_spans=self.spans,
            timing=last.timing,
        )

    def _append(self, piece: pb.GeneratedSample) -> None:
        written = len(self.token_ids)
        for span in piece.version_spans:
            shifted = version_pb2.VersionSpan(start=written + span.start, end=written + span.end)
            if span.HasField("version"):
                shifted.version.CopyFrom(span.version)
            self.spans.append(shifted)
        self.token_ids = np.concatenate([self.token_ids, from_tensor(piece.token_ids)])
        self.logprobs = np.concatenate([self.logprobs, from_tensor(piece.logprobs)])
