"""Makes the data of this recipe from GSM8K (MIT licence): grade-school problems with worked solutions.

Writes `solutions.jsonl` (a solution to imitate), `train.jsonl` and `test.jsonl` (the final number to compare with) to
`data` beside this file. Takes the data set from the hub, or from any folder with its rows by `--from`.

Invariants: every problem of the data set becomes one row, in its order; the marks of the calculator (`<<2+2=4>>`) are
in no solution, because the model has no calculator.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla_data.rows import open_rows

HERE = Path(__file__).resolve().parent
HUB = "hub:openai/gsm8k/main"
CALCULATOR = re.compile(r"<<[^>]*>>")


def problems(source: Path, split: str) -> Iterator[tuple[str, str, str]]:
    """Yield question, solution and final number of each problem."""
    rows = open_rows(source, split, None)
    for row in rows.read(range(len(rows))):
        if row.error is not None:
            raise SystemExit(str(row.error))
        if missing := {"question", "answer"} - set(row.values):
            raise SystemExit(f"{row.where} has no column {min(missing)!r}: it is no row of GSM8K")
        solution = CALCULATOR.sub("", row.values["answer"])
        answer = solution.rpartition("####")[2].strip().replace(",", "")
        if not answer:
            raise SystemExit(f"{row.where}: the answer has no number after ####")
        yield row.values["question"], solution, answer


def make_data(source: Path, out: Path) -> None:
    """Write the three files."""
    out.mkdir(parents=True, exist_ok=True)
    train, test = (list(problems(source, split)) for split in ("train", "test"))
    write(out / "solutions.jsonl", ((question, solution) for question, solution, _ in train))
    write(out / "train.jsonl", ((question, answer) for question, _, answer in train))
    write(out / "test.jsonl", ((question, answer) for question, _, answer in test))
    print(f"{len(train)} training and {len(test)} test problems in {out}")


def write(path: Path, rows: Iterator[tuple[str, str]]) -> None:
    """Write one file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row(*each)) + "\n" for each in rows))
    part.replace(path)


def row(question: str, answer: str) -> dict[str, Any]:
    """Return a line of a file: a chat prompt, and what it should be answered with."""
    return {"prompt": [{"role": "user", "content": question}], "answer": answer}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, default=Path(HUB), help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (%(default)s)")
    asked = parser.parse_args()
    make_data(asked.source, asked.out)
