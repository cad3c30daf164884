"""A model for ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla_testing.tiny_qwen3 import tiny_qwen3


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose embedding is its head, too; nobody writes there."""
    place = tmp_path_factory.mktemp("tied")
    tiny_qwen3(tie_word_embeddings=True).save_pretrained(place)
    return place
