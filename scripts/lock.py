"""Resolve requirements/*.in into complete pinned locks.

Invariants: constraints.txt is one consistent set for a machine without a GPU, and every CPU lock is a subset
of it; the GPU locks are one consistent set of their own. A lock holds `name==version` lines and nothing else,
so that it works with whatever package index pip is configured for. Only metadata is read where the index
offers it. A service that has no file there needs what its package depends on. constraints.txt pins the packages of
this repository too, because others have their names on the public index; a version with a label after `+` cannot be
there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PROJECTS = [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
SERVICES = sorted(file.parent.name for file in PROJECTS if file.parts[-3] == "services")
CPU_SUBSETS = (*SERVICES, "coordinator-report", "light")
GPU_SUBSETS = ("trainer-gpu", "generator-gpu")
WITH_ALL_SERVICES = ("dev", "dev-gpu", "light", "ray", "tasks")
CUDA_LIBRARIES = re.compile(r"cuda-|nvidia-|triton$")
# vLLM names these for images and sound, which no service uses; a wheel of another build breaks its import.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
GPU_NOTE = "# Resolved from metadata, not yet run on GPUs.\n"

Pins = dict[str, str]


def resolve(name: str, constraints: Path | None, *, stock_index: bool = False) -> Pins:
    """Ask pip for the newest consistent set that satisfies what a lock is made of (and `constraints`)."""
    arguments = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    arguments += inputs(name)
    if constraints is not None:
        arguments += ["--constraint", str(constraints)]
    environment = dict(os.environ)
    if stock_index:
        # A machine may be set up to prefer CPU wheels; the GPU locks need what everyone else gets.
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run([*arguments, "--report", str(report)], check=True, env=environment)
        installs = json.loads(report.read_text("utf-8"))["install"]
    found = {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    return {
        name: version.partition("+")[0] for name, version in sorted(found.items()) if name not in LEFT_OUT
    }


def inputs(name: str) -> list[str]:
    """Return what a lock is made of, as pip takes it."""
    plain = [service for service in SERVICES if not (FOLDER / f"{service}.in").exists()]
    file = FOLDER / ("base.in" if name in plain else f"{name}.in")
    services = [name] if name in plain else plain if name in WITH_ALL_SERVICES else []
    found = {one for service in services for one in dependencies(f"flotilla-{service}")}
    return ["--requirement", str(file), *sorted(found)]


def dependencies(name: str) -> set[str]:
    """Return what a package of this repository, and those of ours that it needs, depend on."""
    tables = [tomllib.loads(file.read_text("utf-8"))["project"] for file in PROJECTS]
    needs = {table["name"]: table.get("dependencies", []) for table in tables}
    return set().union(*(dependencies(one) if one in needs else {one} for one in needs[name]))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def own_pins() -> Pins:
    """Return the packages of this repository, all in the version that the file VERSION holds."""
    version = (ROOT / "VERSION").read_text("ascii").strip()
    return {tomllib.loads(file.read_text("utf-8"))["project"]["name"]: version for file in PROJECTS}


def write_constraints(pins: Pins) -> None:
    own = own_pins()
    others = {name: pin for name, pin in pins.items() if not name.startswith("flotilla")}
    write("constraints", dict(sorted((own | others).items())))


def repin() -> None:
    """Bring the pins of this repository's own packages in constraints.txt up to date, and no others."""
    lines = (FOLDER / "constraints.txt").read_text("ascii").splitlines()
    write_constraints(dict(line.split("==") for line in lines if not line.startswith("#")))


def write(name: str, pins: Pins, note: str = "") -> None:
    lines = "".join(f"{package}=={version}\n" for package, version in pins.items())
    path = FOLDER / f"{name}.txt"
    path.write_text(f"# Made by `make lock`. Do not edit.\n{note}{lines}", encoding="ascii")
    print(f"{path.name}: {len(pins)} packages", flush=True)


def lock_set(whole: str, output: str, subsets: tuple[str, ...], *, upgrade: bool, gpu: bool) -> None:
    """Resolve `whole`.in once, keep it as `output`.txt, then cut each subset out of it."""
    note = GPU_NOTE if gpu else ""
    current = FOLDER / f"{output}.txt"
    kept = current if current.exists() and not upgrade else None
    pins = resolve(whole, kept, stock_index=gpu)
    if output == "constraints":
        write_constraints(pins)
    else:
        write(output, pins, note)
    if output != whole:
        write(whole, pins, note)
    for name in subsets:
        write(name, resolve(name, current, stock_index=gpu), note)


def main() -> int:
    parser = argparse.ArgumentParser(description="Resolve requirements/*.in into complete pinned locks.")
    parser.add_argument(
        "--upgrade", action="store_true", help="take newer releases instead of the current pins"
    )
    parser.add_argument(
        "--version", action="store_true", help="take only the new VERSION of our own packages"
    )
    arguments = parser.parse_args()
    if arguments.version:
        repin()
        return 0
    upgrade = arguments.upgrade
    lock_set("dev", "constraints", CPU_SUBSETS, upgrade=upgrade, gpu=False)
    lock_set("dev-gpu", "dev-gpu", GPU_SUBSETS, upgrade=upgrade, gpu=True)
    torch = resolve("torch-cuda", FOLDER / "dev-gpu.txt", stock_index=True)
    write("torch-cuda", {name: pin for name, pin in torch.items() if CUDA_LIBRARIES.match(name)})
    lock_set("tools", "tools", (), upgrade=upgrade, gpu=False)
    lock_set("docs", "docs", (), upgrade=upgrade, gpu=False)
    write("trackers", resolve("trackers", None))  # older packages than ours, in an environment of its own
    for name in ("helm", "mcp-server", "openenv", "verifiers"):  # in environments of their own
        write(name, resolve(name, None))
    for name in ("ray", "docker", "tasks"):
        write(name, resolve(name, FOLDER / "constraints.txt"))
    write("storage", resolve("storage", None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
