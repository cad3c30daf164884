"""Build the images of the services with Docker: `make images`.

    .venv/bin/python scripts/build_images.py [SERVICE...] [--flavour gpu] [--base IMAGE] [--tag TAG]
    .venv/bin/python scripts/build_images.py --resolve arm64

They stand on deploy/docker/Dockerfile. A service without a Dockerfile of its own has that of the folder `services`.

pip of this environment downloads the wheels of the locks, so whatever it is configured for (an index, a proxy, a
folder) works, and neither an address nor a certificate of it comes near an image. The build takes them from a server on
loopback, which a secret file names. `--resolve` asks the index whether it has each wheel for another machine.

Invariants: a wheelhouse holds what its stamp says, and is used again as long as the locks are the same.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "images"
SERVICES = tuple(sorted(file.parent.name for file in ROOT.glob("services/*/pyproject.toml")))
DOCKERFILES = {
    service: own
    if (own := ROOT / "services" / service / "Dockerfile").exists()
    else ROOT / "services/Dockerfile"
    for service in SERVICES
}
LOCKS = {
    service: dict(
        re.findall(
            r"^ARG (LOCK|ENGINE)=(\S+)$",
            file.read_text("utf-8").replace("${SERVICE}", service),
            re.MULTILINE,
        )
    )
    for service, file in DOCKERFILES.items()
}
"""The locks of each image, by the arguments of its Dockerfile."""
COMPILER = "gcc libc6-dev python3-dev"
"""Packages with which Triton and torch compile on a GPU's host."""
TO_BUILD_OURS = ("hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
PYTHON = "3.11"
NEWEST_GLIBC = 36  # of Debian 12, which is the base
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("services", nargs="*", default=SERVICES, metavar="SERVICE", help="(all)")
    parser.add_argument("--flavour", choices=("cpu", "gpu"), default="cpu", help="(%(default)s)")
    parser.add_argument("--base", help="base image, with Python 3.11 (that of deploy/docker/Dockerfile)")
    parser.add_argument("--tag", default=_version(), help="(the version, with -gpu for the GPU flavour)")
    parser.add_argument(
        "--resolve", choices=MACHINES, help="only ask whether all wheels exist for this machine"
    )
    given = parser.parse_args()
    if unknown := set(given.services) - set(SERVICES):
        parser.error(f"there is no service {', '.join(sorted(unknown))}")
    if given.resolve:
        return resolve(given.resolve, given.services)
    common = build_common(given.base, given.tag)
    for service in given.services:
        build(service, given.flavour, common, given.tag)
    return 0


def build_common(base: str | None, tag: str) -> str:
    """Build what all images stand on, and return its name."""
    image = f"flotilla-common:{tag}"
    docker_build(ROOT / "deploy" / "docker" / "Dockerfile", image, {"BASE": base} if base else {})
    return image


def build(service: str, flavour: str, common: str, tag: str) -> str:
    """Build one image, keep its bill of materials beside the wheels, and return its name."""
    gpu = flavour == "gpu" and (ROOT / "requirements" / f"{service}-gpu.txt").exists()
    image = f"flotilla-{service}:{tag}{'-gpu' if gpu else ''}"
    arguments = {"SERVICE": service, "COMMON": common, "VERSION": _version(), "REVISION": _revision()}
    if gpu:
        arguments |= {name: f"{lock}-gpu" for name, lock in LOCKS[service].items()}
        arguments["PACKAGES"] = f"libnuma1 {COMPILER}"
    names = [f"{lock}-gpu" if gpu else lock for lock in LOCKS[service].values()]
    with served(wheelhouse(service + ("-gpu" if gpu else ""), names)) as pip_conf:
        secret = ["--secret", f"id=pip,src={pip_conf}"]
        docker_build(DOCKERFILES[service], image, arguments, *secret)
    bill = output(
        "run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/opt/flotilla/sbom.cdx.json"
    )
    (BUILD / f"{image.replace(':', '-')}.cdx.json").write_text(bill + "\n", "utf-8")
    above = size(image) - size(common)
    print(f"==> {image}: {above / 1e6:.0f} MB above {common}", flush=True)
    return image


def docker_build(file: Path, image: str, arguments: dict[str, str], *options: str) -> None:
    print(f"==> {image}", flush=True)
    command = [docker(), "build", "--network", "host", "--tag", image, "--file", str(file), *options]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    subprocess.run(
        [*command, str(ROOT)],
        check=True,
        env={**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"},
    )


def wheelhouse(name: str, locks: Sequence[str]) -> Path:
    """Return a folder with every wheel of the locks, and with those that build our own packages."""
    folder = BUILD / "wheels" / name
    wanted = [ROOT / "requirements" / f"{lock}.txt" for lock in (*locks, "constraints")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in wanted)).hexdigest()
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"==> {name}: downloading wheels", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        ours = Path(temporary, "build.txt")
        lines = (ROOT / "requirements" / "constraints.txt").read_text("ascii").splitlines()
        ours.write_text("\n".join(line for line in lines if line.partition("==")[0] in TO_BUILD_OURS))
        for lock in (ours, *wanted[:-1]):
            pip("download", "--dest", str(folder), *for_machine("amd64"), "--requirement", str(lock))
    stamp.write_text(digest)
    return folder


def resolve(machine: str, services: Sequence[str]) -> int:
    """Report for each service whether the index has all wheels of its locks; nothing is downloaded or installed."""
    missing = 0
    for service in services:
        locks = [str(ROOT / "requirements" / f"{lock}.txt") for lock in LOCKS[service].values()]
        with tempfile.TemporaryDirectory() as temporary:
            requirements = [word for lock in locks for word in ("--requirement", lock)]
            done = pip(
                "install",
                "--dry-run",
                "--ignore-installed",
                "--target",
                temporary,
                *for_machine(machine),
                *requirements,
                check=False,
            )
        missing += done.returncode != 0
        said = (done.stderr or "").strip().splitlines()
        why = next((line for line in said if "No matching distribution" in line), said[-1] if said else "")
        verdict = "has every wheel" if done.returncode == 0 else why
        print(f"{service} on {machine}: {verdict}", flush=True)
    return min(missing, 1)


def for_machine(machine: str) -> list[str]:
    """Return the options by which pip chooses wheels for Debian 12 on this machine, wherever it runs itself."""
    arch = MACHINES[machine]
    tags = [f"manylinux_2_{minor}_{arch}" for minor in range(NEWEST_GLIBC, 4, -1)]
    tags += [f"manylinux2014_{arch}", f"manylinux2010_{arch}", f"manylinux1_{arch}", f"linux_{arch}"]
    chosen = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    return [*chosen, *(word for tag in tags for word in ("--platform", tag))]


def pip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise SystemExit(f"pip {arguments[0]} failed:\n{done.stderr[-4000:]}")
    return done


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """Serve a wheelhouse on loopback; give a pip.conf that names it as the only place to take packages from."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "pip.conf")
        address = f"http://127.0.0.1:{server.server_port}/"
        file.write_text(f"[global]\nno-index = true\nno-cache-dir = true\nfind-links = {address}\n")
        try:
            yield file
        finally:
            server.shutdown()
            server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@functools.cache
def docker() -> str:
    """Return a docker that builds with BuildKit: one with buildx, or a release that has BuildKit inside."""
    found = [os.environ.get("DOCKER", ""), shutil.which("docker") or "", "/usr/bin/docker"]
    for candidate in filter(None, dict.fromkeys(found)):
        if not shutil.which(candidate):
            continue
        if subprocess.run([candidate, "buildx", "version"], capture_output=True, check=False).returncode == 0:
            return candidate
        version = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
        number = version.partition("version ")[2].partition(".")[0]
        if number.isdigit() and int(number) < 23:
            return candidate
    raise SystemExit("no docker with BuildKit: install docker-buildx, or name one in DOCKER")


def output(*arguments: str) -> str:
    return subprocess.run([docker(), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def size(image: str) -> int:
    return int(json.loads(output("image", "inspect", image))[0]["Size"])


def _version() -> str:
    return (ROOT / "VERSION").read_text("ascii").strip().partition("+")[0]


def _revision() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
