"""A Docker engine for the tests: the one that runs, else one from Debian's packages, started here as root.

Invariant: an engine that was started here ends with the session, by its process id; one that ran before is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from docker import DockerClient, from_env
from docker.errors import APIError, DockerException, ImageNotFound

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("docker.io", "docker-compose", "debootstrap")
PROGRAMS = ("dockerd", "docker-compose", "debootstrap")
START_S = 60.0
TAG = "test"
BASE = "flotilla-base:bookworm"
OFFICIAL = "python:3.11-slim-bookworm"


class NoEngine(Exception):
    """No engine runs here and none can be started; the message says why."""


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Give the `docker` that builds with BuildKit, with an engine behind it; its log is in `folder`."""
    with contextlib.ExitStack() as stack:
        if not answers():
            if os.geteuid() != 0:
                raise NoEngine("no Docker engine answers, and only root can start one")
            install()
            stack.enter_context(daemon(folder / "dockerd.log"))
        command = [sys.executable, "-c", "import build_images; print(build_images.docker())"]
        found = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=False)
        if found.returncode != 0:
            raise NoEngine(found.stderr.strip())
        yield found.stdout.strip()


def answers() -> bool:
    try:
        return bool(from_env().ping())
    except DockerException:
        return False


def install() -> None:
    """Install what is missing from Debian's packages."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise NoEngine("no Docker engine answers, and there is no apt-get to install one with")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-q", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise NoEngine(f"apt-get {arguments[0]} failed: {done.stderr[-500:]}")


@contextlib.contextmanager
def daemon(log: Path) -> Iterator[None]:
    # Where the host forwards already, dockerd leaves its policy for forwarded packets as it is.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with log.open("wb") as output:
        process = subprocess.Popen(["dockerd"], stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoEngine(f"dockerd does not start here: {log.read_text(errors='replace')[-800:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def base_image(docker: DockerClient) -> str:
    """Return a base with Python 3.11: one that is here, else the official one, else one of Debian's packages."""
    for image in (OFFICIAL, BASE):
        with contextlib.suppress(ImageNotFound):
            docker.images.get(image)
            return image
    try:
        docker.images.pull(OFFICIAL)
        return OFFICIAL
    except APIError:
        subprocess.run([ROOT / "deploy" / "docker" / "base.sh", BASE], check=True, capture_output=True)
        return BASE
