"""Checks that the functions and the environment of a run exist, and take the parameters that the run gives them.

Invariants: no code of a user runs in this process: files are parsed here, and imported by a short-lived process of the
service that will run them, in the jail where that has one. Where that process does not answer in time, the plan warns
and never refuses, so that a busy machine refuses no run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flotilla_coordinator.plan.chapter import Entries, refusal
from flotilla_coordinator.rollouts.judges import examples_of
from flotilla_core.config import (
    FleetJudgeConfig,
    IsolationConfig,
    PolicyConfig,
    RewardTermConfig,
    RunConfig,
    StackConfig,
)
from flotilla_core.config.model import UserFunction
from flotilla_core.config.run import AGENT
from flotilla_core.errors import InvalidConfig
from flotilla_core.findings import warning
from flotilla_workers import check
from flotilla_workers.jail.jail import NO_JAIL, Cell, Jail, find, shown_for

LONGEST_CHECK_S = 12.0
"""The time for all functions of one service together; most of it is the start of Python."""
REWARD_CHECK = "flotilla_reward.catalog:problem"
ENVIRONMENT_CHECK = "flotilla_environment.catalog:problem"
TRAINER_CHECK = "flotilla_trainer.wire.user_functions:problem"
HEAVY = ("torch", "transformers", "vllm")
"""Imports that take too long for a plan: such files are only parsed, and their other imports are looked up."""


@dataclass(frozen=True)
class Function:
    """A reward, an advantage, a loss, or the class of an environment, as a configuration names it."""

    key: str
    name: str
    parameters: dict[str, Any]
    is_reward: bool
    trusted: bool = False
    is_environment: bool = False

    @property
    def file(self) -> Path | None:
        """Return the file of a function that the user wrote, and None for any other."""
        file, colon, _ = self.name.rpartition(":")
        return Path(file) if colon and file.endswith(".py") else None


def terms_of(config: RunConfig) -> Iterator[tuple[str, RewardTermConfig]]:
    """Yield the terms of all rewards, those of held-out sets too, by their keys."""
    yield from ((f"rewards[{index}]", term) for index, term in enumerate(config.rewards))
    held_out = () if config.evaluation is None else config.evaluation.sets_of_data
    for place, one in enumerate(held_out):
        yield from (
            (f"evaluation.data[{place}].rewards[{index}]", term) for index, term in enumerate(one.rewards)
        )


def functions_of(config: RunConfig) -> list[Function]:
    """Return the functions that the run names; built-in ones only where their service checks more than the schema."""
    found = [
        Function(f"{key}.reward", str(term.reward), term.parameters, True, term.trusted)
        for key, term in terms_of(config)
        if term.kind == "function"
    ]
    if isinstance(config.algorithm, PolicyConfig):
        for section in ("advantage", "loss"):
            chosen = getattr(config.algorithm, section)
            if isinstance(chosen, UserFunction):
                found.append(Function(f"algorithm.{section}.type", chosen.type, chosen.parameters, False))
    if (own := config.environment) is not None:
        found.append(
            Function("environment.name", own.name, own.parameters, False, own.trusted, is_environment=True)
        )
    return found


def file_errors(config: RunConfig) -> Entries:
    """Find the errors that the user's files show without being run."""
    functions = [*functions_of(config), *_function_of_agent(config)]
    return (refusal(error) for function in functions if (error := _file_error(function)))


def _function_of_agent(config: RunConfig) -> Iterator[Function]:
    """Yield the function of an agent, which is called with its task.

    No plan loads it: what its file imports may look for the gateway, and for files beside it.
    """
    own = config.environment
    if own is None or own.name != AGENT:
        return
    folder, name = (own.parameters.get(key) for key in ("folder", "function"))
    if isinstance(folder, str) and isinstance(name, str):
        function = Function("environment.parameters.function", os.path.join(folder, name), {}, False)
        # Its service says what is wrong with a name of another form, and where there is no such file.
        if function.file is not None and os.path.isfile(function.file):
            yield function


def trusted_warnings(config: RunConfig) -> Entries:
    """Warn of each function that runs outside of the jail."""
    for function in functions_of(config):
        if function.trusted:
            service = "environment" if function.is_environment else "reward"
            yield warning(
                f"{function.key}: {function.name} is trusted, so it runs OUTSIDE OF THE JAIL, as the {service} service "
                "itself: with its files, its network and its variables"
            )


def judge_errors(config: RunConfig, stack: StackConfig) -> Entries:
    """Find judges that the stack does not have, and examples that cannot measure one.

    Replicas that others started have stacks of their own.
    """
    for key, term in terms_of(config):
        if term.judge and term.judge not in stack.judges and not stack.reward.attach:
            known = ", ".join(stack.judges) or "none"
            yield refusal(
                f"{key}.reward: the stack has no judge {term.judge} (judges: {known}): write it into its stack.yaml"
            )
        judge = stack.judges.get(term.judge)
        if isinstance(judge, FleetJudgeConfig) and not judge.replicas:
            yield refusal(
                f"{key}.reward: judges.{term.judge}.replicas is 0, so nothing holds this judge: set it to 1"
            )
    for term in config.judged_terms:
        try:
            examples_of(term)
        except InvalidConfig as error:
            yield refusal(f"the judge of reward {term.shown} cannot be measured: {error}")


def loading_problems(
    config: RunConfig, isolation: IsolationConfig, of_environments: IsolationConfig | None = None
) -> Entries:
    """Load each function as its service does, where its file has no errors, and return what is wrong."""
    whole = [function for function in functions_of(config) if not _file_error(function)]
    rewards = [function for function in whole if function.is_reward]
    environments = [function for function in whole if function.is_environment]
    of_trainer = [function for function in whole if not function.is_reward and not function.is_environment]
    heavy = [function for function in of_trainer if _imports_heavy(function)]
    others = [function for function in of_trainer if function not in heavy]
    for function in heavy:
        yield from _missing_imports(function)
    jailed = [function for function in rewards if function.file and not function.trusted]
    free = [function for function in rewards if function not in jailed]
    for module, name, functions in (
        (REWARD_CHECK, "reward", jailed),
        (REWARD_CHECK, "reward", free),
        (ENVIRONMENT_CHECK, "environment", environments),
        (TRAINER_CHECK, "name", others),
    ):
        if not functions or importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        asked = json.dumps(
            [{name: function.name, "parameters": function.parameters} for function in functions]
        )
        jail, files = NO_JAIL, [function.file for function in functions if function.file]
        if functions is jailed:
            jail = jail_of(isolation)
        elif functions is environments and not functions[0].trusted and functions[0].file:
            jail = jail_of(of_environments or isolation)
        stamps = tuple(_stamp(function) for function in functions)
        answer = jail.refusal or _ask(module, asked, stamps, jail, tuple({*map(shown_for, files)}))
        if isinstance(answer, str):
            keys = ", ".join(function.key for function in functions)
            yield warning(f"{keys}: not loaded before the run: {answer}")
            continue
        for function, problem in zip(functions, answer, strict=True):
            if problem:
                yield refusal(f"{function.key}: {problem}")


jail_of = lru_cache(maxsize=4)(find)
"""Returns the jail that this host has for a stack."""


@lru_cache(maxsize=100)
def _ask(
    module: str, asked: str, stamps: tuple[tuple[int, int], ...], jail: Jail, shown: tuple[Path, ...]
) -> tuple[str, ...] | str:
    """Return the problem of each function, or one text that says why there is no answer.

    `stamps` are those of the files as they are now: a file that changed is asked about again.
    """
    return check.problems(module, asked, LONGEST_CHECK_S, Cell(jail, shown, os.getpid()))


def _stamp(function: Function) -> tuple[int, int]:
    if function.file is None:
        return 0, 0
    state = function.file.stat()
    return state.st_mtime_ns, state.st_size


def _file_error(function: Function) -> str:
    """Check that the user's file defines the function with these parameters; its service checks any other."""
    path, name = function.file, function.name.rpartition(":")[2]
    if path is None:
        return ""
    if not os.path.isfile(path):
        return f"{function.key}: the file {path} does not exist"
    try:
        tree = ast.parse(path.read_text("utf-8"), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{function.key}: {path} is not Python: {error}"
    except OSError as error:
        return f"{function.key}: {path} cannot be read: {error.strerror}"
    names = {bound for node in tree.body for bound in _names_bound_by(node)}
    if name not in names and "*" not in names:
        return f"{function.key}: {path} defines no function {name} (it defines {', '.join(sorted(names)) or 'none'})"
    return _signature_error(function, tree, name)


def _signature_error(function: Function, tree: ast.Module, name: str) -> str:
    """Find parameters that the definition does not take; a decorated function is only checked when it is loaded.

    The other arguments of a reward are those of one of several forms, which its service knows.
    """
    written = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(written) != 1 or written[0].decorator_list:
        return ""
    signature = _signature(written[0].args)
    first: tuple[object, ...] = () if function.is_reward else (object(),)
    try:
        bind = signature.bind_partial if function.is_reward else signature.bind
        bind(*first, **function.parameters)
    except TypeError as error:
        given = ", ".join([*("one argument" for _ in first), *(f"{key}=" for key in function.parameters)])
        return f"{function.key}: {name}{signature} cannot be called with ({given}): {error}"
    return ""


def _signature(arguments: ast.arguments) -> inspect.Signature:
    Parameter = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = len(plain) - len(arguments.defaults)
    parameters = [
        Parameter(
            argument.arg,
            Parameter.POSITIONAL_ONLY
            if argument in arguments.posonlyargs
            else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if index < optional else None,
        )
        for index, argument in enumerate(plain)
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _imports_heavy(function: Function) -> bool:
    return not _imported(function).isdisjoint(HEAVY)


def _missing_imports(function: Function) -> Entries:
    for module in sorted(_imported(function).difference(HEAVY)):
        if not _is_there(module):
            yield refusal(f"{function.key}: {function.file} imports {module}, which is not installed")


def _imported(function: Function) -> set[str]:
    """Return the top-level names of the modules that the file imports when it is imported itself."""
    assert function.file is not None, "only functions of the user's are asked for"
    found: set[str] = set()
    for node in ast.parse(function.file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return True


def _names_bound_by(node: ast.stmt) -> Sequence[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
