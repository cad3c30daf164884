"""Tools of a host that has no GPU, which tell of what is not there."""

from __future__ import annotations

from pathlib import Path


def write_nvidia_smi(folder: Path, count: int, mebibytes: int, capability: str = "9.0") -> None:
    """Write an nvidia-smi that tells of so many GPUs, each of this size."""
    listed, sizes, versions = (
        "\\n".join([text] * count) for text in ("GPU 0: any", str(mebibytes), capability)
    )
    answers = f'-L) printf "{listed}";; *memory*) printf "{sizes}";; *) printf "{versions}";;'
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\n')
    tool.chmod(0o755)
