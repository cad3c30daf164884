"""Finds the stack that a command means, and makes the files of the arithmetic example on its first start.

The order is: the argument of `--stack` (a file, or the name of a stack that was started here), ./stack.yaml, then the
arithmetic example's stack file. With none of these, the stack is named `local` and has all defaults.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import flotilla_client
from flotilla_cli.options import wait
from flotilla_cli.output import say
from flotilla_core import rpc
from flotilla_core.activities import Activities
from flotilla_core.config import StackConfig, load
from flotilla_core.config.model import is_url
from flotilla_core.errors import FailedPrecondition, NotFound, Unavailable
from flotilla_core.gangs import model_of, model_roles
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import is_up

if TYPE_CHECKING:
    from flotilla_client import Client
    from flotilla_client.discovery import CoordinatorAddress
    from flotilla_coordinator.views.stored import StoredAnswers

    Answers = Client | StoredAnswers

EXAMPLE = Path("examples/arithmetic")
_DEFAULT_FILES = (Path("stack.yaml"), EXAMPLE / "stack.yaml")

LAST_LINES = 5

Result = TypeVar("Result")


def stack_file(given: str | None) -> Path | None:
    """Return the file that describes the stack; None when there is none."""
    if given is not None:
        started_here = Path(".flotilla") / given / "stack.yaml"
        return (
            started_here
            if "/" not in given and os.path.exists(started_here) and not os.path.exists(given)
            else Path(given)
        )
    return next((file for file in _DEFAULT_FILES if file.exists()), None)


def load_stack(given: str | None) -> StackConfig:
    """Return the stack's configuration, checked, with absolute paths."""
    file = stack_file(given)
    return load(StackConfig, [file] if file is not None else [], resolve_paths=True)


def load_stack_with_model(given: str | None) -> StackConfig:
    """Return the stack for a command that uses its model, which without a stack file would be that of an example."""
    stack = load_stack(given)
    if (refusal := missing_model(given, stack)) is not None:
        raise refusal
    return stack


def missing_model(given: str | None, stack: StackConfig) -> NotFound | None:
    """Return the refusal of a command that needs a model where no stack file names one; None where one does."""
    if stack_file(given) is not None or os.path.isdir(stack.model):
        return None
    return NotFound(
        "there is no stack file, which names the model",
        where=str(Path.cwd()),
        why=f"neither {' nor '.join(map(str, _DEFAULT_FILES))} is here",
        next_step="name one by --stack FILE, or make one: flotilla init",
    )


def stack_paths(given: str | None) -> StackPaths:
    """Return the places of the stack's files."""
    stack = load_stack(given)
    paths = StackPaths.of(stack.state_dir, stack.name)
    paths.check_access()
    return paths


def coordinator_of(given: str | None, coordinator: str | None) -> CoordinatorAddress:
    """Return where the stack's coordinator is, or the one that was named."""
    stack = load_stack(given)
    return flotilla_client.find_coordinator(stack.name, stack.state_dir, coordinator, bind=stack.bind)


def client_of(given: str | None, coordinator: str | None) -> Client:
    """Return a client of the stack's coordinator, or of the one that was named."""
    found = coordinator_of(given, coordinator)
    return flotilla_client.Client(found.address, credential=found.credential)


def call(
    question: Callable[[Client], Coroutine[Any, Any, Result]], stack: str | None, coordinator: str | None
) -> Result:
    """Return the coordinator's answer."""
    found = coordinator_of(stack, coordinator)

    async def answer() -> Result:
        async with flotilla_client.Client(found.address, credential=found.credential) as client:
            return await question(client)

    return wait(answer())


def ask(
    question: Callable[[Answers], Coroutine[Any, Any, Result]], stack: str | None, coordinator: str | None
) -> Result:
    """Return the coordinator's answer; where no fleet runs, that of the stack's files."""

    def of_files(paths: StackPaths) -> Result:
        stored = stored_answers(paths)
        say(f"no fleet is running: read from {paths.directory}")
        return wait(question(stored))

    return ask_or_else(question, of_files, stack, coordinator)


def ask_or_else(
    question: Callable[[Client], Coroutine[Any, Any, Result]],
    otherwise: Callable[[StackPaths], Result],
    stack: str | None,
    coordinator: str | None,
) -> Result:
    """Return the coordinator's answer; where no fleet runs, call `otherwise` with the stack's files."""
    try:
        return call(question, stack, coordinator)
    except Unavailable:
        paths = stack_paths(stack)
        if coordinator is not None or is_up(paths):
            raise
        return otherwise(paths)


def stored_answers(paths: StackPaths) -> StoredAnswers:
    """Return what answers from the files of a stack; only a command that asks no coordinator imports it."""
    from flotilla_coordinator.views.stored import StoredAnswers

    return StoredAnswers(paths.directory)


def make_example(file: Path | None) -> None:
    """Make the model and data of the example; do nothing for any other stack, or where they exist."""
    if file is None or file.resolve().parent != EXAMPLE.resolve():
        return
    for folder, script, what in (
        ("model", "make_model.py", "model of the arithmetic example (0.8M parameters)"),
        ("data", "make_data.py", "data of the arithmetic example"),
    ):
        if not (EXAMPLE / folder).exists():
            say(f"creating the {what}: {EXAMPLE / folder}")
            _make(EXAMPLE / script)


def _make(script: Path) -> None:
    # Progress bars of its libraries would garble our own output; on a failure, its last lines are shown.
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-LAST_LINES:])
        raise FailedPrecondition(
            "the arithmetic example could not be created",
            where=str(script),
            why=f"the script exited with code {done.returncode}\n{last}\n",
            next_step=f"run it by hand: {sys.executable} {script}",
        )


def with_models_here(stack: StackConfig) -> StackConfig:
    """Return the stack with copies on this host in place of models in object storage, fetched where needed."""
    places = {str(model) for role in model_roles(stack) if is_url(model := model_of(stack, role))}
    if not places:
        return stack
    from flotilla_core.service.model import with_copies
    from flotilla_core.transfer import FileCache, Files

    async def nobody() -> str:
        raise Unavailable("a command asks no coordinator for files")

    say(f"using a copy of {', '.join(sorted(places))} on this host")
    cache = FileCache(StackPaths.of(stack.state_dir, stack.name).directory / "files", stack.file_cache_gib)
    files = Files(cache, rpc.connect, nobody, Activities())
    return wait(with_copies(stack, files))
