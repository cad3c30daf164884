"""Check that the files and folders that a configuration names exist, and are of the right kind.

Each finding has the key, the path, and the problem. Folders that Flotilla makes itself are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flotilla_core.config import PolicyConfig, RunConfig, StackConfig

Found = tuple[str, Path | str, str]
"""Key, path and problem; the problem is empty where there is none."""


def paths_of_run(config: RunConfig) -> list[Found]:
    """Check data files, and folders with weights."""
    return list(_of_run(config))


def paths_of_stack(config: StackConfig) -> list[Found]:
    """Check models that are not names of a hub, and the file of the token."""
    return list(_of_stack(config))


def _of_run(config: RunConfig) -> Iterator[Found]:
    train = config.data.train
    if isinstance(train, Path):
        yield _file("data.train", train)
    else:
        yield from (_file(f"data.train[{index}].path", one.path) for index, one in enumerate(train))
    if config.evaluation is not None:
        yield _file("evaluation.data", config.evaluation.data)
    if config.initial_weights is not None:
        yield _folder("initial_weights", config.initial_weights, "config.json")
    if config.lora is not None and config.lora.adapter is not None:
        yield _folder("lora.adapter", config.lora.adapter, "adapter_config.json")
    if isinstance(config.algorithm, PolicyConfig) and config.algorithm.critic is not None:
        weights = config.algorithm.critic.initial_weights
        if weights is not None:
            yield _folder("algorithm.critic.initial_weights", weights, "config.json")


def _of_stack(config: StackConfig) -> Iterator[Found]:
    models = {"model": config.model, "critic.model": config.critic.model}
    models |= {"reference.model": config.reference.model, "teacher.model": config.teacher.model}
    models |= {f"teachers.{name}.model": gang.model for name, gang in config.teachers.items()}
    for key, model in models.items():
        if isinstance(model, Path):
            yield _folder(key, model, "config.json")
        elif model is not None and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
            yield key, model, "there is no such folder, and a name of the hub is organisation/model"
    if config.bind.token_file is not None:
        yield _file("bind.token_file", config.bind.token_file)


def _file(key: str, path: Path) -> Found:
    if not path.is_file():
        return key, path, f"{path} is a folder" if path.is_dir() else f"the file {path} does not exist"
    return key, path, "" if os.access(path, os.R_OK) else f"{path} may not be read"


def _folder(key: str, path: Path, content: str) -> Found:
    if not path.is_dir():
        return key, path, f"the folder {path} does not exist"
    return key, path, "" if (path / content).is_file() else f"{path} has no {content}"
