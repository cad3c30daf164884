"""Implements `flotilla env`, which lists the environments that a run may name, and plays one without a fleet.

Invariant: no code of a user runs in this process. An episode is played by the environment service's own code, in a
process of its own that ends with the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from google.protobuf.json_format import MessageToDict, Parse, ParseDict

from flotilla.common.v1.chat_pb2 import Message, ToolCall
from flotilla.common.v1.registration_pb2 import SERVICE_KIND_ENVIRONMENT
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from flotilla_cli.env_replay import replay
from flotilla_cli.env_trial import TRIAL, is_installed, line_of, played
from flotilla_cli.options import RUN_FAILED, Coordinator, Json, Stack, wait
from flotilla_cli.output import asked_line, print_json, print_line, print_table, say
from flotilla_cli.services import find_services
from flotilla_cli.stack import load_stack, stack_paths
from flotilla_core import rpc
from flotilla_core.config.model import function_path
from flotilla_core.config.run import spelled_out
from flotilla_core.errors import Internal, InvalidRequest, Unavailable
from flotilla_core.findings import found_of, text_of
from flotilla_data.rows import open_rows, parts
from flotilla_launch.state import is_up

app = typer.Typer(help="Environments that a run may name.", no_args_is_help=True)
app.command()(replay)

_LIST_S = 10.0


@app.command("list")
def list_(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the environments that the environment services know by name, with their parameters.

    A class in a file needs no entry here: name it in the run as path.py:Class.
    """
    try:
        found = wait(_ask(stack, coordinator))
    except Unavailable:
        if coordinator is not None or is_up(stack_paths(stack)) or not is_installed():
            raise
        say("no fleet is running: these are the environments that are installed here")
        found = [_described(info) for info in _installed()]
    if as_json:
        print_json({"environments": found})
        return
    rows = [
        (
            one["name"],
            ", ".join(_parameter(*each) for each in one["parameters"].items()),
            one["description"].split("\n")[0],
        )
        for one in found
    ]
    print_table(("ENVIRONMENT", "PARAMETERS", "WHAT IT IS"), rows)


async def _ask(stack: str | None, coordinator: str | None) -> list[dict[str, Any]]:
    """Return each environment once, with the names of the services that serve it."""
    found: dict[str, dict[str, Any]] = {}
    services = (await find_services(stack, coordinator)).values()
    serving = [one for one in services if one.kind == SERVICE_KIND_ENVIRONMENT]
    if not serving:
        raise Unavailable(
            "no environment service is running", next_step="start one: flotilla scale environment 1"
        )
    for service in serving:
        async with service.channel() as channel:
            call = EnvironmentServiceStub(channel).ListEnvironments
            answer = await rpc.unary(call, pb.ListEnvironmentsRequest(), timeout_s=_LIST_S)
        for info in answer.environments:
            found.setdefault(info.name, _described(info))["services"].append(service.name)
    return list(found.values())


def _described(info: pb.EnvironmentInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "description": info.description,
        "parameters": MessageToDict(info.parameters),
        "services": [],
    }


def _installed() -> list[pb.EnvironmentInfo]:
    """Return the environments that an environment service of this host would have."""
    listed = subprocess.run(
        [sys.executable, "-m", TRIAL, "list"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise Internal("the environments cannot be listed", why=listed.stderr[-2000:])
    return list(Parse(listed.stdout, pb.ListEnvironmentsResponse()).environments)


def _parameter(name: str, default: Any) -> str:
    """Show a parameter: `corpus` where it must be given, `hits=3` where it has a default."""
    if isinstance(default, float):  # every number of a Struct is one
        return f"{name}={default:g}"
    return name if default is None else f"{name}={json.dumps(default)}"


@app.command()
def test(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ENVIRONMENT [KEY=VALUE]...",
            help="An environment by name, path.py:Class or one such as gymnasium:FrozenLake-v1, and its parameters.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE", help="Data file with prompt or messages, and answer, of a line."
        ),
    ] = None,
    row: Annotated[int, typer.Option("--row", min=1, help="Line of the data to play.")] = 1,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="Prompt, without a data file.")
    ] = "",
    answer: Annotated[str, typer.Option("--answer", metavar="TEXT", help="What is right.")] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of what the environment draws.")] = 0,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", metavar="FILE", help="File with one answer of the policy a line."),
    ] = None,
    trusted: Annotated[bool, typer.Option("--trusted", help="Play outside of the jail.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Play one episode by hand, or by the answers of a file; needs no fleet and no GPU.

    An answer is a text, or calls of tools as JSON: {"name": "calculate", "arguments": {"expression": "1 + 1"}}, or a
    list of such. Without a further answer the episode is ended, and its rewards are shown. Exit code 1 when the
    environment failed.
    """
    start = _start(arguments, trusted)
    start.episode_id, start.attempt, start.seed = "test", 1, seed
    values = _row(data, row) if data is not None else {"prompt": prompt, "answer": answer}
    _fill(start, values)
    lines = _by_hand() if answers is None else iter(answers.read_text("utf-8").splitlines())
    conversation = _Conversation(lines, quiet=as_json)
    ended = played(start, load_stack(stack).environment.isolation.model_dump_json(), conversation.reply)
    if as_json:
        print_json({"messages": conversation.said, **MessageToDict(ended, preserving_proto_field_name=True)})
    else:
        _print_end(ended)
    if ended.HasField("failure"):
        raise typer.Exit(RUN_FAILED)


def _start(arguments: list[str], trusted: bool) -> pb.EpisodeStart:
    short, *parameters = arguments
    name, own = spelled_out(short)
    start = pb.EpisodeStart()
    start.environment.environment = function_path(name, Path.cwd())
    start.environment.trusted = trusted
    start.environment.parameters.update(own)
    for text in parameters:
        key, sign, value = text.partition("=")
        if not sign:
            raise InvalidRequest(f"{text!r} is no parameter", next_step="write it as key=value")
        start.environment.parameters.update({key: yaml.safe_load(value)})
    return start


def _row(data: Path, number: int) -> dict[str, Any]:
    rows = open_rows(data, "train", None)
    if number > len(rows):
        raise InvalidRequest(
            f"{data} has {len(rows)} lines", next_step=f"name one of them: --row {len(rows)}"
        )
    (part,) = parts(rows, range(number - 1, number))
    (row,) = rows.read(part)
    if row.error is not None:
        raise row.error
    return dict(row.values)


def _fill(start: pb.EpisodeStart, values: dict[str, Any]) -> None:
    """Bring a line of the data into the start of an episode, by the names of columns that runs expect."""
    prompt, answer = values.pop("messages", None) or values.pop("prompt", ""), values.pop("answer", "")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages if prompt else ():
        start.messages.append(Message(role=message["role"], content=message["content"]))
    start.answer = answer if isinstance(answer, str) else json.dumps(answer)
    ParseDict(values, start.info)


def _by_hand() -> Iterator[str]:
    while line := asked_line():
        yield line.rstrip("\n")
    say("")


class _Conversation:
    """Answers an environment by the lines of a user, and shows what both say."""

    def __init__(self, answers: Iterator[str], *, quiet: bool) -> None:
        self.said: list[dict[str, Any]] = []
        self._answers = answers
        self._quiet = quiet
        self._shown_tools = quiet

    def reply(self, asked: pb.TurnAsked) -> pb.RunEpisodeRequest:
        """Return the next answer, or the end of the episode where there is none."""
        if asked.tools and not self._shown_tools:
            print_line(f"tools: {', '.join(json.loads(tool.function)['name'] for tool in asked.tools)}")
            self._shown_tools = True
        for message in asked.messages:
            self._show(message)
        text = next(self._answers, None)
        if text is None:
            return pb.RunEpisodeRequest(stop=pb.EpisodeStop(ending=pb.ENDING_MAX_TURNS))
        message = _answer(text)
        self._show(message)
        return pb.RunEpisodeRequest(written=pb.TurnWritten(message=message, finish=pb.TURN_FINISH_STOP))

    def _show(self, message: Message) -> None:
        self.said.append(MessageToDict(message, preserving_proto_field_name=True))
        if not self._quiet:
            print_line(line_of(message))


def _answer(text: str) -> Message:
    """Return what the policy writes: calls of tools, where it is JSON of such, else a text."""
    message = Message(role="assistant", content=text)
    try:
        given = json.loads(text)
        calls = given if isinstance(given, list) else [given]
        message.tool_calls.extend(
            ToolCall(id=f"call_{number}", name=call["name"], arguments=json.dumps(call.get("arguments", {})))
            for number, call in enumerate(calls)
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        del message.tool_calls[:]
        return message
    message.content = ""
    return message


def _print_end(ended: pb.EpisodeEnded) -> None:
    print_line(f"\n{pb.Ending.Name(ended.ending).removeprefix('ENDING_').lower()}")
    if ended.HasField("failure"):
        is_late = ended.ending == pb.ENDING_TIMEOUT  # Another next step would be to play it by hand, as now.
        print_line(text_of(ended.failure) if is_late else found_of(ended.failure))
    for what, numbers in (("reward", ended.rewards), ("metric", ended.metrics)):
        for name, value in sorted(numbers.items()):
            print_line(f"{what} {name}: {value:.4g}")
    if ended.turn_rewards:
        print_line(f"rewards of turns: {', '.join(f'{one:.4g}' for one in ended.turn_rewards)}")
