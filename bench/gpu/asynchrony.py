"""`bench/staleness.py` in full on a host with two GPUs: a fleet for each staleness, all of them side by side.

Trainers on the first GPU, slowed vLLMs on the second, one warm-up for all. `python bench/gpu/asynchrony.py --out DIR`;
the pace is FLOTILLA_BENCH_PACE_S seconds for the generation of a step and for its update.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learn import fleet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import staleness as bench
from table import render


def main() -> int:
    """0 when every staleness kept its bounds."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--one", type=int, help="only this staleness, in this process")
    cli.add_argument("--weights", type=Path, help="of the warm-up, for --one")
    asked = cli.parse_args()
    if asked.one is not None:
        return _one(asked.out, asked.one, asked.weights)
    asked.out.mkdir(parents=True, exist_ok=True)
    bench.make_example(asked.out)
    (asked.out / "warm-up").mkdir()
    with fleet("warm-up", _description(asked.out), asked.out) as stack:
        weights = bench.warmed_up(stack, asked.out)
        for child in [_child(asked.out, staleness, weights) for staleness in bench.ALL]:
            child.wait()
    figures = {k: bench.Figures(**json.loads(_file(asked.out, k).read_text())) for k in bench.ALL}
    rows = [row for k, one in figures.items() for row in bench.rows(k, one, figures[0].rate)]
    print(render(rows))
    return 1 if any(row.met is False for row in rows) else 0


def _child(out: Path, staleness: int, weights: Path) -> subprocess.Popen[bytes]:
    arguments = ["--out", out, "--one", str(staleness), "--weights", weights]
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    )


def _one(out: Path, staleness: int, weights: Path) -> int:
    work = out / f"staleness-{staleness}"
    work.mkdir()
    for name in ("data", "model"):
        (work / name).symlink_to(out / name)
    with fleet(work.name, _description(out), out) as stack:
        _file(out, staleness).write_text(json.dumps(asdict(bench.learned(stack, work, staleness, weights))))
    return 0


def _file(out: Path, staleness: int) -> Path:
    return out / f"staleness-{staleness}.json"


def _description(out: Path) -> dict[str, Any]:
    return {
        "model": str(out / "model"),
        "generator": {**bench.SLOWED_VLLM, "dtype": "float32", "memory_fraction": 0.08},
        "trainer": {"dtype": "float32", "nproc": 1},
        "reward": {"replicas": 1, "workers": 2},
    }


if __name__ == "__main__":
    sys.exit(main())
