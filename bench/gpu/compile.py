"""What compiled layers gain and cost: the same updates with and without, on one GPU or on FSDP ranks of several.

A Qwen3-0.6B shape with random weights in bfloat16, through the classes that the trainer uses; without a GPU a small
shape in float32, to see that it runs. `python bench/gpu/compile.py [--ranks 2]` ends within four minutes, whatever
hangs, and fails where a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BENCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCH))
from qwen3_shape import QWEN3_0_6B, make_model  # noqa: E402
from table import Row, render  # noqa: E402

GPU = torch.cuda.is_available()
LIMIT_S = 230.0
SHAPE = QWEN3_0_6B
WORK = {"sequences": 128, "longest": 4096, "budget": 16_384, "chunk_tokens": 512, "updates": 5}
DTYPE, SAME_LOSS = "bfloat16", 0.02
if not GPU:
    DTYPE, SAME_LOSS = "float32", 1e-5
    WORK = {"sequences": 16, "longest": 96, "budget": 256, "chunk_tokens": 64, "updates": 3}
    SHAPE = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }


def main() -> int:
    """Measure both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the weights, a GPU each")
    ranks = parser.parse_args().ranks
    deadline = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-compile-") as name:
        place = Path(name)
        make_model(place / "model", dtype=DTYPE, **SHAPE)
        found = {kind: _case(place, kind, ranks, deadline) for kind in ("off", "on")}
    rows = _rows(found["off"], found["on"], ranks)
    print(render(rows))
    return 1 if any(row.met is False for row in rows) else 0


def _case(place: Path, kind: str, ranks: int, deadline: float) -> dict[str, Any]:
    """What rank 0 of a gang of its own found; or its trouble, in words."""
    folder = place / kind
    folder.mkdir()
    setup = folder / "setup.json"
    asked = WORK | {"model": str(place / "model"), "vocabulary": SHAPE["vocab_size"], "dtype": DTYPE}
    setup.write_text(json.dumps(asked | {"compile": kind, "ranks": ranks}))
    environment = {
        # Multicast over NVLink is not needed here, and not every host lends it.
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH")))),
        # Compiled from nothing, whatever this host has compiled before.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
    }
    program = Path(__file__).with_name("compile_rank.py")
    logs = [(folder / f"rank-{rank}.log").open("wb") for rank in range(ranks)]
    gang = [
        subprocess.Popen([sys.executable, program, setup, str(rank)], stdout=log, stderr=log, env=environment)
        for rank, log in enumerate(logs)
    ]
    try:
        trouble = _waited_for(gang, deadline)
    finally:
        for process, log in zip(gang, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    if trouble:
        for rank in range(ranks):
            print((folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:], file=sys.stderr)
        return {"trouble": trouble}
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _waited_for(gang: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Why the gang did not come to its end; empty where it did."""
    while any(process.poll() is None for process in gang):
        if failed := [rank for rank, process in enumerate(gang) if process.poll()]:
            return f"rank {failed[0]} failed"
        if time.monotonic() > deadline:
            return f"not done within {LIMIT_S:.0f} s"
        time.sleep(0.1)
    failed = [rank for rank, process in enumerate(gang) if process.returncode]
    return f"rank {failed[0]} failed" if failed else ""


def _rows(off: dict[str, Any], on: dict[str, Any], ranks: int) -> list[Row]:
    rows = []
    for kind, found in (("off", off), ("on", on)):
        what = f"update, compile {kind}, {ranks} rank(s), {DTYPE}"
        if trouble := found.get("trouble") or found["refusal"]:
            rows.append(Row(what, trouble, "runs", False))
        else:
            figure = f"{_speed(found):,.0f} tokens/s, {_best(found):.2f} s, peak {found['peak_gib']:.2f} GiB"
            rows.append(Row(what, figure))
    return rows if any(row.met is False for row in rows) else [*rows, *_compared(off, on)]


def _compared(off: dict[str, Any], on: dict[str, Any]) -> list[Row]:
    gain = _speed(on) / _speed(off)
    at_load, first = on["before"], on["compiled"][0]
    later = sum(int(update.get("compilations", 0)) for update in on["compiled"][2:])
    apart = max(abs(mine - plain) for mine, plain in zip(on["losses"], off["losses"], strict=True))
    return [
        Row("  compiled against plain", f"{gain:.2f} x", "> 1 x" if GPU else "", gain > 1 if GPU else None),
        Row("  compiled when the model is loaded", _compiled(at_load)),
        Row("  compiled in the first update", _compiled(first)),
        Row("  first update, off and on", f"{off['seconds'][0]:.1f} s, {on['seconds'][0]:.1f} s"),
        Row("  compilations after the second update", str(later), "0", later == 0),
        Row(
            f"  largest difference in loss ({len(on['losses'])} updates, {on['losses'][-1]:.4f} at last)",
            f"{apart:.2g}",
            f"< {SAME_LOSS:g}",
            apart < SAME_LOSS,
        ),
    ]


def _best(found: dict[str, Any]) -> float:
    return float(min(found["seconds"][1:]))


def _speed(found: dict[str, Any]) -> float:
    return float(found["tokens"] / _best(found))


def _compiled(metrics: dict[str, float]) -> str:
    return f"{metrics.get('time/compile_s', 0.0):.1f} s, {metrics.get('compilations', 0.0):.0f} time(s)"


if __name__ == "__main__":
    sys.exit(main())
