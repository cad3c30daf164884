"""Open, use and close weight groups on the trainer's side.

Where weights travel between GPUs, every rank takes part, after the receivers: it may share its GPU with one of them.

Invariants: at most one group is open, the one of the newest epoch; an older epoch is refused; a group can be closed
while a broadcast hangs in it, which costs neither the session nor the ranks; weights count as published when all ranks
that sent them sent the same; each group has a secret of its own, which only its members are told.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config.stack import BindConfig
from flotilla_core.errors import FailedPrecondition, Internal, InvalidRequest, StaleVersion
from flotilla_core.service import Activities
from flotilla_trainer.gang.plan import listening_host
from flotilla_trainer.gang.ranks import Gang

BACKENDS = {weights_pb2.WEIGHT_BACKEND_GLOO: "gloo", weights_pb2.WEIGHT_BACKEND_NCCL: "nccl"}
SECRET_BYTES = 32


class WeightGroups:
    """Opens, uses and closes the weight group of one epoch at a time."""

    def __init__(self, gang: Gang, bind: BindConfig, rank_timeout_s: float, activities: Activities) -> None:
        self._gang = gang
        self._bind = bind
        self._rank_timeout_s = rank_timeout_s
        self._activities = activities
        self._open: pb.OpenWeightGroupRequest | None = None
        self._newest_epoch = -1

    async def open(self, request: pb.OpenWeightGroupRequest) -> pb.OpenWeightGroupResponse:
        """Start the sender, which listens while members join in the background."""
        backend = BACKENDS.get(request.backend)
        if backend is None:
            name = weights_pb2.WeightBackend.Name(request.backend)
            raise InvalidRequest(
                f"weights cannot travel by {name}", where="backend", next_step="use gloo or nccl"
            )
        timeout_s = request.timeout.ToNanoseconds() / 1e9
        if request.world_size < 2 or request.bucket_bytes < 1 or timeout_s <= 0:
            raise InvalidRequest(
                "a weight group needs two members at least, a bucket size and a timeout",
                why=f"world_size={request.world_size}, bucket_bytes={request.bucket_bytes}, timeout={timeout_s:g} s",
            )
        if request.epoch <= self._newest_epoch:
            raise StaleVersion(
                f"epoch {request.epoch} is over", why=f"epoch {self._newest_epoch} was opened since"
            )
        # A group that an earlier coordinator left open may wait for members that never come.
        await self.close_any()
        others = self._gang.size - 1 if request.backend == weights_pb2.WEIGHT_BACKEND_NCCL else 0
        world_size = request.world_size + others
        senders = [0, *range(request.world_size, world_size)]
        secret = secrets.token_bytes(SECRET_BYTES)
        answers = await self._gang.command(
            "open_group",
            {
                "secret": secret.hex(),
                "host": listening_host(self._bind),
                "epoch": request.epoch,
                "world_size": world_size,
                "senders": senders,
                "backend": backend,
                "timeout_s": timeout_s,
                "bucket_bytes": request.bucket_bytes,
            },
        )
        self._open, self._newest_epoch = request, request.epoch
        opened = answers[0].fields
        group = weights_pb2.WeightGroup(
            run_id=request.run_id,
            epoch=request.epoch,
            backend=request.backend,
            host=self._bind.advertise_host or opened["host"],
            port=opened["port"],
            world_size=world_size,
            sender_ranks=senders,
            timeout=request.timeout,
            secret=secret,
        )
        manifest = weights_pb2.WeightManifest.FromString(bytes.fromhex(opened["manifest"]))
        return pb.OpenWeightGroupResponse(group=group, manifest=manifest)

    async def publish(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsResponse:
        """Send the weights that the ranks hold."""
        group = self._of_epoch(request.epoch)
        started = time.monotonic()
        timeout_s = group.timeout.ToNanoseconds() / 1e9
        with self._activities.doing(
            f"publishing weights to {group.world_size - 1} workers", run_id=request.run_id
        ):
            answers = await self._gang.command(
                "publish",
                {"epoch": request.epoch, "bucket_bytes": group.bucket_bytes},
                # The wire has its own deadline; the ranks are stuck only if that deadline did not end the broadcast.
                limit_s=timeout_s + self._rank_timeout_s,
            )
        sent = _agreed([answer.fields for answer in answers])
        elapsed = Duration()
        elapsed.FromNanoseconds(int((time.monotonic() - started) * 1e9))
        digests = weights_pb2.WeightDigests(
            version=request.policy_version,
            manifest_digest=sent["manifest_digest"],
            tensor_digests=sent["digests"],
        )
        return pb.PublishWeightsResponse(digests=digests, bytes=sent["bytes"], elapsed=elapsed)

    async def close(self, epoch: int) -> None:
        """Close the group of this epoch and end a running broadcast; do nothing if the group is already gone."""
        if self._open is not None and self._open.epoch == epoch:
            self._open = None
            await self._gang.urgently("abort_group", {"why": "the coordinator closed the weight group"})

    async def close_any(self) -> None:
        """Close the open group, if any."""
        if self._open is not None:
            await self.close(self._open.epoch)

    def forget(self) -> None:
        """Drop the record of the open group, because its ranks are gone."""
        self._open = None

    def forget_epochs(self) -> None:
        """Accept every epoch again: a new session counts its epochs from the beginning."""
        self._newest_epoch = -1

    def _of_epoch(self, epoch: int) -> pb.OpenWeightGroupRequest:
        if epoch < self._newest_epoch:
            raise StaleVersion(f"epoch {epoch} is over", why=f"epoch {self._newest_epoch} was opened since")
        if self._open is None or self._open.epoch != epoch:
            raise FailedPrecondition(
                f"no weight group of epoch {epoch} is open", next_step="call OpenWeightGroup first"
            )
        return self._open


def _agreed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks that sent say, if that is the same."""
    by_rank = {rank: sent for rank, sent in enumerate(answers) if sent}
    first, sent = next(iter(by_rank.items()))
    for rank, other in by_rank.items():
        if other["digests"] != sent["digests"]:
            raise Internal(
                f"ranks {first} and {rank} of the trainer sent different weights",
                where="PublishWeights",
                why="the gathered tensors have different digests",
                next_step="restart the trainer; if it happens again, look for faults of a GPU or of a link",
            )
    return sent
