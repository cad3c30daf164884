"""The example's model with room for long responses, for fleets whose engine is simulated: nothing loads its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MAKE_MODEL = Path(__file__).resolve().parents[4] / "examples" / "arithmetic" / "make_model.py"


def example_model(folder: Path, *, positions: int) -> Path:
    """Its folder, inside `folder`."""
    model = folder / "model"
    subprocess.run([sys.executable, MAKE_MODEL, "--out", model], check=True)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (model / "config.json").write_text(json.dumps(config))
    return model
