"""Shapes and batches that nobody chose, by default at their first try: what their plans state, and what they take.

Ten pairs of a Qwen3's shape, from 0.3 to 8 billion parameters, and of a batch are drawn by `--seed`. The stack file
names the model alone, the run file data, reward, batch and lengths. `shapes.py 3 --out DIR` makes three steps of pair 3
on the GPUs from `--first-gpu` on, so that pairs for one GPU can run side by side; `--print` lists them. Ends with an
error as `loop.py` does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import say
from loop import Bench, Work, as_started, make_files, show_gpus
from process_memory import watched

from flotilla_testing.stack import running_stack

PAIRS = 10
STEPS = 3
VOCABULARY = 151_936
WIDTHS = (768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
HEAD = 128
LAYERS = range(12, 41)
TIED_BELOW = 5e9
UPDATE_S = (1.0, 12.0)
"""Seconds of an update, about: enough to need memory, not so many that a pair takes long."""
FLOPS = 350e12
"""Arithmetic of one GPU in a second, at least."""


@dataclass(frozen=True)
class Pair:
    """A shape and a batch."""

    gpus: int
    shape: dict[str, Any]
    parameters: int
    work: Work

    @property
    def update_s(self) -> float:
        """About how long an update takes."""
        tokens = self.work.prompts * self.work.samples * (self.work.prompt_tokens + self.work.tokens)
        return 6 * self.parameters * tokens / self.gpus / FLOPS


def drawn(seed: int) -> list[Pair]:
    """Return the pairs of a seed."""
    draw = random.Random(seed)
    found: list[Pair] = []
    while len(found) < PAIRS:
        pair = _pair(draw)
        if pair is not None and UPDATE_S[0] <= pair.update_s <= UPDATE_S[1]:
            found.append(pair)
    return found


def _pair(draw: random.Random) -> Pair | None:
    wanted, width = math.exp(draw.uniform(math.log(0.3e9), math.log(8e9))), draw.choice(WIDTHS)
    heads = width // HEAD * (2 if width < 2048 else 1)
    groups = draw.choice([count for count in (2, 4, 8) if heads % count == 0])
    intermediate = 3 * width
    tied = wanted < TIED_BELOW
    layer = 2 * width * heads * HEAD + 2 * width * groups * HEAD + 3 * width * intermediate
    embeddings = VOCABULARY * width * (1 if tied else 2)
    layers = round((wanted - embeddings) / layer)
    gpus, samples = draw.choice((1, 2)), draw.choice((4, 8, 16))
    work = Work(
        prompts=draw.choice((8, 16, 32, 64)),
        samples=samples,
        tokens=round(math.exp(draw.uniform(math.log(128), math.log(2048)))),
        prompt_tokens=round(math.exp(draw.uniform(math.log(32), math.log(2048)))),
    )
    if layers not in LAYERS:
        return None
    shape = {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
    }
    return Pair(gpus, shape, embeddings + layers * layer, work)


def main() -> int:
    """Up, three steps, down."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("pair", type=int, nargs="?", choices=range(PAIRS))
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--out", type=Path)
    cli.add_argument("--first-gpu", type=int, default=0)
    cli.add_argument("--limit", type=float, default=200.0, help="seconds after which a run is stopped")
    cli.add_argument("--print", action="store_true")
    asked = cli.parse_args()
    pairs = drawn(asked.seed)
    if asked.print or asked.pair is None or asked.out is None:
        for number, pair in enumerate(pairs):
            print(number, f"{pair.update_s:.1f} s", json.dumps(asdict(pair)))
        return 0
    pair, work = pairs[asked.pair], asked.out / "work"
    show_gpus(pair.gpus, asked.first_gpu)
    say(asked.out, pair=asked.pair, seed=asked.seed, **asdict(pair))
    model = make_files(work, shape=json.dumps(pair.shape), prompt_tokens=pair.work.prompt_tokens)
    bench = Bench(asked.out, work, pair.work, asked.limit, [])
    name = f"pair-{asked.pair}"
    try:
        with running_stack({"name": name, "model": str(model)}, work) as stack, watched(asked.out, stack):
            say(asked.out, **as_started(stack))
            bench.loop(stack, 0, STEPS, {})
    finally:
        for log in (work / "state" / name / "logs").glob("*.log"):
            shutil.copy(log, asked.out / log.name)
        shutil.rmtree(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
