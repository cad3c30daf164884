"""The functions that a section names are found and moved, and a section that names none stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from pydantic import TypeAdapter

from flotilla_core.config import AlgorithmConfig
from flotilla_core.transfer import files_of_functions, move_functions


def section(**keys: Any) -> Struct:
    made = Struct()
    made.update(keys)
    return made


def test_the_files_of_a_loss_and_an_advantage_are_found_and_renamed_each_alone() -> None:
    made = section(loss={"type": "/a/mine.py:loss"}, advantage={"type": "/b/mine.py:advantage"})
    assert files_of_functions(made) == [Path("/a/mine.py"), Path("/b/mine.py")]
    move_functions(made, Path("/a/mine.py"), Path("/copy/mine.py"))
    assert made == section(loss={"type": "/copy/mine.py:loss"}, advantage={"type": "/b/mine.py:advantage"})


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "sft", "dpo", "reward_model"])
def test_a_section_without_functions_is_looked_at_and_stays_the_same(algorithm: str) -> None:
    config = TypeAdapter(AlgorithmConfig).validate_python({"type": algorithm})
    made = section(**config.model_dump(mode="json"))
    before = made.SerializeToString(deterministic=True)
    assert files_of_functions(made) == []
    move_functions(made, Path("/a/mine.py"), Path("/copy/mine.py"))
    assert made.SerializeToString(deterministic=True) == before
