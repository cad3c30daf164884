"""The engine, the four images and a folder that stands for what an operator brings, once a session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine import ROOT, TAG, NoEngine, base_image, engine


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command; tests are skipped where no engine can start."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER", "")
        started = engine(tmp_path_factory.mktemp("engine"))
        try:
            command = started.__enter__()
        except NoEngine as reason:
            pytest.skip(str(reason))
        try:
            yield command
        finally:
            started.__exit__(None, None, None)


@pytest.fixture(scope="session")
def base(docker: str) -> str:
    return base_image(docker)


@pytest.fixture(scope="session")
def images(docker: str, base: str) -> dict[str, str]:
    """The images by service, built as `make images` builds them."""
    services = ("coordinator", "reward", "trainer", "generator")
    command = [sys.executable, ROOT / "scripts" / "build_images.py", "--base", base, "--tag", TAG]
    subprocess.run(command, check=True)
    return {service: f"flotilla-{service}:{TAG}" for service in services}
