"""Implements `flotilla run`, which starts, plans, lists, shows, watches, changes, stops and resumes runs.

Invariants: where the stack of a run does not run, its ledger, run directories and files answer, and nothing of it is
written. Its state on disk is read only when nothing can be changing it: no coordinator was named, and no launcher of
the stack is alive. `track` leaves an active run to its coordinator, because two processes of one tracker would tell
lines twice, and sends nothing again that was taken.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.coordinator.v1.coordinator_pb2 import GetRunResponse
from flotilla.coordinator.v1.run_pb2 import Plan, Run
from flotilla_cli.completion import RunId, complete_live_setting, complete_run, complete_setting
from flotilla_cli.options import (
    USAGE,
    Coordinator,
    Json,
    Stack,
    make_folder_of,
    split_arguments,
    wait,
)
from flotilla_cli.output import (
    age,
    local_time,
    print_json,
    print_line,
    print_table,
    say,
    state_name,
)
from flotilla_cli.stack import (
    ask,
    ask_or_else,
    call,
    load_stack,
    load_stack_with_model,
    make_example,
    stack_file,
)
from flotilla_cli.watch import print_comparison, print_plan, remarks, run_json, stay_with
from flotilla_core import config, findings
from flotilla_core.config import load, load_text, read_values
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidConfig
from flotilla_core.json_text import json_lines

if TYPE_CHECKING:
    from flotilla_cli.stack import Answers
    from flotilla_client import Client

app = typer.Typer(help="Start, follow and stop runs.", no_args_is_help=True)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE... [key.path=value]...",
        help="Run files, merged left to right; overrides.",
        autocompletion=complete_setting,
    ),
]
LONGEST_REASON = 70
_WARNINGS = ("NOTICE_LEVEL_WARNING", "NOTICE_LEVEL_ERROR")
_MOST_WARNINGS = 5
_ENDED = ("succeeded", "stopped", "failed")
Latest = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", help='Id, unique prefix of an id, or "latest".', autocompletion=complete_run
    ),
]

Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE...",
        help="Settings of the run, by key.path.",
        autocompletion=complete_live_setting,
    ),
]


@app.command()
def start(
    arguments: Arguments,
    follow: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Start a run and print its id; with --wait, follow it until it ends."""
    files, overrides = _checked(arguments)

    async def begin(client: Client) -> tuple[Run, list[str]]:
        started = await client.start_run(files, overrides)
        return started, [] if follow else await remarks(client, started.run_id)

    run, said = call(begin, stack, coordinator)
    if follow:
        say(f"run {run.run_id} started; its files: {run.directory}")
        stay_with(run.run_id, stack, coordinator, as_json=as_json)
    elif as_json:
        print_json(run_json(run))
    else:
        print_line(run.run_id)
        say("\n".join([*said, f"files: {run.directory}", f"next: flotilla run watch {run.run_id}"]))


@app.command()
def plan(
    arguments: Arguments, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Print the arithmetic of a run, and why it would be refused; starts nothing."""
    files, overrides = _checked(arguments)
    found = ask_or_else(
        lambda client: client.plan_run(files, overrides),
        lambda _: plan_run(files, overrides, stack),
        stack,
        coordinator,
    )
    if not found.errors:
        _ask_judges(found, load(config.RunConfig, files, overrides, resolve_paths=True), stack)
    print_plan(found, as_json=as_json)
    if found.errors:
        raise typer.Exit(USAGE)


def _ask_judges(plan: Plan, run: config.RunConfig, stack: str | None) -> None:
    """Add to a plan how far the judges of the run agree with their labelled examples, asked from here."""
    if not run.judged_terms:
        return
    from flotilla_cli.reward import agreement_with
    from flotilla_coordinator.plan.chapter import Chapter, Entry, Line, refusal

    entries: list[Entry] = []
    for term in run.judged_terms:
        try:
            one = agreement_with(term, load_stack(stack))
        except FlotillaError as error:
            why = f"the judge of reward {term.shown} was not asked from here, the start of the run does so: {error}"
            entries.append(findings.warning(why))
            continue
        entries.append(Line(f"judge of {one.term}", f"{one.figure:.3f}", one.shown))
        if not one.enough:
            entries.append(refusal(f"the judge of reward {one.term} agrees by {one.figure:.3f}: {one.shown}"))
    Chapter.of(entries).write(plan)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Runs to list.")] = 20,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first; also while the stack is down."""
    runs = ask(lambda client: client.list_runs(limit), stack, coordinator)
    if as_json:
        print_json({"runs": [run_json(run) for run in runs]})
        return
    rows = [
        (
            run.run_id,
            state_name(run),
            f"{run.step}/{run.total_steps}",
            age(run.created_at),
            run.phase or textwrap.shorten(run.reason, LONGEST_REASON, placeholder="..."),
        )
        for run in runs
    ]
    print_table(("RUN", "STATE", "STEP", "AGE", "PHASE OR REASON"), rows)


@app.command()
def show(
    run: Latest = "latest", stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Show one run: state, metrics, files, resolved configuration; also while the stack is down."""
    answer = ask(lambda client: client.get_run_and_config(run), stack, coordinator)
    found = answer.run
    values = run_json(found)
    if as_json:
        print_json({**values, "config": read_values(answer.config_yaml, f"run {found.run_id}")})
        return
    from flotilla_core.telemetry.metrics import in_groups

    metrics, reason, _ = (values.pop(name) for name in ("metrics", "reason", "finding"))
    for moment in ("created_at", "ended_at"):
        values[moment] = local_time(getattr(found, moment)) if found.HasField(moment) else None
    for name, value in values.items():
        if value not in (None, ""):
            print_line(f"{name:15} {value}")
    if reason:
        print_line(f"{'reason':15} {textwrap.indent(reason, ' ' * 16).strip()}")
    for warning in last_warnings(Path(found.directory)):
        print_line(f"{'warning':15} {textwrap.indent(warning, ' ' * 16).strip()}")
    width = max(map(len, metrics), default=0)
    for group, names in in_groups(metrics):
        print_line(f"{group}")
        for name in names:
            print_line(f"  {name:{width}}  {metrics[name]:.6g}")


def last_warnings(run_dir: Path) -> list[str]:
    """Return the newest warnings of a run, each once, from its directory where this machine has it."""
    events = run_dir / "events.jsonl"
    if not events.is_file():
        return []
    with events.open("rb") as file:
        notices = [event["notice"] for _, event in json_lines(file) if "notice" in event]
    told = [one.get("text", "") for one in notices if one.get("level") in _WARNINGS]
    return list(dict.fromkeys(reversed(told)))[:_MOST_WARNINGS][::-1]


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run.", autocompletion=complete_run)],
    b: Annotated[str, typer.Argument(metavar="B", help="The run beside it.", autocompletion=complete_run)],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="A metric to draw, instead of the usual ones."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Draw the curves into a PNG as well."),
    ] = None,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Compare two runs: settings that differ, last and best metrics, curves; also while the stack is down."""
    from flotilla_coordinator.records.report import write_comparison
    from flotilla_coordinator.views.metrics import Comparison

    if output is not None:
        make_folder_of(output)

    async def both(client: Answers) -> list[GetRunResponse]:
        return [await client.get_run_and_config(run) for run in (a, b)]

    found = ask(both, stack, coordinator)
    runs = [one.run for one in found]
    left, right = (
        (Path(one.run.directory), read_values(one.config_yaml, f"run {one.run.run_id}")) for one in found
    )
    compared = Comparison.of(left, right, metric or ())
    plot = output if compared.drawn else None
    if plot is not None:
        write_comparison(compared.drawn, compared.curves, [run.run_id for run in runs], plot)
    if as_json:
        print_json(
            {
                "runs": [run_json(run) for run in runs],
                **compared.to_json(),
                "plot": None if plot is None else str(plot),
            }
        )
        return
    print_comparison(runs, compared)
    if output is not None:
        say("neither run has a metric to draw yet" if plot is None else f"curves: {plot}")


@app.command()
def watch(
    run: Latest = "latest", stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Follow a run until it ends. Ctrl-C stops watching, not the run. With --json, print the run at its end."""
    stay_with(run, stack, coordinator, as_json=as_json)


@app.command()
def stop(
    run: RunId,
    reason: Annotated[str, typer.Option(help="Why; recorded with the run.")] = "stopped by the user",
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Stop a run after its current step; a run that has ended stays as it is."""

    async def end(client: Client) -> tuple[Run, bool]:
        found = await client.get_run(run)
        ended = state_name(found) in _ENDED
        return found if ended else await client.stop_run(found.run_id, reason), ended

    found, had_ended = call(end, stack, coordinator)
    if as_json:
        print_json(run_json(found))
    elif had_ended:
        say(f"run {found.run_id} has ended already ({state_name(found)}); nothing to stop")
    else:
        say(f"run {found.run_id} is {state_name(found)}")


@app.command()
def resume(
    run: RunId,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            help='A checkpoint, "best", or "start" for step 0; later ones are discarded.',
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Continue a paused run, or one that failed or was stopped, from its newest good checkpoint."""
    found = call(lambda client: client.resume_run(run, checkpoint), stack, coordinator)
    if follow:
        stay_with(found.run_id, stack, coordinator, as_json=as_json)
    elif as_json:
        print_json(run_json(found))
    else:
        waits = f"is still paused: {found.reason}" if state_name(found) == "paused" else "continues"
        say(f"run {found.run_id} {waits}\nnext: flotilla run watch {found.run_id}")


@app.command()
def fork(
    run: RunId,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings to change, by key.path.", autocompletion=complete_setting
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option("--from", metavar="NAME", show_default="the newest", help='A checkpoint, or "best".'),
    ] = "",
    fresh_optimizer: Annotated[
        bool, typer.Option("--fresh-optimizer", help="Begin without the optimizer's moments.")
    ] = False,
    follow: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Start a run from a checkpoint of another one, with changed settings, and show what changed."""
    from flotilla_coordinator.views.metrics import settings_that_differ

    async def begin(client: Client) -> tuple[Run, list[tuple[str, Any, Any]], list[str]]:
        source = await client.get_run_and_config(run)
        started = await client.fork_run(
            source.run.run_id, overrides or (), checkpoint=checkpoint, fresh_optimizer=fresh_optimizer
        )
        found = await client.get_run_and_config(started.run_id)
        before, after = (read_values(one.config_yaml, "run") for one in (source, found))
        said = [] if follow else await remarks(client, started.run_id)
        return started, settings_that_differ(before, after), said

    started, changed, said = call(begin, stack, coordinator)
    shown = [f"{key}: {before} -> {after}" for key, before, after in changed] or ["no setting changed"]
    if follow:
        say("\n".join([f"run {started.run_id} started; its files: {started.directory}", *shown]))
        stay_with(started.run_id, stack, coordinator, as_json=as_json)
    elif as_json:
        settings = [{"key": key, "from": before, "to": after} for key, before, after in changed]
        print_json(run_json(started) | {"settings": settings})
    else:
        print_line(started.run_id)
        say("\n".join([*shown, *said, f"next: flotilla run watch {started.run_id}"]))


@app.command()
def export(run: RunId, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Write metrics and samples of a run as Parquet files, into its directory."""
    files = [str(file) for file in call(lambda client: client.export_run(run), stack, coordinator)]
    if as_json:
        print_json({"files": files})
    else:
        print_line("\n".join(files))


@app.command()
def track(
    run: Latest = "latest", stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Send the trackers of an ended run what they have not taken; also while the stack is down."""
    from asyncio import gather

    from flotilla_trackers.environment import tracker_errors
    from flotilla_trackers.follow import TrackerProcess

    answer = ask(lambda client: client.get_run_and_config(run), stack, coordinator)
    found = answer.run
    if not found.HasField("ended_at"):
        raise FailedPrecondition(
            f"run {found.run_id} has not ended",
            why="its coordinator gives its trackers what is there",
            next_step=f"wait for its end: flotilla run watch {found.run_id}",
        )
    of_run = load_text(config.RunConfig, answer.config_yaml, source=f"run {found.run_id}")
    if errors := tracker_errors(of_run):
        raise InvalidConfig("the trackers cannot be used", where=f"run {found.run_id}", why="; ".join(errors))
    processes = [
        TrackerProcess(found.run_id, Path(found.directory), of_run, section, section.type)
        for section in of_run.trackers
    ]

    async def send() -> None:
        for process in processes:
            process.end(state_name(found))
        await gather(*(process.run(lambda _, text: say(text)) for process in processes))

    wait(send())
    left = {process.name: process.behind() for process in processes}
    if as_json:
        print_json({"behind": left})
    else:
        rows = [(one.name, str(one.progress.points), str(left[one.name]), one.reason) for one in processes]
        print_table(("TRACKER", "TAKEN", "BEHIND", "WHY"), rows)
    if any(left.values()):
        raise typer.Exit(1)


@app.command()
def pause(run: RunId, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Pause a run after its current step, until `run resume`; it keeps its trainer and generators."""
    found = call(lambda client: client.pause_run(run), stack, coordinator)
    if as_json:
        print_json(run_json(found))
    else:
        say(f"run {found.run_id} pauses after its current step\nnext: flotilla run resume {found.run_id}")


@app.command("set")
def set_(
    run: RunId, changes: Changes, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Change settings of a run from its next step on: steps, learning rate, staleness, evaluation, checkpoints."""
    found = call(lambda client: client.set_run(run, changes), stack, coordinator)
    if as_json:
        print_json(run_json(found))
    else:
        say(f"run {found.run_id}: {', '.join(changes)} from step {found.step + 1} on")


def _checked(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Return files and overrides; errors in them are reported even without a coordinator."""
    files, overrides = split_arguments(arguments)
    load(config.RunConfig, files, overrides)
    return files, overrides


def plan_run(files: Sequence[Path], overrides: Sequence[str], stack: str | None) -> Plan:
    """Work out the plan here from the stack file, as the coordinator would."""
    from flotilla_coordinator.plan import plan_run as planned
    from flotilla_coordinator.plan.placement import placed

    make_example(stack_file(stack))
    fleet = load_stack_with_model(stack)
    say("no fleet is running: calculated from the stack file")
    return planned(load(config.RunConfig, files, overrides, resolve_paths=True), placed(fleet))
