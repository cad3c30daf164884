"""Export the policy as a Hugging Face folder, with trained adapters merged into it and kept in a folder inside.

Invariants: a folder is written under another name and renamed when it is complete, so a reader never sees half a model
and a failed export leaves an earlier one in place; weights are stored in the type that is asked for, which for
checkpoints is the one that the forward pass computes in, tied ones once.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig

from flotilla_core import telemetry
from flotilla_core.checkpoint import not_written
from flotilla_core.telemetry import names
from flotilla_trainer.rank import peft_folder
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.sharded_model import ShardedModel

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of the files of the source folder that the export does not copy."""


class WholeModel:
    """The whole policy on the host of rank 0, ready to be written; the other ranks take part in the gathers."""

    def __init__(
        self, source: Path, model: ShardedModel, link: FrontLink, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or model.dtype
        self._source = source
        self._adapters = None if model.adapters is None else peft_folder.AdapterFolder(model.adapters, source)
        self._tensors: dict[str, torch.Tensor] = {}
        # Adapters are merged before anything is rounded to a narrower type.
        wide = torch.promote_types(model.dtype, dtype)
        tensors = model.whole_tensors([name for name, _, _ in model.specs(wide)], wide)
        for name, tensor in model.adapters.merged_into(tensors) if model.adapters else tensors:
            link.progress(f"gathering {name}")
            if dist.get_rank() == 0:
                self._tensors[name] = (
                    (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().clone()
                )
        # Built here and not in `write`: transformers changes torch's default type meanwhile, for all threads.
        with torch.device("meta"):
            self._skeleton = model.policy.skeleton(AutoConfig.from_pretrained(source), dtype)

    def write(self, folder: Path) -> None:
        """Write the model to a new folder; any thread may call this."""
        try:
            folder.mkdir()
            _copy_companions(self._source, folder)
            if (self._source / "generation_config.json").is_file():
                self._skeleton.generation_config = GenerationConfig.from_pretrained(self._source)
            self._skeleton.save_pretrained(folder, state_dict=self._tensors)
            if self._adapters is not None:
                self._adapters.write(folder / peft_folder.FOLDER)
        except (OSError, SafetensorError) as error:
            raise not_written("the model", folder, error) from error


def export(
    path: Path, source: Path, model: ShardedModel, link: FrontLink, dtype: torch.dtype
) -> dict[str, Any]:
    """Write the model to `path` on rank 0; a collective."""
    with telemetry.span(names.TRAINER_EXPORT):
        whole = WholeModel(source, model, link, dtype)
        if dist.get_rank() != 0:
            return {}
        link.progress("writing the model")
        aside = path.with_name(f".{path.name}.writing")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole.write(aside)
            _replace(path, aside)
        except OSError as error:
            raise not_written("the model", path, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {
        "files": [str(file.relative_to(path)) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
    }


def _copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer, the chat template and all other files of the model except its weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and not file.name.startswith("."):
            shutil.copyfile(
                file, target / file.name
            )  # not its mode: what a stack writes is its owner's alone


def _replace(path: Path, aside: Path) -> None:
    """Rename the complete folder to `path`; an earlier one is removed last."""
    earlier = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(earlier, ignore_errors=True)
    if path.exists():
        path.rename(earlier)
    aside.rename(path)
    shutil.rmtree(earlier, ignore_errors=True)
