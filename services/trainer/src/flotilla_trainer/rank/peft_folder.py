"""Write and read adapters as a folder in the layout of peft.

Invariants: files are safetensors, because nothing is unpickled; a folder has exactly one tensor of the right shape for
every adapter of this session, or it is refused by name before a number changes; settings of peft that change the sum
W + alpha / r * B A are refused too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flotilla_core.checkpoint import not_written
from flotilla_core.errors import FailedPrecondition, Mismatch, NotFound, Unimplemented
from flotilla_core.files import require_regular
from flotilla_core.json_text import read_json_object
from flotilla_trainer.rank.lora import Adapters

FOLDER = "adapter"
CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Settings of peft, and their values with which an adapter is the sum that this trainer computes."""


class AdapterFolder:
    """A copy of the adapters on the host, ready to be written."""

    def __init__(self, adapters: Adapters, base: Path) -> None:
        self._tensors = {name: tensor.to("cpu", copy=True) for name, tensor in adapters.tensors().items()}
        alpha = adapters.settings.alpha
        self._config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": adapters.settings.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "target_modules": adapters.target_names(),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def write(self, folder: Path) -> None:
        """Write the adapters to a new folder; any thread may call this."""
        try:
            folder.mkdir()
            (folder / CONFIG_FILE).write_text(json.dumps(self._config, indent=2) + "\n", "utf-8")
            tensors = {PREFIX + name: tensor for name, tensor in self._tensors.items()}
            save_file(tensors, folder / TENSORS_FILE, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise not_written("the adapters", folder, error) from error


def read_adapters(folder: Path, adapters: Adapters) -> dict[str, torch.Tensor]:
    """Read the tensors of a folder that these adapters can continue from."""
    _check_config(folder, adapters)
    try:
        require_regular((folder / TENSORS_FILE).stat(), folder / TENSORS_FILE)
        found = load_file(folder / TENSORS_FILE)
    except (OSError, SafetensorError) as error:
        raise FailedPrecondition(
            "the adapters cannot be read", where=str(folder / TENSORS_FILE), why=str(error)
        ) from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in adapters.tensors().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise Mismatch(
                "the adapters are for another model, or for other layers of it",
                where=str(folder / TENSORS_FILE),
                why=f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here",
                next_step="give adapters of this model, and lora.rank and lora.targets as they have them",
            )
    return tensors


def _check_config(folder: Path, adapters: Adapters) -> None:
    path = folder / CONFIG_FILE
    try:
        config = read_json_object(path)
    except FileNotFoundError:
        raise NotFound(
            "there is no adapter in this folder",
            where=str(path),
            next_step=f"give a folder that peft saved, with {CONFIG_FILE} and {TENSORS_FILE}",
        ) from None
    for key, values in PLAIN.items():
        if config.get(key, values[-1]) not in values:
            raise Unimplemented(
                "adapters of this kind cannot be trained here",
                where=str(path),
                why=f"{key} is {config.get(key)!r}",
                next_step=f"give LoRA adapters whose {key} is {values[0]!r}",
            )
    settings = adapters.settings
    for key, theirs, ours in (
        ("rank", config.get("r"), settings.rank),
        ("alpha", config.get("lora_alpha"), settings.alpha),
    ):
        if theirs != ours:
            raise Mismatch(
                f"the adapters have another {key} than the run",
                where=str(path),
                why=f"{theirs} there, lora.{key} is {ours}",
                next_step=f"set lora.{key} to {theirs}",
            )
