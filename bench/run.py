"""`make bench`: every figure, one table. Name scripts to run only those: `python bench/run.py loop_overhead`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_FIGURES = {
    "run",
    "table",
    "one_rank",
    "qwen3_shape",
    "held_back",
    "apply_alone",
    "weight_sender",
    "wrong_weights",
}


def main() -> int:
    """Run the scripts one after the other; fail when a bar was missed."""
    sys.path.insert(0, str(HERE))
    from table import render

    every = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_FIGURES)
    rows = []
    for name in sys.argv[1:] or every:
        print(f"==> {name}", file=sys.stderr, flush=True)
        rows += importlib.import_module(name).measure()
    print(render(rows))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
