"""Implements `flotilla checkpoint`, which needs only the run's folder, whether a fleet runs or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flotilla_cli.completion import RunId
from flotilla_cli.options import RUN_FAILED, Json, Stack
from flotilla_cli.output import print_json, print_line, print_table, say
from flotilla_cli.stack import stack_paths
from flotilla_coordinator.ledger import queries, schema
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.checkpoints import BEST, Progress, best_checkpoint, named_best
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.config import read_values
from flotilla_core.errors import AlreadyExists, Damaged, NotFound
from flotilla_core.version import Version

app = typer.Typer(help="List, check, export and remove checkpoints of a run.", no_args_is_help=True)

Name = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="NAME", help="One checkpoint, such as step-000120, or best."),
]


@app.command("list")
def list_(run: RunId, stack: Stack = None, as_json: Json = False) -> None:
    """List the checkpoints of a run, the oldest first."""
    saved = saved_of(stack, run)
    best = best_checkpoint(saved.directory, saved.best_by)
    values = saved.directory.evaluated(saved.best_by or "eval/accuracy")
    found = [_described(saved.shelf, name) for name in saved.shelf.names()]
    for one in found:
        one |= {"value": values.get(one["steps_done"]), "best": one["name"] == best}
    if as_json:
        print_json({"run_id": saved.run_id, "best_by": saved.best_by or None, "checkpoints": found})
        return
    shown = ("accuracy", "value") if saved.best_by else ("accuracy",)
    rows = [
        (
            one["name"],
            str(one["steps_done"]),
            one["policy_version"],
            f"{one['bytes']:,}",
            *("" if one[name] is None else f"{one[name]:.3f}" for name in shown),
            *(["best" if one["best"] else ""] if saved.best_by else []),
        )
        for one in found
    ]
    own = (saved.best_by.upper(), "") if saved.best_by else ()
    print_table(("CHECKPOINT", "STEPS", "VERSION", "BYTES", "ACCURACY", *own), rows)


@app.command()
def verify(run: RunId, checkpoint: Name = None, stack: Stack = None, as_json: Json = False) -> None:
    """Compare every byte with what was written; exit code 1 if a checkpoint is damaged."""
    saved = saved_of(stack, run)
    findings: list[dict[str, str]] = []
    for name in chosen(saved, checkpoint):
        try:
            Manifest.verified(saved.shelf.folder(name))
            problem = ""
        except Damaged as error:
            problem = f"{error.where}: {error.why}"
        findings.append({"name": name, "problem": problem})
        if not as_json:
            print_line(f"{name}  {problem or 'good'}")
    if as_json:
        print_json({"run_id": saved.run_id, "checkpoints": findings})
    if any(finding["problem"] for finding in findings):
        raise typer.Exit(RUN_FAILED)


@app.command()
def export(
    run: RunId,
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    checkpoint: Name = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Copy the model of a checkpoint, the newest by default, to a folder that transformers and vLLM load.

    If adapters were trained, they are copied instead, in the layout of peft.
    """
    saved = saved_of(stack, run)
    run_id, shelf = saved.run_id, saved.shelf
    name = chosen(saved, checkpoint)[-1]
    if path.exists():
        raise AlreadyExists("the folder exists already", where=str(path), next_step="name another one")
    Manifest.verified(shelf.folder(name))
    model, adapters = (shelf.folder(name) / content for content in ("model", "adapter"))
    contents = model if model.is_dir() else adapters
    aside = path.absolute().with_name(f".{path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(contents, aside)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if as_json:
        print_json({"run_id": run_id, "checkpoint": name, "folder": str(path.absolute())})
    else:
        say(f"wrote the {contents.name} of {name} to {path}")


@app.command()
def prune(
    run: RunId,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest to keep.")],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Remove all but the newest checkpoints, and the best one where the run keeps it."""
    saved = saved_of(stack, run)
    shelf, best = saved.shelf, best_checkpoint(saved.directory, saved.best_by)
    gone = shelf.prune(keep, [shelf.step_of(best)] if best else [])
    if as_json:
        print_json({"run_id": saved.run_id, "removed": gone, "kept": shelf.names()})
    else:
        say(f"removed {', '.join(gone) or 'none'}; kept {', '.join(shelf.names()) or 'none'}")


class Saved(NamedTuple):
    """The checkpoints of one run, and the metric by which it keeps the best one."""

    run_id: str
    directory: RunDirectory
    shelf: CheckpointShelf
    best_by: str
    version: Version
    config_yaml: str


def saved_of(stack: str | None, run: str) -> Saved:
    """Find the run in the ledger's file."""
    ledger = stack_paths(stack).directory / "ledger.sqlite"
    if not ledger.exists():
        raise NotFound("the stack has no runs on disk", where=str(ledger.parent), next_step="see --stack")
    db = schema.connect_read_only(ledger)
    try:
        record = queries.run(db, run)
    finally:
        db.close()
    directory = RunDirectory(Path(record.directory))
    checkpoint = read_values(record.config_yaml, f"run {record.run_id}").get("checkpoint", {})
    best_by = checkpoint.get("best_by", "")
    shelf = CheckpointShelf(directory.checkpoints_path)
    return Saved(record.run_id, directory, shelf, best_by, record.version, record.config_yaml)


def chosen(saved: Saved, name: str | None) -> list[str]:
    """Return all checkpoints, or the one that was named."""
    shelf = saved.shelf
    if name == BEST:
        return [named_best(saved.directory, saved.best_by)]
    if name is not None:
        return [shelf.folder(name).name]
    if not shelf.names():
        raise NotFound(
            "the run has no checkpoint",
            where=str(shelf.path),
            why="none was due yet, or checkpoint.every_steps is 0",
        )
    return shelf.names()


def _described(shelf: CheckpointShelf, name: str) -> dict[str, Any]:
    """Describe a checkpoint by its own files; only `verify` finds damage."""
    folder = shelf.folder(name)
    progress = Progress.of(folder)
    return {
        "name": name,
        "steps_done": progress.steps_done,
        "policy_version": str(progress.version),
        "bytes": Manifest.read(folder).nbytes,
        "accuracy": progress.last_accuracy,
        "path": str(folder),
    }
