"""Whether advantages and losses of the user's can be called, found out in a process of its own.

Run as `python -m flotilla_trainer.objective.function_check` with a JSON list of `{name, parameters}` on standard input.
Prints a JSON list that says of each what is wrong, with nothing for those that can be called.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from flotilla_core.errors import FlotillaError
from flotilla_trainer.objective.user_functions import load_user_function


def problem(name: str, parameters: dict[str, Any]) -> str:
    """Why a function cannot be called with these parameters; empty where it can."""
    try:
        function = load_user_function(name)
    except FlotillaError as error:
        return str(error)
    if not callable(function):
        return f"{name} is not a function but {type(function).__name__}"
    signature = inspect.signature(function)
    try:
        signature.bind(object(), **parameters)
    except TypeError as error:
        return f"{name}{signature} cannot be called with one argument and {sorted(parameters)}: {error}"
    return ""


def main() -> None:
    # What user code prints must not come between.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = [problem(function["name"], function["parameters"]) for function in json.load(sys.stdin)]
    results.write(json.dumps(found))
    results.close()
    # Threads that user code started keep no process.
    os._exit(0)


if __name__ == "__main__":
    main()
