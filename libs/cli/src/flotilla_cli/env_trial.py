"""Plays an episode without a fleet, by the environment service's own code in a process that ends with the command.

Invariant: no code of a user runs in this process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from google.protobuf.json_format import MessageToJson, Parse

from flotilla.common.v1.chat_pb2 import Message
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_cli.output import say
from flotilla_core.errors import FailedPrecondition, Internal, error_of
from flotilla_core.log_files import line_text

Reply = Callable[[pb.TurnAsked], pb.RunEpisodeRequest]
TRIAL = "flotilla_environment.trial"
_MOST_PRINTED = 1 << 20
"""The bytes that are shown of what an environment prints."""


def is_installed() -> bool:
    return importlib.util.find_spec(TRIAL.partition(".")[0]) is not None


def played(start: pb.EpisodeStart, isolation: str, reply: Reply) -> pb.EpisodeEnded:
    """Return the end of an episode that a process plays; `reply` gives each turn that is asked for."""
    if not is_installed():
        raise FailedPrecondition(
            "the environment service is not installed here", next_step="pip install flotilla-environment"
        )
    with tempfile.TemporaryFile() as printed:
        trial = subprocess.Popen(
            [sys.executable, "-m", TRIAL, isolation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
        with trial:
            assert trial.stdin is not None and trial.stdout is not None
            _tell(trial.stdin, pb.RunEpisodeRequest(start=start))
            ended = _turns(trial.stdin, trial.stdout, reply)
        _say_printed(printed)
    if isinstance(ended, Finding):
        raise error_of(ended)
    if ended is None:
        raise Internal("the trial ended early", why=f"its process ended with code {trial.returncode}")
    return ended


def line_of(message: Message) -> str:
    """Return a message as a line for people."""
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return f"{message.role}: {' '.join([message.content, *calls]).strip()}"


def _turns(asks: IO[str], hears: IO[str], reply: Reply) -> pb.EpisodeEnded | Finding | None:
    for line in hears:
        if "what" in json.loads(line):
            return Parse(line, Finding())
        response = Parse(line, pb.RunEpisodeResponse())
        if response.HasField("ended"):
            return response.ended
        if response.HasField("asked"):
            _tell(asks, reply(response.asked))
    return None


def _tell(asks: IO[str], request: pb.RunEpisodeRequest) -> None:
    asks.write(MessageToJson(request, indent=None) + "\n")
    asks.flush()


def _say_printed(printed: IO[bytes]) -> None:
    """Print what the code of a user printed: up to a limit, as text that no terminal obeys."""
    printed.seek(0, os.SEEK_END)
    more = printed.tell() - _MOST_PRINTED
    printed.seek(0)
    for line in printed.read(_MOST_PRINTED).splitlines():
        say(line_text(line))
    if more > 0:
        say(f"... and {more:,} bytes more, which are not shown")
