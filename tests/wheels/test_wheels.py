"""Wheels are whole: a fresh environment outside the repository gets a fleet that trains, and nothing from the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_core.kinds import KINDS
from flotilla_testing.runs import small_run

pytestmark = pytest.mark.timeout(1200)  # the first installation may have to fetch torch

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text("ascii").strip()
PROJECTS = sorted([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])
STEPS = 3


def run(*command: str | Path, cwd: Path, timeout_s: float = 300) -> str:
    """Run a command that must succeed, as a user would outside of the repository; what it prints."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project(file: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))["project"]
    return table


def wheel_of(dist: Path, file: Path) -> zipfile.ZipFile:
    (wheel,) = dist.glob(f"{project(file)['name'].replace('-', '_')}-{VERSION}-*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheels` builds."""
    folder = tmp_path_factory.mktemp("dist")
    run("make", "wheels", f"DIST={folder}", cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment that pip filled from the wheels."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    constraints = ROOT / "requirements" / "constraints.txt"
    services = {file.parent.name for file in PROJECTS if file.parts[-3] == "services"}
    wanted = f"flotilla[{','.join(sorted(services - {'coordinator'}))}]"
    run(*pip, "--find-links", dist, "-c", constraints, wanted, cwd=folder, timeout_s=1000)
    return folder / "bin"


@pytest.fixture(scope="module")
def workplace(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user: the example's files, and stack and run of a fleet with simulated generators."""
    folder = tmp_path_factory.mktemp("workplace")
    example = folder / "examples" / "arithmetic"
    shutil.copytree(
        ROOT / "examples" / "arithmetic",
        example,
        ignore=shutil.ignore_patterns("model", "data", "out", "runs"),
    )
    stack = {
        "name": "wheels",
        "model": "examples/arithmetic/model",
        "generator": {"engine": "sim"},
        "trainer": {"nproc": 1},
    }
    (example / "sim.yaml").write_text(yaml.safe_dump(stack))
    small_run(example, folder / "run.yaml", steps=STEPS)
    return folder


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_a_wheel_holds_the_files_of_its_package_and_no_others(dist: Path, file: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "src"]
    files = subprocess.run(listed, cwd=file.parent, check=True, capture_output=True, text=True).stdout
    sources = {path.removeprefix("src/") for path in files.splitlines()}
    with wheel_of(dist, file) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == sources


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_a_wheel_has_the_one_version_and_the_license(dist: Path, file: Path) -> None:
    with wheel_of(dist, file) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
        license_text = wheel.read(name.replace("METADATA", "licenses/LICENSE"))
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert license_text == (ROOT / "LICENSE").read_bytes()


def test_every_command_starts(environment: Path, tmp_path: Path) -> None:
    commands = sorted(command for file in PROJECTS for command in project(file).get("scripts", {}))
    names = ("launcher", *(kind.name for kind in KINDS))
    assert commands == ["flotilla", *sorted(f"flotilla-{name}" for name in names)]
    for command in commands:
        assert "usage" in run(environment / command, "--help", cwd=tmp_path).lower()
    assert run(environment / "flotilla", "--version", cwd=tmp_path) == f"flotilla {VERSION}\n"


def test_nothing_is_missing_and_nothing_comes_from_the_repository(environment: Path, tmp_path: Path) -> None:
    run(environment / "python", "-m", "pip", "check", cwd=tmp_path)
    modules = [name for name in os.listdir(environment.parent / "lib") if name.startswith("python")]
    code = (
        "import importlib, json, pkgutil, flotilla, sys\n"
        "names = [each.name for each in pkgutil.iter_modules() if each.name.startswith('flotilla')]\n"
        "files = {name: importlib.import_module(name).__file__ for name in names}\n"
        "print(json.dumps({**files, 'flotilla': list(flotilla.__path__)[0]}))"
    )
    found = json.loads(run(environment / "python", "-c", code, cwd=tmp_path))
    assert len(found) == len(PROJECTS) - 2, "all but the package for tests, and `flotilla`, which has no code"
    assert [file for file in found.values() if modules[0] not in file or str(ROOT) in file] == []


def test_a_fleet_comes_up_trains_and_goes_down(environment: Path, workplace: Path) -> None:
    def flotilla(*arguments: str) -> Any:
        stack = ("--stack", "examples/arithmetic/sim.yaml")
        return json.loads(run(environment / "flotilla", *arguments, *stack, "--json", cwd=workplace))

    try:
        services = flotilla("up")["processes"]
        assert {one["kind"] for one in services} >= {"coordinator", "generator", "reward", "trainer"}
        assert {one["state"] for one in services} == {"ready"}
        # The simulated engine's log-probabilities are not those of any policy, so there is nothing to compare.
        uncompared = ("weights.canary.prompts=0", "algorithm.correction={warn_at: null, fail_at: null}")
        finished = flotilla("run", "start", "run.yaml", *uncompared, "--wait")
        assert (finished["state"], finished["step"]) == ("succeeded", STEPS), finished["reason"]
        assert (Path(finished["directory"]) / "model" / "config.json").is_file()
    finally:
        ended = flotilla("down")
    assert ended["stopped"]
    assert [run["run_id"] for run in flotilla("run", "list")["runs"]] == [finished["run_id"]]
