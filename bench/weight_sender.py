"""The trainer's end of a weight group in a process of its own: new numbers for every publication, real digests."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flotilla.common.v1 import weights_pb2
from flotilla_testing.credentials import hand_ours_down
from flotilla_weights.manifest import Manifest

EPOCH = 1
TIMEOUT_S = 120


class WeightSender:
    """Publishes the checkpoint of a folder, a little changed each time, to one receiver."""

    def __init__(self, folder: Path, bucket_bytes: int) -> None:
        hand_ours_down()  # to both ends
        spawning = multiprocessing.get_context("spawn")
        self._wire, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, str(folder), bucket_bytes), daemon=True)
        self._process.start()
        port, secret, manifest = self._wire.recv()
        self.manifest = Manifest.from_proto(weights_pb2.WeightManifest.FromString(manifest))
        self.group = weights_pb2.WeightGroup(
            epoch=EPOCH,
            backend=weights_pb2.WEIGHT_BACKEND_GLOO,
            host="127.0.0.1",
            port=port,
            secret=secret,
            world_size=2,
            sender_ranks=[0],
        )
        self.group.timeout.FromSeconds(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join()

    def publish(self) -> list[int]:
        """Send the next numbers; the digests of what was sent."""
        self._wire.send("publish")
        digests: list[int] = self._wire.recv()
        return digests


def _serve(wire: Connection[Any, Any], folder: str, bucket_bytes: int) -> None:
    import torch
    from safetensors.torch import load_file

    from flotilla_weights.group import Sender

    torch.set_num_threads(1)
    weights = load_file(Path(folder) / "model.safetensors")
    manifest = Manifest.from_named(((n, t.dtype, t.shape) for n, t in weights.items()), bucket_bytes)
    sender = Sender.listen("127.0.0.1", EPOCH, 2, "gloo", TIMEOUT_S)
    wire.send((sender.port, sender.secret, manifest.to_proto().SerializeToString()))
    sender.connect(manifest)
    while wire.recv() == "publish":
        for tensor in weights.values():
            tensor.mul_(0.999)
        wire.send(sender.publish(manifest, [(spec.name, weights[spec.name]) for spec in manifest.tensors]))
