"""Samples of vLLM end after the lengths of a list, in whatever program asks vLLM for them.

A plugin of vLLM: the program under measurement stays as it is. Of all requests that may take as many tokens as the
longest length, the n-th one on the host gets the n-th length, and after the last one the first again. So each step with
as many samples as the list has lengths decodes the whole list, in any program and with any number of engines.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LENGTHS = "lengths.json"
COUNTER = "asked"
ENTRY_POINT = f"[vllm.general_plugins]\n{HERE.stem} = {HERE.stem}:register\n"
MEDIAN, SIGMA = 600, 1.0
SEED = 0


def drawn(count: int, longest: int) -> list[int]:
    """Return lengths of a log-normal distribution, none above `longest`."""
    draw, median = random.Random(SEED), min(MEDIAN, longest / 3)
    return [min(longest, max(1, round(draw.lognormvariate(math.log(median), SIGMA)))) for _ in range(count)]


def environment(folder: Path, lengths: list[int]) -> dict[str, str]:
    """Install the plugin in a folder; return the variables with which vLLM finds it."""
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    information = folder / f"{HERE.stem}-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {HERE.stem}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINT)
    shutil.copy(HERE, folder)
    (folder / LENGTHS).write_text(json.dumps(lengths))
    (folder / COUNTER).write_text("0")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "VLLM_PLUGINS": HERE.stem}


def register() -> None:
    """Give requests their lengths; vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if AsyncLLM.generate.__module__ == __name__:
        return
    lengths: list[int] = json.loads(HERE.with_name(LENGTHS).read_text())
    longest = max(lengths)
    generate = AsyncLLM.generate

    def forced(
        engine: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, **further: Any
    ) -> AsyncGenerator[Any]:
        if (sampling_params.max_tokens or 0) >= longest:
            sampling_params.max_tokens = lengths[_turn() % len(lengths)]
        return generate(engine, prompt, sampling_params, request_id, **further)

    AsyncLLM.generate = forced


def _turn() -> int:
    """Return how many requests of the host had their lengths before this one."""
    with HERE.with_name(COUNTER).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        turn = int(file.read())
        file.seek(0)
        file.write(str(turn + 1))
    return turn
