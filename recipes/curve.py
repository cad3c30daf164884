"""Draws the expected curve of a recipe, and a run of yours beside it.

`python recipes/curve.py recipes/gsm8k RUN_DIRECTORY...` draws `curves/*.jsonl` of the recipe and the named runs into
one PNG: the held-out score with its standard error, over the steps. `--keep` adds the runs to the recipe's curves.

Invariants: a curve is what `evaluations.jsonl` of one run says, without its times; runs alone make curves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

KEPT = ("reward_mean", "reward_stderr")
COLOURS = ("#2f6db5", "#e07b39", "#3c9a5f", "#c0413b", "#8a8f98")


def curve_of(run: Path) -> list[dict[str, Any]]:
    """Return step and scores of each evaluation of a run."""
    lines = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    return [
        {"step": line["step"]}
        | {name: round(value, 6) for name, value in line.items() if name.rpartition("/")[2] in KEPT}
        for line in lines
    ]


def keep(run: Path, curves: Path, name: str) -> Path:
    """Write the curve of a run among those of the recipe."""
    curves.mkdir(parents=True, exist_ok=True)
    path = curves / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in curve_of(run)))
    return path


def draw(curves: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw curves with their standard errors; those of one recipe file, which differ by their seeds, share a colour."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(kind_of(name) for name in curves))
    named = set()
    for name, lines in curves.items():
        kind = kind_of(name)
        steps = [line["step"] for line in lines]
        scores, errors = ([line[f"eval/{key}"] for line in lines] for key in KEPT)
        colour = COLOURS[kinds.index(kind) % len(COLOURS)]
        label = None if kind in named else kind
        axes.errorbar(
            steps, scores, yerr=errors, color=colour, label=label, capsize=2, marker="o", ms=3, lw=1.2
        )
        named.add(kind)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out score")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=110)


def kind_of(name: str) -> str:
    """Return what a curve is of: its name without the seed."""
    return name.partition("-seed")[0]


def read(paths: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Read kept curves by their names."""
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(paths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, help="folder of the recipe")
    parser.add_argument("runs", type=Path, nargs="*", help="directories of runs to draw beside its curves")
    parser.add_argument(
        "--keep", nargs="+", metavar="NAME", help="names under which the recipe keeps the runs"
    )
    parser.add_argument(
        "--out", type=Path, help="the picture (curve.png in the recipe, your-curve.png with runs)"
    )
    asked = parser.parse_args()
    curves = asked.recipe / "curves"
    if asked.keep:
        if len(asked.keep) != len(asked.runs):
            parser.error(f"--keep has {len(asked.keep)} names for {len(asked.runs)} runs")
        for run, name in zip(asked.runs, asked.keep, strict=True):
            keep(run, curves, name)
    yours = {} if asked.keep else {f"yours: {run.name}": curve_of(run) for run in asked.runs}
    out = asked.out or (Path("your-curve.png") if yours else asked.recipe / "curve.png")
    draw(read(curves.glob("*.jsonl")) | yours, out)
    print(out)


if __name__ == "__main__":
    main()
