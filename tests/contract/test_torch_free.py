"""The coordinator and the command line live without torch: on a laptop, in a 200 MB image, on a login node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from flotilla_core.bus import NatsServer
from flotilla_core.config import BindConfig
from flotilla_core.files import make_private_folder
from flotilla_core.trust.authority import make_credential
from flotilla_testing.stack import wait_until

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted(ROOT.glob("libs/*/src")), ROOT / "services" / "coordinator" / "src"]
HEAVY = ("torch", "vllm", "transformers")


@pytest.fixture(scope="module")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the coordinator's lock and nothing else, out of what this one has installed."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for line in (ROOT / "requirements" / "coordinator.txt").read_text().splitlines():
        name, pinned, version = line.partition("==")
        if pinned:
            link(name, version, site)
    (site / "flotilla.pth").write_text("\n".join(str(source) for source in SOURCES))
    for ours in Path(sysconfig.get_path("purelib")).glob("flotilla_*.dist-info"):
        shutil.copytree(ours, site / ours.name)
    return folder / "bin" / "python"


def link(name: str, version: str, site: Path) -> None:
    """Install a distribution as `pip install --no-deps` would, by links."""
    installed = metadata.distribution(name)
    assert installed.version == version, f"{name} is not what the lock says: run `make setup`"
    for file in set(installed.files or ()):
        if ".." not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.locate())


def test_nothing_heavy_is_installed_or_imported(light_python: Path) -> None:
    code = (
        "import importlib.util, sys, flotilla_coordinator.service, flotilla_cli.main, flotilla_client;"
        f"print([name for name in {HEAVY!r} if importlib.util.find_spec(name) or name in sys.modules])"
    )
    done = subprocess.run([light_python, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


async def test_coordinator_serves_the_command_line(light_python: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    stack = tmp_path / "stack.yaml"
    stack.write_text(yaml.safe_dump({"name": "light", "model": str(model), "state_dir": str(tmp_path)}))
    directory = tmp_path / "light"
    make_private_folder(directory)
    own = make_credential(BindConfig(), directory)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    nats = await NatsServer.start(directory / "nats", credential=own)
    command = [light_python, "-m", "flotilla_coordinator.main", "--name", "coordinator"]
    coordinator = subprocess.Popen(
        [*command, "--stack", str(stack), "--nats", nats.url],
        env=environment,
    )
    try:
        announced = directory / "instances" / "coordinator.json"
        wait_until("the coordinator's address", announced.exists, 60)
        listed = subprocess.run(
            [
                light_python,
                "-m",
                "flotilla_cli.main",
                "run",
                "list",
                "--json",
                "--stack",
                str(stack),
            ],
            env={**environment, "FLOTILLA_COORDINATOR": json.loads(announced.read_text())["address"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert listed.returncode == 0, listed.stderr
        assert json.loads(listed.stdout)["runs"] == []
    finally:
        coordinator.terminate()
        coordinator.wait(30)
        await nats.stop()
