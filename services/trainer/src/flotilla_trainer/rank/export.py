"""The policy as a Hugging Face folder.

Invariants: written aside and renamed when it is complete, so a reader never sees half a model and a failed export
leaves what was there; weights are stored in the type that the forward pass computes in, tied ones once.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition
from flotilla_core.telemetry import names
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.sharded_model import ShardedModel

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files of the source folder that the export writes anew or leaves behind."""


def export(path: Path, source: Path, model: ShardedModel, link: FrontLink) -> dict[str, Any]:
    """Write the folder on rank 0; the other ranks take part in the gathers."""
    with telemetry.span(names.TRAINER_EXPORT):
        order = [name for name, _, _ in model.specs(model.dtype)]
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in model.whole_tensors(order, model.dtype):
            link.progress(f"gathering {name}")
            if dist.get_rank() == 0:
                whole[name] = tensor.cpu().clone()
        if dist.get_rank() != 0:
            return {}
        link.progress("writing the model")
        return _write(path, source, whole, model.dtype)


def _write(path: Path, source: Path, whole: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    aside = path.with_name(f".{path.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _copy_companions(source, aside)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
        if (source / "generation_config.json").is_file():
            skeleton.generation_config = GenerationConfig.from_pretrained(source)
        skeleton.save_pretrained(aside, state_dict=whole)
        _replace(path, aside)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise FailedPrecondition("the model cannot be written", where=str(path), why=str(error)) from error
    files = sorted(file for file in path.iterdir() if file.is_file())
    return {"files": [file.name for file in files], "bytes": sum(file.stat().st_size for file in files)}


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and whatever else belongs to the model beside its weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and not file.name.startswith("."):
            shutil.copy2(file, target / file.name)


def _replace(path: Path, aside: Path) -> None:
    """Put the complete folder in place; an earlier one gives way last."""
    earlier = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(earlier, ignore_errors=True)
    if path.exists():
        path.rename(earlier)
    aside.rename(path)
    shutil.rmtree(earlier, ignore_errors=True)
