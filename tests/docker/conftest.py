"""The engine, the four images and what an operator brings, once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# It removes what a session leaves, in a container of an image that is not ours. Here each test removes its own.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
sys.path.insert(0, str(Path(__file__).parent))

from composed import told
from docker import DockerClient, from_env
from engine import ROOT, TAG, NoEngine, base_image, engine
from testcontainers.core.container import DockerContainer

SERVICES = ("coordinator", "reward", "trainer", "generator")


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerClient]:
    """The engine; tests are skipped where none can start."""
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        try:
            command = stack.enter_context(engine(tmp_path_factory.mktemp("engine")))
        except NoEngine as reason:
            pytest.skip(str(reason))
        # Named for the scripts, whose own choice may be a client without BuildKit.
        environment.setenv("DOCKER", command)
        yield from_env(timeout=300)


@pytest.fixture(scope="session")
def base(docker: DockerClient) -> str:
    return base_image(docker)


@pytest.fixture(scope="session")
def images(docker: DockerClient, base: str) -> dict[str, str]:
    """The images by service, built as `make images` builds them."""
    command = [sys.executable, ROOT / "scripts" / "build_images.py", "--base", base, "--tag", TAG]
    subprocess.run(command, check=True)
    return {service: f"flotilla-{service}:{TAG}" for service in SERVICES}


@pytest.fixture(scope="session")
def arithmetic(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/` of the arithmetic example, made in the trainer's image: there is torch."""
    folder = tmp_path_factory.mktemp("arithmetic")
    user = f"{os.getuid()}:{os.getgid()}"
    maker = DockerContainer(images["trainer"], network_mode="none", user=user)
    maker.with_command(["sleep", "infinity"]).with_volume_mapping(folder, "/made", "rw")
    maker.with_volume_mapping(ROOT / "examples" / "arithmetic", "/arithmetic")
    with maker:
        for script, out in (("make_model.py", "model"), ("make_data.py", "data")):
            told(maker.get_wrapped_container(), "python", f"/arithmetic/{script}", "--out", f"/made/{out}")
    return folder
