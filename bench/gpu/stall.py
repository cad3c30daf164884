"""The time for which decoding stands still at a weight sync, in a real vLLM on one GPU, and the time of staging.

    python bench/gpu/stall.py [--shape 0.6b|8b] [--standby gpu|host|none] [--rounds 8] [--bucket-mib 256]
        [--limit-s 170] [--out DIR]

vLLM makes random weights of a Qwen3 of this shape, so no checkpoint is written. A sender in another process, on the
second GPU where there is one, publishes new numbers, as a trainer does; staging, commit and check are the generator's.
With `--standby none` versions arrive in the live weights, as with `generator.apply_weights: direct`.
Half of the syncs are made while nothing decodes, half beside samples that decode. Prints one JSON line a sync and one
of medians. Ends with an error if a sync is refused, if commits after the first one are not copies, or if a tensor of
live memory that is scaled by 1.01 is not found. Needs torch, vLLM and the sources of this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    *(str(ROOT / "libs" / name / "src") for name in ("weights", "core", "proto")),
    str(ROOT / "services" / "generator" / "src"),
    str(ROOT / "bench" / "gpu"),
    str(ROOT / "bench"),
]

import torch  # noqa: E402
from weight_stall import Streams, TimedEngine  # noqa: E402
from weights import SHAPES, shapes_of  # noqa: E402
from wrong_weights import WrongWorker  # noqa: E402

from flotilla.common.v1 import weights_pb2  # noqa: E402
from flotilla_core.config.stack import GeneratorConfig  # noqa: E402
from flotilla_core.errors import WeightsMismatch  # noqa: E402
from flotilla_core.version import Version  # noqa: E402
from flotilla_generator.checkpoint import Checkpoint  # noqa: E402
from flotilla_generator.engine.base import KvPolicy  # noqa: E402
from flotilla_generator.engine.vllm import standby  # noqa: E402
from flotilla_generator.weights import Phase, WeightSession  # noqa: E402
from flotilla_testing.credentials import hand_ours_down  # noqa: E402
from flotilla_weights.group import Sender  # noqa: E402
from flotilla_weights.manifest import Manifest  # noqa: E402

RUN, EPOCH, TIMEOUT_S = "stall", 1, 120
STREAMS = 64
LONGEST = 4096
BARS_S = {"gpu": 0.025, "host": None, "none": 0.060}


class StallWorker(WrongWorker):
    """A worker whose standby can be kept out of the GPU."""

    def flotilla_standby_on_host(self) -> dict[str, Any]:
        """Have the next standby take host memory, as where the GPU has no room."""
        return self._flotilla_guarded(lambda _: setattr(standby, "_has_room", lambda *_: False))

    def flotilla_standby(self) -> dict[str, Any]:
        """Return the kind of memory that the standby lies in."""

        def found(weights: Any) -> dict[str, Any]:
            standby = weights.live.standby
            kinds = {"cuda": "gpu", "cpu": "host"}
            return {"memory": "none" if standby.in_place else kinds[standby._memory.bytes.device.type]}

        return self._flotilla_guarded(found)


def write_folder(folder: Path, shape: str) -> None:
    """Write the description of a model, and names and shapes of its tensors without their bytes."""
    sizes: dict[str, Any] = {"vocabulary": 151_936, **SHAPES[shape]}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["groups"],
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": sizes["tied"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, extent in shapes_of(shape):
        start, end = end, end + 2 * torch.Size(extent).numel()
        header[name] = {"dtype": "BF16", "shape": list(extent), "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.truncate(8 + len(described) + end)  # a hole, which takes no room


def send(wire: Connection, shape: str, device_name: str, bucket_bytes: int) -> None:
    """The trainer's process: publish whenever it is asked to."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = torch.bfloat16
    random = torch.Generator(device).manual_seed(1)
    weights = {
        name: torch.randn(extent, device=device, dtype=dtype, generator=random).mul_(0.02)
        for name, extent in shapes_of(shape)
    }
    manifest = Manifest.from_named(((n, t.dtype, t.shape) for n, t in weights.items()), bucket_bytes)
    backend = "nccl" if device.type == "cuda" else "gloo"
    sender = Sender.listen("127.0.0.1", EPOCH, 2, backend, TIMEOUT_S)
    wire.send((sender.port, sender.secret, manifest.to_proto().SerializeToString()))
    sender.connect(manifest, device)
    while wire.recv() == "publish":
        for tensor in weights.values():
            tensor.mul_(1.01)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wire.send("ready")
        wire.recv()
        wire.send(sender.publish(manifest, [(spec.name, weights[spec.name]) for spec in manifest.tensors]))
    sender.close()


class Syncs:
    """Syncs of one engine with one sender."""

    def __init__(self, engine: TimedEngine, wire: Connection) -> None:
        self.engine = engine
        self._wire = wire
        self.session = WeightSession(engine)
        self._step = 0

    async def join(self) -> None:
        """Form the group."""
        port, secret, manifest = await asyncio.to_thread(self._wire.recv)
        self.manifest = Manifest.from_proto(weights_pb2.WeightManifest.FromString(manifest))
        backend = "NCCL" if torch.cuda.is_available() else "GLOO"
        group = weights_pb2.WeightGroup(
            epoch=EPOCH,
            backend=weights_pb2.WeightBackend.Value(f"WEIGHT_BACKEND_{backend}"),
            host="127.0.0.1",
            port=port,
            secret=secret,
            world_size=2,
            sender_ranks=[0],
        )
        group.timeout.FromSeconds(TIMEOUT_S)
        await self.session.join(RUN, group, 1, self.manifest)

    async def sync(self, streams: Streams | None) -> dict[str, Any]:
        """Make one, beside these streams, and measure it."""
        self._step += 1
        version = Version(0, self._step)
        self._wire.send("publish")
        await asyncio.to_thread(self._wire.recv)
        if streams is not None:
            await streams.tokens(4)
        usual = await _step_s(streams)
        started = time.perf_counter()
        self._wire.send("go")
        digests, staged = await asyncio.gather(
            asyncio.to_thread(self._wire.recv), self.session.stage(RUN, EPOCH, version)
        )
        stage_s = time.perf_counter() - started
        since = started if staged.in_place else time.perf_counter()
        expected = weights_pb2.WeightDigests(
            version=version.to_proto(), manifest_digest=self.manifest.digest, tensor_digests=digests
        )
        applied = await self.session.commit(RUN, EPOCH, version, KvPolicy.REUSE, expected)
        if streams is not None:
            await streams.tokens(4)
        verified = await self.session.verify(RUN, version)
        found = {
            "step": self._step,
            "decoding": streams is not None,
            "bytes": staged.manifest.nbytes,
            "stage_s": stage_s,
            "stage_gb_s": staged.manifest.nbytes / stage_s / 1e9,
            "stall_s": applied.stall_s,
            "apply_s": applied.apply_s,
            "verify_s": applied.verify_s,
            "parts": dict(self.engine.parts),
            "silence_s": streams.longest_gap(since) if streams is not None else None,
            "decode_step_s": usual,
            "tensors_compared": verified.tensors,
            "unchecked": verified.unchecked,
        }
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}

    async def require_damage_is_found(self) -> None:
        """Scale one tensor of live memory."""
        (answer,) = await self.engine.workers.ask("flotilla_make_wrong", "scaled")
        assert not answer["error"], answer
        try:
            await self.session.verify(RUN, Version(0, self._step))
        except WeightsMismatch as error:
            assert self.session.phase is Phase.BROKEN
            print(json.dumps({"found": str(error)}), flush=True)
        else:
            raise AssertionError("a scaled tensor was not found")


async def _step_s(streams: Streams | None) -> float | None:
    """Seconds of a usual decode step."""
    if streams is None:
        return None
    started = time.perf_counter()
    await streams.tokens(16)
    return (time.perf_counter() - started) / 16


async def measure(asked: argparse.Namespace, folder: Path, wire: Connection) -> list[dict[str, Any]]:
    """Return what each sync took."""
    options: dict[str, Any] = {"load_format": "dummy"}
    if torch.cuda.is_available() and not asked.eager:
        # Graphs without torch's compiler: a boot of half a minute.
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": STREAMS,
        }
    config = GeneratorConfig(
        dtype="bfloat16",
        max_model_tokens=LONGEST,
        max_running_samples=STREAMS,
        enforce_eager=asked.eager,
        apply_weights="direct" if asked.standby == "none" else "prefetch",
        engine_options=options,
    )
    engine = TimedEngine(config, Checkpoint.read(folder), "stall.StallWorker")
    booted = time.perf_counter()
    await engine.start()
    print(json.dumps({"boot_s": round(time.perf_counter() - booted, 1)}), flush=True)
    try:
        if asked.standby == "host":
            await engine.workers.ask("flotilla_standby_on_host")
        syncs = Syncs(engine, wire)
        await syncs.join()
        rounds = [await syncs.sync(None) for _ in range(2)]  # the first one loads, the second one is warm
        _say(*rounds)
        for decoding in [False] * asked.rounds + [True] * asked.rounds:
            if time.perf_counter() - asked.started > asked.limit_s:
                break
            streams = Streams(engine, [[] for _ in range(asked.streams)]) if decoding else None
            tasks = (
                [asyncio.create_task(streams.decode(at)) for at in range(asked.streams)] if streams else []
            )
            try:
                rounds.append(await syncs.sync(streams))
                _say(rounds[-1])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if torch.cuda.is_available():
            assert all(one["tensors_compared"] for one in rounds), "live memory is not compared"
            (lies,) = await engine.workers.ask("flotilla_standby")
            assert lies["memory"] == asked.standby, f"the standby is in memory of {lies['memory']}"
            await syncs.require_damage_is_found()
        return rounds
    finally:
        await engine.stop()


def _say(*found: dict[str, Any]) -> None:
    for one in found:
        print(json.dumps(one), flush=True)


def summary(asked: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the ratios that have a bar."""
    found: dict[str, Any] = {
        "shape": asked.shape,
        "standby": asked.standby,
        "bucket_mib": asked.bucket_mib,
        "eager": asked.eager,
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}
    found |= {"first_stall_s": rounds[0]["stall_s"], "first_stage_s": rounds[0]["stage_s"]}
    for name, decoding in (("alone", False), ("beside", True)):
        some = [one for one in rounds[2:] if one["decoding"] is decoding]
        if some:
            keys = ["stage_s", "stage_gb_s", "stall_s", "apply_s", "verify_s"]
            keys += ["silence_s", "decode_step_s"] if decoding else []
            found[name] = {key: statistics.median(one[key] for one in some) for key in keys}
            found[name]["syncs"] = len(some)
    if "alone" in found and "beside" in found:
        found["stage_beside_over_alone"] = found["beside"]["stage_s"] / found["alone"]["stage_s"]
        found["stall_bar_s"] = BARS_S[asked.standby]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--standby", choices=BARS_S, default="gpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--same-gpu", action="store_true", help="the sender shares the engine's GPU")
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.started = time.perf_counter()
    # vLLM's process loads the worker's class by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    gpus = torch.cuda.device_count()
    device = "cpu" if not gpus else "cuda:1" if gpus > 1 and not asked.same_gpu else "cuda:0"
    spawning = multiprocessing.get_context("spawn")
    wire, theirs = spawning.Pipe()
    sender = spawning.Process(
        target=send, args=(theirs, asked.shape, device, asked.bucket_mib << 20), daemon=True
    )
    sender.start()
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
            write_folder(Path(name), asked.shape)
            rounds = asyncio.run(measure(asked, Path(name), wire))
    finally:
        sender.terminate()
        sender.join()
    found = summary(asked, rounds)
    print(json.dumps(found), flush=True)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(one) + "\n" for one in [*rounds, found])
        (asked.out / f"stall-{asked.shape}-{asked.standby}.jsonl").write_text(lines)


if __name__ == "__main__":
    hand_ours_down()
    main()
