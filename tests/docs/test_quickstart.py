"""The quickstart from its start to its end, literally, but with a model of a moment and fewer steps.

`run compare` and `run resume` need a second run, and one that was stopped. So the other run that section 6 proposes is
started before section 7, and stopped after its first step. FLOTILLA_TEST_MODEL names a real chat model to take.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flotilla_testing.doc_pages import ROOT, Reader

pytestmark = pytest.mark.timeout(900)

PAGE = ROOT / "docs" / "quickstart.md"
SHORTER = "steps=3 optimizer.warmup_updates=1 evaluation.every_steps=2 evaluation.max_prompts=8"
ANOTHER_RUN = re.compile(r"`(flotilla run start [^`]+=\d+) --wait`")
LOADED = re.compile(r"`(AutoModelForCausalLM[^`]+)`")


def test_the_quickstart_works_from_its_start_to_its_end(reader: Reader, chat_model: Path) -> None:
    text, ids = PAGE.read_text("utf-8"), ["RUN1", "RUN2"]

    def prepared(command: str) -> str | None:
        if command.startswith(("make setup", "export PATH")):
            return None  # or this test would not run
        if command.startswith("flotilla run start"):
            return f"{command} {SHORTER}"
        if command.startswith("flotilla run show"):
            (another,) = ANOTHER_RUN.findall(text)
            reader.shell(f"{another} {SHORTER} steps=100")
            ids[:] = reader.stop_after_a_step("quickstart")
        return command.replace("RUN1", ids[1]).replace("RUN2", ids[0])

    reader.instead = {"/models/SmolLM2-135M-Instruct": str(chat_model)}
    reader.prepared = prepared
    reader.follow("docs/quickstart.md")
    assert "succeeded" in reader.shell(f"flotilla run show {ids[1]}")
    (load,) = LOADED.findall(text)
    code = f"from transformers import AutoModelForCausalLM; {load.replace('<id>', ids[1])}"
    reader.run([sys.executable, "-c", code])
