"""The figures of a bench: one JSON object a line, on the terminal and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def say(folder: Path, **facts: Any) -> None:
    """Print a line, and append it to `figures.jsonl` in the folder."""
    line = json.dumps(facts)
    print(line, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "figures.jsonl").open("a") as file:
        file.write(line + "\n")
