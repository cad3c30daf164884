"""Every key of the configuration does something: a key that nobody reads would be a silent lie."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_core.config import ConfigModel, RunConfig, StackConfig

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "libs/core/src/flotilla_core/config"


def _models(annotation: object) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _keys(model: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for below in _models(field.annotation):
            yield from _keys(below, f"{prefix}{name}.")


def _attributes_read() -> set[str]:
    read: set[str] = set()
    for folder in ("libs", "services"):
        for file in (ROOT / folder).glob("*/src/**/*.py"):
            if CONFIG in file.parents or file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
    return read


@pytest.mark.parametrize("model", [RunConfig, StackConfig])
def test_every_configuration_key_is_read_by_a_service_or_library(model: type[ConfigModel]) -> None:
    read = _attributes_read()
    unread = sorted({key for key in _keys(model) if key.rpartition(".")[2] not in read})
    assert not unread, f"nobody reads {', '.join(unread)}"
