"""A trainer's end of a weight group that stops half-way and waits to be killed.

Arguments: checkpoint, bytes of a bucket, epoch. Says its port and secret, then "halfway".
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest


def send(checkpoint: str, bucket_bytes: int, epoch: int) -> None:
    """Publish the first half of the tensors."""
    weights = load_file(checkpoint)
    manifest = Manifest.from_named(((n, t.dtype, t.shape) for n, t in weights.items()), bucket_bytes)
    sender = Sender.listen("127.0.0.1", epoch, 2, "gloo", 60.0)
    say(f"{sender.port} {sender.secret.hex()}")
    sender.connect(manifest)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, spec in enumerate(manifest.tensors):
            if index == len(manifest.tensors) // 2:
                say("halfway")
                threading.Event().wait()
            yield spec.name, weights[spec.name]

    sender.publish(manifest, tensors())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
