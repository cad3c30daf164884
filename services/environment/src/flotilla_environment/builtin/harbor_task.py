"""Task folders of Harbor, as their public format has them: what a room of ours can play is read, all else is refused.

Invariants: nothing of the folder is run here, and nothing outside of it is read. A task is refused, by the name of what
it needs, where its place could not be made as its author meant it: a reward of it would be of another task.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from flotilla_workers.functions import Refusal

BASES = ("debian", "python", "ubuntu")
MOST_BYTES = 64 << 20
MOST_FILES = 2_000
TESTS, VERIFIER = "/tests", "/logs/verifier"
WORKDIR = "/app"
"""The folder of commands, where neither task.toml nor the Dockerfile names one."""
TESTS_S = 600.0
"""The time of the tests, where task.toml names none."""
OF_SYSTEM = frozenset({"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr"})
NEEDS = (
    "environment.docker_image",
    "environment.gpus",
    "environment.gpu_types",
    "environment.tpu",
    "environment.mcp_servers",
    "environment.healthcheck",
    "environment.skills_dir",
    "environment.allowed_hosts",
    "verifier.environment",
    "verifier.collect",
    "verifier.allowed_hosts",
    "agent.allowed_hosts",
    "steps",
)
"""Keys of task.toml that ask for what a room is not."""
DOCKERFILE = "environment/Dockerfile"
FILES = (
    "environment/docker-compose.yaml",
    "environment/docker-compose.yml",
    "environment/.dockerignore",
    "trajectory.json",
)
"""Files that ask for the same."""
INSTALLS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|conda|pip3?|uv|npm|yarn|cargo|go|gem) +(-\S+ +)*(install|add|update|get|sync|pip)\b"
    r"|\buvx\b|\bnpx\b|\bgit +clone\b|\b(curl|wget)\b(?!.*(localhost|127\.0\.0\.1))"
)
"""Commands of a script that load something from the network."""


@dataclass(frozen=True)
class RoomFile:
    """A file as it is to be in the room."""

    path: str
    data: bytes = field(repr=False)
    mode: int


@dataclass
class HarborTask:
    """A task that a room can play."""

    instruction: str
    tests: list[RoomFile]
    tests_limit_s: float
    workdir: str = WORKDIR
    files: list[RoomFile] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    tests_variables: dict[str, str] = field(default_factory=dict)

    @property
    def writable(self) -> tuple[str, ...]:
        """The folders at the root of the room that the task and its tests write in."""
        folders = [TESTS, VERIFIER, self.workdir, *(os.path.dirname(file.path) for file in self.files)]
        tops = dict.fromkeys(map(_top, folders))
        if system := OF_SYSTEM & {*tops}:
            raise Refusal(
                f"it writes to /{min(system)}, which a room shows as this host has it, and read-only"
            )
        return tuple(f"/{top}" for top in tops if top != "tmp")


def _top(folder: str) -> str:
    """Return the folder at the root that a folder is in."""
    first, *others = PurePosixPath(os.path.normpath(folder)).parts
    if not first.startswith("/") or not others:
        raise Refusal(f"it writes to {folder}, and a room has folders below / alone")
    return others[0]


def read_task(folder: Path, bases: tuple[str, ...] = BASES) -> HarborTask:
    """Return the task in a folder; raise `Refusal` that names what a room cannot do."""
    try:
        return _read(folder, bases)
    except Refusal as error:
        raise Refusal(f"Harbor task {folder}: {error}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Refusal(f"Harbor task {folder} cannot be read: {error}") from None


def _read(folder: Path, bases: tuple[str, ...]) -> HarborTask:
    settings = tomllib.loads(_text(folder, "task.toml"))
    for key in NEEDS:
        if _of(settings, key):
            raise Refusal(f"task.toml sets {key}, which no room has")
    if str(_of(settings, "environment.os") or "linux").lower() != "linux":
        raise Refusal(
            f"task.toml sets environment.os: {_of(settings, 'environment.os')}, and rooms run Linux"
        )
    if _of(settings, "verifier.environment_mode") == "separate":
        raise Refusal(
            "task.toml sets verifier.environment_mode: separate, and its tests run in the room of the task"
        )
    for key in ("agent.user", "verifier.user"):
        if _of(settings, key) not in (None, "root", 0):
            raise Refusal(f"task.toml sets {key}, and a room has one user")
    for name in FILES:
        if os.path.lexists(folder / name):
            raise Refusal(f"it has {name}, which no room follows")
    found = _files(_inside(folder, folder / "tests"))
    tests = [RoomFile(f"{TESTS}/{name}", data, mode) for name, data, mode in found]
    if not any(file.path == f"{TESTS}/test.sh" for file in tests):
        raise Refusal("it has no tests/test.sh")
    for file in tests:
        if file.path.endswith(".sh"):
            _refuse_network(file)
    task = HarborTask(_text(folder, "instruction.md").strip(), tests, _limit_s(settings))
    if os.path.lexists(folder / DOCKERFILE):
        _build(task, folder, bases)
    task.workdir = str(_of(settings, "environment.workdir") or task.workdir)
    task.variables |= _variables(settings, "environment.env")
    task.tests_variables = _variables(settings, "verifier.env")
    return task


def _of(settings: dict[str, Any], key: str) -> Any:
    found: Any = settings
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _limit_s(settings: dict[str, Any]) -> float:
    """Return the time of the tests."""
    limit_s = float(_of(settings, "verifier.timeout_sec") or TESTS_S)
    if not 0 < limit_s < math.inf:
        raise Refusal(f"task.toml sets verifier.timeout_sec: {limit_s:g}, which is no time")
    return limit_s


def _variables(settings: dict[str, Any], key: str) -> dict[str, str]:
    given = {str(name): str(value) for name, value in dict(_of(settings, key) or {}).items()}
    for name, value in given.items():
        if "${" in value:
            raise Refusal(f"task.toml takes {key}.{name} from a variable of the host, and rooms see none")
    return given


def _inside(root: Path, path: Path) -> Path:
    """Return the place that a path leads to; a link may lead out of the folder, and that is refused."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(os.path.realpath(root)):
        raise Refusal(f"{path.relative_to(root)} leads out of its folder")
    return place


def _content(root: Path, path: Path) -> tuple[bytes, int]:
    """Return content and mode of a file below a folder."""
    place = _inside(root, path)
    found = place.stat()
    if not place.is_file() or found.st_size > MOST_BYTES:
        raise Refusal(f"{path.relative_to(root)} is no file of at most {MOST_BYTES:,} bytes")
    return place.read_bytes(), 0o755 if found.st_mode & 0o111 else 0o644


def _text(root: Path, name: str) -> str:
    return _content(root, root / name)[0].decode("utf-8")


def _files(folder: Path) -> Iterator[tuple[str, bytes, int]]:
    """Give name, content and mode of each file below a folder."""
    left = MOST_BYTES
    found = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if len(found) > MOST_FILES:
        raise Refusal(f"{folder.name}/ has {len(found):,} files, of {MOST_FILES:,} at most")
    for path in found:
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file():
            raise Refusal(f"{folder.name}/{name} is no file, but a link or a device")
        left -= path.stat().st_size
        if left < 0:
            raise Refusal(f"{folder.name}/ has more than {MOST_BYTES:,} bytes")
        yield name, *_content(folder, path)


def _refuse_network(script: RoomFile) -> None:
    for number, line in enumerate(script.data.decode(errors="replace").splitlines(), 1):
        if not line.lstrip().startswith("#") and (found := INSTALLS.search(line)):
            raise Refusal(
                f"{script.path[1:]}, line {number}, loads something from the network by {found[0]!r}, and rooms have "
                "none: install it on the host, and take that out of the script"
            )


def _build(task: HarborTask, folder: Path, bases: tuple[str, ...]) -> None:
    """Do in the room what a Dockerfile says, where that is no more than a base, files, a folder and variables."""
    has_base = False
    for number, word, rest in _instructions(_text(folder, DOCKERFILE)):
        where = f"{DOCKERFILE}, line {number}"
        if word == "FROM" and not has_base:
            has_base = True
            image = _image(rest)
            if image not in bases:
                raise Refusal(
                    f"{where}, asks for the image {rest}: name {image} in the parameter bases where this host can "
                    "stand for it"
                )
        elif word in ("WORKDIR", "ENV", "COPY") and "$" in rest:
            # The values of the image are not known here, such as that of PATH.
            raise Refusal(f"{where}, has a variable in {word} {rest[:80]}: write its value there")
        elif word == "WORKDIR":
            task.workdir = str(PurePosixPath(task.workdir) / rest)
        elif word == "ENV":
            first, *others = shlex.split(rest)
            pairs = (one.partition("=")[::2] for one in (first, *others))
            task.variables |= pairs if "=" in first else [rest.partition(" ")[::2]]
        elif word == "COPY":
            task.files += _copied(rest, folder / "environment", task.workdir, where)
        elif word != "LABEL":
            raise Refusal(f"{where}, asks for an image by {word} {rest[:80]}")


def _image(rest: str) -> str:
    """Return the image of a FROM without its tag; one of Docker's own has its short name."""
    words = [word for word in rest.split() if not word.startswith("--platform=")]
    named = re.sub("(:[^/:@]*)?(@.*)?$", "", words[0] if words else "")
    return named.removeprefix("docker.io/").removeprefix("library/")


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Give the number, the first word and the rest of each instruction of a Dockerfile."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        whole, first = (whole, first) if whole else ("", number)
        whole += line.strip()
        if whole.endswith("\\"):
            whole = whole[:-1] + " "
            continue
        if whole:
            word, _, rest = whole.partition(" ")
            yield first, word.upper(), rest.strip()
        whole = ""


def _copied(rest: str, folder: Path, workdir: str, where: str) -> Iterator[RoomFile]:
    """Give the files of a COPY, at their places in the room."""
    words = [str(word) for word in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    asked: int | None = None
    for flag in [word for word in words if word.startswith("--")]:
        name, _, value = flag.partition("=")
        if name == "--chmod" and re.fullmatch("[0-7]{3,4}", value):
            asked = int(value, 8)
        elif name != "--chown":  # A room has one user.
            raise Refusal(f"{where}, copies with {flag}")
    *sources, target = [word for word in words if not word.startswith("--")]
    if not sources:
        raise Refusal(f"{where}, copies nothing")
    into = PurePosixPath(workdir) / target
    for source in sources:
        named = PurePosixPath(source.lstrip("/"))
        if ".." in named.parts:
            raise Refusal(f"{where}, copies from outside of its folder: {source}")
        found = [folder] if str(named) == "." else sorted(folder.glob(str(named)))
        if not found:
            raise Refusal(f"{where}, copies {source}, which is not there")
        to_folder = target.endswith("/") or len(sources) > 1 or len(found) > 1 or target == "."
        for path in found:
            if path.is_symlink():
                raise Refusal(f"{where}, copies a link: {source}")
            if path.is_dir():
                files = _files(_inside(folder, path))
                yield from (RoomFile(str(into / name), data, asked or mode) for name, data, mode in files)
                continue
            data, mode = _content(folder, path)
            yield RoomFile(str(into / path.name if to_folder else into), data, asked or mode)
