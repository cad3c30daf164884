"""The trainer's side of weight synchronisation, as the front sees it.

Invariants: at most one group is open, the one of the newest epoch; an older epoch is refused; giving a group up works
while a broadcast is stuck in it, and costs neither the session nor the ranks.
"""

from __future__ import annotations

import socket
import time

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config.stack import BindConfig
from flotilla_core.errors import FailedPrecondition, InvalidRequest, StaleVersion
from flotilla_core.service import Activities
from flotilla_trainer.gang.ranks import Gang

BACKENDS = {weights_pb2.WEIGHT_BACKEND_GLOO: "gloo", weights_pb2.WEIGHT_BACKEND_NCCL: "nccl"}
EVERY_ADDRESS = ("0.0.0.0", "::")


class WeightGroups:
    """Opens, uses and gives up the group of one epoch."""

    def __init__(self, gang: Gang, bind: BindConfig, rank_timeout_s: float, activities: Activities) -> None:
        self._gang = gang
        self._bind = bind
        self._rank_timeout_s = rank_timeout_s
        self._activities = activities
        self._open: pb.OpenWeightGroupRequest | None = None
        self._newest_epoch = -1

    async def open(self, request: pb.OpenWeightGroupRequest) -> pb.OpenWeightGroupResponse:
        """Let the sender listen; members join in the background."""
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
        # What an earlier coordinator left open may wait for members that never come.
        await self.close_any()
        answers = await self._gang.command(
            "open_group",
            {
                "host": self._listening_host(),
                "epoch": request.epoch,
                "world_size": request.world_size,
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
            world_size=request.world_size,
            sender_ranks=[0],
            timeout=request.timeout,
        )
        manifest = weights_pb2.WeightManifest.FromString(bytes.fromhex(opened["manifest"]))
        return pb.OpenWeightGroupResponse(group=group, manifest=manifest)

    async def publish(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsResponse:
        """Broadcast the weights that the ranks hold."""
        group = self._of_epoch(request.epoch)
        started = time.monotonic()
        timeout_s = group.timeout.ToNanoseconds() / 1e9
        with self._activities.doing(
            f"publishing weights to {group.world_size - 1} workers", run_id=request.run_id
        ):
            answers = await self._gang.command(
                "publish",
                {"epoch": request.epoch, "bucket_bytes": group.bucket_bytes},
                # The wire has its own deadline; the ranks are stuck only when that one did not end it.
                limit_s=timeout_s + self._rank_timeout_s,
            )
        sent = answers[0].fields
        elapsed = Duration()
        elapsed.FromNanoseconds(int((time.monotonic() - started) * 1e9))
        digests = weights_pb2.WeightDigests(
            version=request.policy_version,
            manifest_digest=sent["manifest_digest"],
            tensor_digests=sent["digests"],
        )
        return pb.PublishWeightsResponse(digests=digests, bytes=sent["bytes"], elapsed=elapsed)

    async def close(self, epoch: int) -> None:
        """Give up the group of this epoch and a broadcast under way; a group that is gone already is fine."""
        if self._open is not None and self._open.epoch == epoch:
            self._open = None
            await self._gang.urgently("abort_group", {"why": "the coordinator closed the weight group"})

    async def close_any(self) -> None:
        """Give up whatever is open."""
        if self._open is not None:
            await self.close(self._open.epoch)

    def forget(self) -> None:
        """The ranks that held the group are gone, or about to open another one."""
        self._open = None

    def forget_epochs(self) -> None:
        """A new session counts its epochs from the beginning."""
        self._newest_epoch = -1

    def _of_epoch(self, epoch: int) -> pb.OpenWeightGroupRequest:
        if epoch < self._newest_epoch:
            raise StaleVersion(f"epoch {epoch} is over", why=f"epoch {self._newest_epoch} was opened since")
        if self._open is None or self._open.epoch != epoch:
            raise FailedPrecondition(
                f"no weight group of epoch {epoch} is open", next_step="call OpenWeightGroup first"
            )
        return self._open

    def _listening_host(self) -> str:
        """An address of this host, where rank 0 runs; it also says which interface the weights take."""
        if self._bind.host not in EVERY_ADDRESS:
            return self._bind.host
        advertised = self._bind.advertise_host
        if advertised and _is_local(advertised):
            return advertised
        return socket.gethostbyname(socket.gethostname())


def _is_local(host: str) -> bool:
    """Whether one can listen there; what peers dial may be a NAT's address, or a name of one."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True
