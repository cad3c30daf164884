"""One release is one version everywhere, its dependencies are locked, and it understands the release before it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text("ascii").strip()
PUBLIC, _, LABEL = VERSION.partition("+")
PROJECTS = sorted([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])
BUF = Path(sys.executable).parent / "buf"
FOR_TESTS = "flotilla-testing"


def project(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text("utf-8"))


def requirements(file: Path) -> list[Requirement]:
    table = project(file)["project"]
    extras = table.get("optional-dependencies", {}).values()
    return [Requirement(text) for part in (table.get("dependencies", []), *extras) for text in part]


def test_no_package_of_ours_can_be_mistaken_for_one_of_a_public_index() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PUBLIC)
    assert LABEL == "source", "others have the names; a public index takes no version with a label"


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_every_package_takes_the_one_version(file: Path) -> None:
    tables = project(file)
    assert "version" in tables["project"]["dynamic"]
    assert (file.parent / tables["tool"]["hatch"]["version"]["path"]).resolve() == ROOT / "VERSION"
    assert metadata.version(tables["project"]["name"]) == VERSION, "run `make setup`"


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_every_package_carries_the_license(file: Path) -> None:
    assert (file.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), "run `make setup`"


def test_flotilla_names_every_package_but_the_one_for_tests() -> None:
    named = {Requirement(text).name for text in metadata.requires("flotilla") or ()}
    assert named == {project(file)["project"]["name"] for file in PROJECTS} - {"flotilla", FOR_TESTS}
    assert {str(Requirement(text).specifier) for text in metadata.requires("flotilla") or ()} == {
        f"=={VERSION}"
    }


def test_an_extra_installs_its_service_with_all_that_it_imports() -> None:
    ours = {project(file)["project"]["name"]: file for file in PROJECTS}
    named = [Requirement(text) for text in metadata.requires("flotilla") or ()]
    for service in (file.parent.name for file in PROJECTS if file.parts[-3] == "services"):
        pulled = {one.name for one in named if one.marker is None or one.marker.evaluate({"extra": service})}
        assert f"flotilla-{service}" in pulled
        needed = {one.name for name in pulled for one in requirements(ours[name]) if one.name in ours}
        assert needed <= pulled


def test_constraints_pin_every_dependency() -> None:
    # Clients of trackers, Ray and generated tasks are extras, and have locks of their own.
    locks = [
        (ROOT / "requirements" / name).read_text("ascii")
        for name in ("trackers.txt", "ray.txt", "tasks.txt", "constraints.txt")
    ]
    lines = [line for lock in locks for line in lock.splitlines()]
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed = [(file.parent.name, one) for file in PROJECTS for one in requirements(file)]
    missing = [f"{name}: {one}" for name, one in needed if one.name not in pins]
    assert missing == [], "add it to requirements/*.in and run `make lock`"
    wrong = [f"{name}: {one}" for name, one in needed if not one.specifier.contains(pins[one.name])]
    assert wrong == []
    ours = {name: pin for name, pin in pins.items() if name.startswith("flotilla")}
    assert ours == {project(file)["project"]["name"]: VERSION for file in PROJECTS}, (
        "scripts/lock.py --version"
    )


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == PUBLIC


def newest_release() -> Path:
    kept = (ROOT / "protos" / "released").glob("*.binpb")
    return max(kept, key=lambda file: [int(number) for number in file.stem.split(".")])


def broken(protos: Path) -> str:
    """What in `protos` breaks a peer of the last release; empty when nothing does."""
    command = [BUF, "breaking", protos, "--against", newest_release()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (done.stdout == ""), done.stderr
    return done.stdout


def test_contracts_are_those_of_the_last_release_with_additions_only() -> None:
    assert broken(ROOT / "protos") == ""


def test_the_contracts_of_this_version_are_kept() -> None:
    assert newest_release().stem == PUBLIC, "run `make proto-release`"


def test_a_field_that_is_gone_is_named(tmp_path: Path) -> None:
    protos = shutil.copytree(ROOT / "protos", tmp_path / "protos")
    file = protos / "flotilla" / "common" / "v1" / "version.proto"
    text, removed = re.subn(r"^ *(u?int64|u?int32) step = \d+;\n", "", file.read_text("utf-8"), flags=re.M)
    assert removed == 1
    file.write_text(text, "utf-8")
    assert "step" in broken(protos)
