"""Makes the model and the sums of the calculator's recipe, and data of its own -> `data/`.

The agents of Messages add seven numbers from 10 to 99. Two of the three sums on the way have such numbers, and the
last one has what came out of these. So half of the warm-up has sums of larger numbers; as in the calculator's, three
of ten rows call the tool. Invariant: the same seed always writes the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CALCULATOR = HERE.parent / "calculator"
SIZES = {"rl": 3000, "heldout": 200}
WARM_UP = 6000
SMALL, LARGE = range(10, 100), range(30, 298)


def make(out: Path, calculator: ModuleType, seed: int = 0) -> None:
    """Write `data/` into `out`."""
    draw = random.Random(seed)
    (out / "data").mkdir(parents=True, exist_ok=True)
    questions = [tuple(draw.choices(SMALL, k=7)) for _ in range(sum(SIZES.values()))]
    for name, size in SIZES.items():
        own, questions = questions[:size], questions[size:]
        _write(out / "data" / f"{name}.jsonl", calculator.rows_of(name, own, draw))
    small = [tuple(draw.choices(SMALL, k=3)) for _ in range(WARM_UP // 2)]
    large = [(*draw.choices(LARGE, k=2), draw.choice(SMALL)) for _ in range(WARM_UP // 2)]
    sums = small + large
    draw.shuffle(sums)
    _write(out / "data" / "sft.jsonl", calculator.rows_of("sft", sums, draw))


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def calculator_recipe() -> ModuleType:
    """Return what makes the model, and the data of the other agents."""
    spec = importlib.util.spec_from_file_location("calculator_make", CALCULATOR / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    calculator = calculator_recipe()
    calculator.make(CALCULATOR)
    make(HERE, calculator)
    print(json.dumps({"model": str(CALCULATOR / "model"), "data": str(HERE / "data")}))
