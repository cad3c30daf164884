"""Weights from trainer processes to generator processes, without vLLM: are they exact, and how fast do they come.

    python bench/gpu/weights.py [--shape 0.6b|8b] [--gpus 1|2] [--pairs N] [--rounds 8] [--bucket-mib 512 1024]
                                [--busy] [--fresh] [--out DIR]

`--gpus 1`: both ends share the first GPU. `--gpus 2`: the sender has the first GPU and the receiver the second; the
same processes also broadcast the same bytes by bare NCCL, in messages of 16 to 4,096 MiB, for comparison. `--pairs N`:
each of N GPUs has a sender and a receiver. `--busy` measures again while the processes and GPUs of the receivers
multiply matrices. There is a line for each size of buckets, and for each of these two. Receivers copy what
is lent to them into a second model, or with `--fresh` keep what arrived as it is.

A round is counted from the call of `publish`, with receivers that wait already, until both ends have the digests of
all tensors. Every epoch ends with a check: digests by the kernel are those of torch, at both ends, and what arrived is
what torch rounds the parameters to. Any difference ends the bench with an error. Without a GPU it runs in small on the
CPU, by gloo. It needs torch, triton, protobuf and the sources of this repository.
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
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "libs" / name / "src") for name in ("weights", "core", "proto", "testing")]

from flotilla.common.v1 import weights_pb2  # noqa: E402
from flotilla_testing.credentials import hand_ours_down  # noqa: E402
from flotilla_weights import digest  # noqa: E402
from flotilla_weights.group import Receiver, Sender  # noqa: E402
from flotilla_weights.manifest import Manifest  # noqa: E402
from flotilla_weights.process_group import connected_group, let_go  # noqa: E402
from flotilla_weights.wire import Link  # noqa: E402

HAS_GPU = torch.cuda.is_available()
BACKEND = "nccl" if HAS_GPU else "gloo"
BACKENDS = {"nccl": weights_pb2.WEIGHT_BACKEND_NCCL, "gloo": weights_pb2.WEIGHT_BACKEND_GLOO}
EPOCHS = 2
TIMEOUT_S = 60
BUCKET_BYTES = 512 << 20
RAW_MIB = (16, 64, 128, 256, 512, 1024, 2048, 4096)
RAW_REPEATS = 5
SETTLE_S = 0.02
"""After the receivers said that they wait: they are inside `receive` by then."""
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


def device_of(gpu: int) -> torch.device:
    """A GPU, made the current one of this process, or the CPU."""
    if not HAS_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def wait_for(device: torch.device) -> None:
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def by_torch(tensors: list[torch.Tensor]) -> list[int]:
    """Digests without the kernel."""
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    return digest.resolve([digest._digest_by_torch(data) for data in flat])


def check_digests(device: torch.device) -> None:
    """Tensors of many sizes, types and places have the digests that torch computes on the CPU."""
    assert digest.kernel_works(device), "the kernel does not work here"
    random = torch.Generator().manual_seed(1)
    sizes = [1, 3, 7, 8, 9, 1000, 32_768, 32_769, 262_143, 262_144, 262_145, 1_000_003, 5_000_000]
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        tensors = [torch.randint(-128, 127, (size,), generator=random).to(dtype) for size in sizes]
        expected = by_torch(tensors)
        assert digest.tensor_digests(tensor.to(device) for tensor in tensors) == expected, dtype
        moved = [tensor.to(device) for tensor in tensors]
        assert digest.resolve([digest.pending_digests(moved)]) == expected, dtype
        assert digest.resolve([digest.pending_digests([m[1:] for m in moved[1:]])]) == by_torch(
            [tensor[1:] for tensor in tensors[1:]]
        ), dtype


def timed(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of `work` on the GPU."""
    seconds = []
    for _ in range(repeats + 2):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def raw_sizes(nbytes: int) -> list[int]:
    """The message sizes of bare broadcasts, up to all bytes in one."""
    sizes = [mib << 20 for mib in RAW_MIB if mib << 20 < nbytes]
    return [*sizes, min(nbytes, RAW_MIB[-1] << 20)]


class RawBroadcast:
    """The same bytes between the same two processes by the same kind of process group, and nothing else."""

    def __init__(self, store: Any, rank: int, device: torch.device, nbytes: int) -> None:
        self._group = connected_group(
            BACKEND, store, rank, 2, peer_host="127.0.0.1", device=device, timeout_s=TIMEOUT_S
        )
        self._device = device
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def move(self, size: int) -> float:
        """Broadcast everything once; return when it had arrived."""
        options = torch._C._distributed_c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for work in [self._group.broadcast([piece], options) for piece in self._memory.split(size)]:
            work.wait()
        wait_for(self._device)
        return time.monotonic()

    def close(self) -> None:
        """Leave, and give the memory back."""
        let_go(self._group, BACKEND, [])
        del self._memory
        if HAS_GPU:
            torch.cuda.empty_cache()


def store_at(port: int, master: bool) -> Any:
    """The store where the two ends of bare broadcasts meet."""
    limit = timedelta(seconds=TIMEOUT_S)
    return torch._C._distributed_c10d.TCPStore(
        "127.0.0.1", port, is_master=master, timeout=limit, wait_for_workers=False
    )


class Landing:
    """Where a receiver puts what arrives."""

    def __init__(self, manifest: Manifest, device: torch.device, fresh: bool) -> None:
        self._fresh = fresh
        self._copies = {
            spec.name: torch.empty(0 if fresh else spec.shape, dtype=spec.torch_dtype, device=device)
            for spec in manifest.tensors
        }
        self._targets: dict[str, list[torch.Tensor]] = {}

    def take(self, receiver: Receiver) -> list[int]:
        """Receive one publication."""
        return receiver.receive(self._copies.update if self._fresh else self._copy, lent=not self._fresh)

    def digests(self) -> list[int]:
        """Of what has landed, by torch."""
        return by_torch(list(self._copies.values()))

    def _copy(self, named: list[tuple[str, torch.Tensor]]) -> None:
        targets = self._targets.setdefault(named[0][0], [self._copies[name] for name, _ in named])
        torch._foreach_copy_(targets, [tensor for _, tensor in named])


def receive(pipe: Connection, gpu: int, fresh: bool) -> None:
    """A generator's process: obeys what comes over the pipe."""
    device = device_of(gpu)
    idle = threading.Event()
    raw: RawBroadcast | None = None
    while (order := pipe.recv())[0] != "end":
        match order:
            case ("raw", port, nbytes):
                raw = RawBroadcast(store_at(port, master=False), 1, device, nbytes)
            case ("move", size):
                assert raw is not None
                pipe.send("waits")
                pipe.send(raw.move(size))
            case ("join", group, rank, described):
                if raw is not None:
                    raw.close()
                    raw = None
                manifest = Manifest.from_proto(weights_pb2.WeightManifest.FromString(described))
                receiver = Receiver(weights_pb2.WeightGroup.FromString(group), rank, manifest, device)
                receiver.connect()
                landing = Landing(manifest, device, fresh)
            case ("take", check):
                pipe.send("waits")
                arrived = landing.take(receiver)
                ended = time.monotonic()
                carrier = receiver._link.lanes[0].carrier
                pipe.send((ended, carrier, arrived, landing.digests() if check else []))
            case ("leave",):
                receiver.close()
            case ("busy",):
                idle.clear()
                threading.Thread(target=multiply, args=(idle, device), daemon=True).start()
            case ("idle",):
                idle.set()


def send(pipe: Connection, gpu: int, shape: str) -> None:
    """The process of another rank of the trainer, which holds the same parameters as the first one."""
    rank = TrainerRank(shape, device_of(gpu))
    while (order := pipe.recv())[0] != "end":
        match order:
            case ("join", port, secret, place, epoch, world_size, senders, bucket_bytes):
                rank.cut(bucket_bytes)
                link = Link(epoch, place, world_size, BACKEND, TIMEOUT_S, senders)
                rank.sender = Sender(link, "127.0.0.1", port, secret)
                rank.sender.connect(rank.manifest, rank.device)
            case ("publish",):
                rank.learn()
                pipe.send("waits")
                pipe.recv()
                pipe.send((rank.publish(), time.monotonic()))
            case ("leave",):
                rank.sender.close()


class TrainerRank:
    """Parameters in float32, and an end of the weight group."""

    def __init__(self, shape: str, device: torch.device) -> None:
        torch.manual_seed(1)
        self._parameters = {name: torch.randn(size, device=device) for name, size in shapes_of(shape)}
        self.device = device
        self.manifest: Manifest
        self.in_order: list[tuple[str, torch.Tensor]]
        self.sender: Sender

    def cut(self, bucket_bytes: int) -> None:
        """Send them in buckets of this size from now on."""
        named = ((name, torch.bfloat16, tensor.shape) for name, tensor in self._parameters.items())
        self.manifest = Manifest.from_named(named, bucket_bytes).in_enough_buckets()
        self.in_order = [(spec.name, self._parameters[spec.name]) for spec in self.manifest.tensors]

    def learn(self) -> None:
        """Change all of them, the same way on every rank."""
        for _, tensor in self.in_order:
            tensor.mul_(1.01)
        wait_for(self.device)

    def publish(self) -> list[int]:
        """Send all of them; return the digests."""
        return self.sender.publish(self.manifest, self.in_order)

    def rounded(self) -> list[int]:
        """The digests of what should have arrived, by torch."""
        return by_torch([tensor.bfloat16() for _, tensor in self.in_order])


def multiply(idle: threading.Event, device: torch.device) -> None:
    """Work like that of a decoder: many short kernels."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
        while not idle.is_set():
            for _ in range(50):
                matrix @ matrix
            torch.cuda.current_stream().synchronize()


class Processes:
    """Processes that obey orders, one for each GPU that is named."""

    def __init__(self, target: Callable[..., None], gpus: list[int], *arguments: Any) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._processes, self.pipes = [], []
        for gpu in gpus:
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=target, args=(theirs, gpu, *arguments), daemon=True)
            process.start()
            self._processes.append(process)
            self.pipes.append(ours)

    def tell(self, *order: Any) -> None:
        """Give all of them one order."""
        for pipe in self.pipes:
            pipe.send(order)

    def answers(self) -> list[Any]:
        """The next answer of each."""
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(2 * TIMEOUT_S):
                raise TimeoutError("a process of the bench does not answer")
            answers.append(pipe.recv())
        return answers

    def wait_until_they_wait(self) -> None:
        """Return when the order that was given is under way."""
        self.answers()
        time.sleep(SETTLE_S)

    def end(self) -> None:
        """Have all of them leave."""
        self.tell("end")
        for process in self._processes:
            process.join(30)


def measure_raw(receivers: Processes, device: torch.device, nbytes: int) -> dict[str, float]:
    """Seconds of bare broadcasts by message size, in MiB."""
    store = store_at(0, master=True)
    receivers.tell("raw", store.port, nbytes)
    raw = RawBroadcast(store, 0, device, nbytes)
    found = {}
    for size in raw_sizes(nbytes):
        seconds = []
        for _ in range(RAW_REPEATS + 1):
            receivers.tell("move", size)
            receivers.wait_until_they_wait()
            started = time.monotonic()
            ended = max(raw.move(size), *receivers.answers())
            seconds.append(ended - started)
        found[f"{size / (1 << 20):g}"] = statistics.median(seconds[1:])
    raw.close()
    return found


def join(rank: TrainerRank, others: Processes, receivers: Processes, epoch: int) -> None:
    """Form the group of an epoch."""
    first = 1 + len(receivers.pipes)
    world_size = first + len(others.pipes)
    senders = [0, *range(first, world_size)]
    rank.sender = Sender.listen("127.0.0.1", epoch, world_size, BACKEND, TIMEOUT_S, senders)
    group = weights_pb2.WeightGroup(
        epoch=epoch,
        backend=BACKENDS[BACKEND],
        host=rank.sender.host,
        port=rank.sender.port,
        secret=rank.sender.secret,
        world_size=world_size,
        sender_ranks=senders,
    )
    group.timeout.FromSeconds(TIMEOUT_S)
    described = rank.manifest.to_proto().SerializeToString()
    for place, pipe in enumerate(receivers.pipes, 1):
        pipe.send(("join", group.SerializeToString(), place, described))
    for place, pipe in enumerate(others.pipes, first):
        told = (place, epoch, world_size, senders, rank.manifest.bucket_bytes)
        pipe.send(("join", group.port, group.secret, *told))
    rank.sender.connect(rank.manifest, rank.device)


def measure_rounds(
    receivers: Processes, others: Processes, rank: TrainerRank, epochs: range, rounds: int
) -> dict[str, Any]:
    """Seconds of whole publications, over several epochs."""
    publish_s, round_s, carriers = [], [], set()
    for epoch in epochs:
        join(rank, others, receivers, epoch)
        for number in range(rounds):
            check = number == rounds - 1
            others.tell("publish")
            rank.learn()
            others.answers()
            receivers.tell("take", check)
            receivers.wait_until_they_wait()
            started = time.monotonic()
            others.tell("now")
            sent = rank.publish()
            published = ended = time.monotonic()
            for also_sent, at in others.answers():
                assert sent == also_sent or BACKEND == "gloo", "ranks sent different weights"
                ended = max(ended, at)
            for arrived_at, carrier, arrived, landed in receivers.answers():
                assert sent == arrived, "what arrived is not what was sent"
                assert not check or arrived == landed, (
                    "what landed is not what arrived, by the digests of torch"
                )
                carriers.add(carrier)
                ended = max(ended, arrived_at)
            assert not check or sent == rank.rounded(), "rounded otherwise than by torch"
            if number:
                publish_s.append(published - started)
                round_s.append(ended - started)
        receivers.tell("leave")
        others.tell("leave")
        rank.sender.close()
    nbytes = rank.manifest.nbytes
    return {
        "carriers": sorted(carriers),
        "publish_s": statistics.median(publish_s),
        "agreed_s": statistics.median(round_s),
        "agreed_gb_s": nbytes / statistics.median(round_s) / 1e9,
        "all_agreed_s": [round(seconds, 5) for seconds in round_s],
    }


def parts(device: torch.device, in_order: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Seconds of what a sender does with all of its bytes at once, where there is room for that."""
    sources = [tensor for _, tensor in in_order]
    bucket = torch.empty(sum(tensor.numel() for tensor in sources), dtype=torch.bfloat16, device=device)
    views = list(bucket.split([tensor.numel() for tensor in sources]))
    targets = [view.view(tensor.shape) for view, tensor in zip(views, sources, strict=True)]
    return {
        "round_s": timed(lambda: torch._foreach_copy_(targets, sources), device),
        "digest_s": timed(lambda: digest.pending_digests(targets), device),
    }


def bytes_of(shape: str) -> int:
    """Bytes of a model in bfloat16."""
    return sum(2 * torch.Size(size).numel() for _, size in shapes_of(shape))


def main() -> None:
    """Check and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b" if HAS_GPU else "tiny")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[BUCKET_BYTES >> 20])
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = device_of(0)
    if HAS_GPU:
        check_digests(device)
    gpus = list(range(asked.pairs)) if asked.pairs else [asked.gpus - 1]
    receivers = Processes(receive, gpus, asked.fresh)
    others = Processes(send, gpus[1:] if asked.pairs else [], asked.shape)
    nbytes = bytes_of(asked.shape)
    raw_s = measure_raw(receivers, device, nbytes) if asked.gpus == 2 and not asked.pairs else {}
    rank = TrainerRank(asked.shape, device)
    epoch = 0
    for busy in (False, True) if asked.busy else (False,):
        if busy and HAS_GPU:
            receivers.tell("busy")
        for bucket_mib in asked.bucket_mib:
            rank.cut(bucket_mib << 20)
            epochs = range(epoch + 1, epoch + 1 + EPOCHS)
            epoch += EPOCHS
            rounds = measure_rounds(receivers, others, rank, epochs, asked.rounds)
            found = {
                "bench": "weights",
                "shape": asked.shape,
                "gpus": asked.pairs or asked.gpus,
                "pairs": asked.pairs,
                "busy": busy,
                "fresh": asked.fresh,
                "bucket_mib": rank.manifest.bucket_bytes / (1 << 20),
                "gpu": torch.cuda.get_device_name(device) if HAS_GPU else "none",
                "bytes": nbytes,
                "raw_s": raw_s,
                "of_raw": min(raw_s.values()) / rounds["agreed_s"] if raw_s else None,
                **rounds,
                "parts": parts(device, rank.in_order) if HAS_GPU else {},
            }
            tell(found, asked.out)
    receivers.tell("idle")
    receivers.end()
    others.end()


def tell(found: dict[str, Any], out: Path | None) -> None:
    """Print a line of figures, and keep it."""
    line = json.dumps(found)
    print(line, flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "weights.jsonl").open("a") as lines:
            lines.write(line + "\n")


if __name__ == "__main__":
    hand_ours_down()
    main()
