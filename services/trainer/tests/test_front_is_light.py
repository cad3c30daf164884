"""The front never loads what its ranks load, so that nothing of theirs can block or crash it."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys
import flotilla_trainer.main, flotilla_trainer.service
print(sorted({"torch", "transformers", "flotilla_weights", "safetensors"} & set(sys.modules)))
"""


def test_the_front_runs_without_torch() -> None:
    seen = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
