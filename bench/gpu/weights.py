"""Weights from a trainer's process to a generator's process on one GPU, without vLLM: is it exact, and how fast is it.

    python bench/gpu/weights.py [--shape 0.6b|8b] [--rounds 8] [--busy] [--json FILE]

Checks the kernel of the digests against torch, moves float32 parameters as bfloat16 over two epochs, compares what
arrived with torch's rounding of the same parameters, byte by byte, and prints times beside plain copies of the same
bytes. `--busy` keeps the receiver's GPU multiplying matrices on another stream meanwhile. Any difference ends it with
an error. It needs torch, triton, protobuf and the sources of this repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "libs" / name / "src") for name in ("weights", "core", "proto")]

from flotilla.common.v1 import weights_pb2  # noqa: E402
from flotilla_weights import digest  # noqa: E402
from flotilla_weights.group import Receiver, Sender  # noqa: E402
from flotilla_weights.inbox import Inbox  # noqa: E402
from flotilla_weights.manifest import Manifest  # noqa: E402

GPU = torch.device("cuda", 0)
EPOCHS = 2
TIMEOUT_S = 60
BUCKET_BYTES = 256 << 20
SHAPES = {
    "tiny": {
        "hidden": 64,
        "inner": 160,
        "layers": 2,
        "heads": 4,
        "groups": 2,
        "tied": True,
        "vocabulary": 1000,
    },
    "0.6b": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "groups": 8, "tied": True},
    "8b": {"hidden": 4096, "inner": 12288, "layers": 36, "heads": 32, "groups": 8, "tied": False},
}
HEAD = 128


def shapes_of(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Qwen3 of this size."""
    model = {"vocabulary": 151_936, **SHAPES[name]}
    hidden, inner = model["hidden"], model["inner"]
    yield "model.embed_tokens.weight", (model["vocabulary"], hidden)
    for layer in range(model["layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (model["heads"] * HEAD, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (model["groups"] * HEAD, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (model["groups"] * HEAD, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, model["heads"] * HEAD)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not model["tied"]:
        yield "lm_head.weight", (model["vocabulary"], hidden)


def by_torch(tensors: list[torch.Tensor]) -> list[int]:
    """Digests without the kernel."""
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    return digest.resolve([digest._digest_by_torch(data) for data in flat])


def check_digests() -> None:
    """Tensors of many sizes, types and places have the digests that torch computes on the CPU."""
    assert digest.kernel_works(GPU), "the kernel does not work here"
    random = torch.Generator().manual_seed(1)
    sizes = [1, 3, 7, 8, 9, 1000, 32_768, 32_769, 262_143, 262_144, 262_145, 1_000_003, 5_000_000]
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        tensors = [torch.randint(-128, 127, (size,), generator=random).to(dtype) for size in sizes]
        expected = by_torch(tensors)
        assert digest.tensor_digests(tensor.to(GPU) for tensor in tensors) == expected, dtype
        moved = [tensor.to(GPU) for tensor in tensors]
        assert digest.resolve([digest.pending_digests(moved)]) == expected, dtype
        assert digest.resolve([digest.pending_digests([m[1:] for m in moved[1:]])]) == by_torch(
            [tensor[1:] for tensor in tensors[1:]]
        ), dtype
    print("digests of the kernel are those of torch")


def timed(work: Callable[[], Any], repeats: int = 10) -> float:
    """Median seconds of `work` on the GPU."""
    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def receive(pipe: Connection, busy: bool) -> None:
    """The generator's process: members of one epoch after the other."""
    torch.cuda.set_device(GPU)
    idle = threading.Event()
    if busy:
        threading.Thread(target=multiply, args=(idle,), daemon=True).start()
    for _ in range(EPOCHS):
        group = weights_pb2.WeightGroup.FromString(pipe.recv())
        manifest = Manifest.from_proto(weights_pb2.WeightManifest.FromString(pipe.recv()))
        receiver = Receiver(group, 1, manifest, GPU)
        receiver.connect()
        inbox = Inbox(receiver, manifest)
        while pipe.recv() == "receive":
            started = time.perf_counter()
            inbox.receive()
            seconds = time.perf_counter() - started
            staged = inbox.take()
            assert staged is not None
            again = by_torch([tensor for _, tensor in staged.weights])
            pipe.send((receiver._link.backend, seconds, inbox.digests, again))
            del staged
        receiver.close()
    idle.set()


def multiply(idle: threading.Event) -> None:
    """Work like that of a decoder: many short kernels."""
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        matrix = torch.randn(2048, 2048, device=GPU, dtype=torch.bfloat16)
        while not idle.is_set():
            for _ in range(50):
                matrix @ matrix
            torch.cuda.current_stream().synchronize()


def main() -> None:
    """Check and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.cuda.set_device(GPU)
    check_digests()

    parameters = {name: torch.randn(shape, device=GPU) for name, shape in shapes_of(asked.shape)}
    manifest = Manifest.from_named(
        ((name, torch.bfloat16, tensor.shape) for name, tensor in parameters.items()), BUCKET_BYTES
    )
    in_order = [(spec.name, parameters[spec.name]) for spec in manifest.tensors]
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    process = spawning.Process(target=receive, args=(theirs, asked.busy), daemon=True)
    process.start()
    publish_s, stage_s, carriers = [], [], set()
    for epoch in range(1, EPOCHS + 1):
        sender = Sender.listen("127.0.0.1", epoch, 2, "nccl", TIMEOUT_S)
        group = weights_pb2.WeightGroup(
            epoch=epoch,
            backend=weights_pb2.WEIGHT_BACKEND_NCCL,
            host=sender.host,
            port=sender.port,
            world_size=2,
        )
        group.timeout.FromSeconds(TIMEOUT_S)
        pipe.send(group.SerializeToString())
        pipe.send(manifest.to_proto().SerializeToString())
        sender.connect(manifest, GPU)
        for number in range(asked.rounds):
            for tensor in parameters.values():
                tensor.mul_(1.01)
            torch.cuda.synchronize()
            pipe.send("receive")
            started = time.perf_counter()
            sent = sender.publish(manifest, in_order)
            elapsed = time.perf_counter() - started
            carrier, staged_s, arrived, again = pipe.recv()
            assert sent == arrived == again, "what arrived is not what was sent"
            assert sent == by_torch([tensor.bfloat16() for _, tensor in in_order]), (
                "rounded otherwise than by torch"
            )
            carriers.add(carrier)
            if number:
                publish_s.append(elapsed)
                stage_s.append(staged_s)
        pipe.send("close")
        sender.close()
    process.join(30)

    assert carriers == {"cuda_ipc"}, carriers
    nbytes = manifest.nbytes
    bucket = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=GPU)
    other = torch.empty_like(bucket)
    views = list(bucket.split([tensor.numel() for _, tensor in in_order]))
    targets = [view.view(tensor.shape) for view, (_, tensor) in zip(views, in_order, strict=True)]
    found = {
        "shape": asked.shape,
        "busy": asked.busy,
        "gpu": torch.cuda.get_device_name(GPU),
        "bytes": nbytes,
        "publish_s": statistics.median(publish_s),
        "stage_s": statistics.median(stage_s),
        "stage_gb_s": nbytes / statistics.median(stage_s) / 1e9,
        "round_s": timed(lambda: torch._foreach_copy_(targets, [tensor for _, tensor in in_order])),
        "copy_s": timed(lambda: other.copy_(bucket)),
        "digest_s": timed(lambda: digest.pending_digests(targets)),
        "digest_by_torch_s": timed(lambda: [digest._digest_by_torch(v.view(torch.uint8)) for v in views], 2),
    }
    print(json.dumps(found, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
