"""Commands of pages that need no fleet do what the pages say. `make test-docs` runs the others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.doc_pages import ROOT, Reader, blocks

NEEDS_NO_FLEET = re.compile(r"flotilla (doctor|reward test|run plan)\b")


def without_a_fleet(command: str) -> str | None:
    return command if NEEDS_NO_FLEET.match(command) else None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """The folder of somebody who followed the quickstart up to its first fleet."""
    folder = tmp_path_factory.mktemp("quickstart")
    model = make_chat_model(folder / "model")
    reader = Reader(folder, {"/models/SmolLM2-135M-Instruct": str(model)}, without_a_fleet)
    reader.follow("docs/quickstart.md")
    return reader


def test_the_quickstart_finds_nothing_wrong_and_scores_its_reward_before_any_fleet(project: Reader) -> None:
    checked, scored, planned = project.said.values()
    assert "0 failed" in checked
    assert {"rewards.py:names=0", "rewards.py:names=1"} <= set(scored.split())
    assert "16 prompts x 8 samples" in planned
    assert not (project.folder / ".flotilla").exists()


def test_a_reward_of_ones_own_is_tried_as_the_page_of_rewards_says(project: Reader) -> None:
    (code,) = (
        text
        for language, text in blocks(ROOT / "services/reward/README.md")
        if text.startswith("def reward(")
    )
    project.write("my_rewards.py", code)
    before = set(project.said)
    project.follow("services/reward/README.md")
    scored = [text for command, text in project.said.items() if command not in before]
    assert len(scored) == 3 and sum("my_rewards.py:reward=" in text for text in scored) == 2


def test_the_examples_are_planned_and_scored_as_the_readme_says(arithmetic: Path, tmp_path: Path) -> None:
    example = tmp_path / "examples" / "arithmetic"
    shutil.copytree(ROOT / "examples" / "arithmetic", example, ignore=shutil.ignore_patterns("model", "data"))
    for made in ("model", "data"):
        (example / made).symlink_to(arithmetic / made)
    reader = Reader(tmp_path, prepared=without_a_fleet)
    reader.follow("README.md")
    planned, scored, _ = reader.said.values()
    assert "700 steps x 128 prompts" in planned and "exact=1" in scored
