"""What pages name exists: configuration keys and their values, commands, metrics, targets of make.

Blocks of YAML load as the configuration that they belong to, and blocks of commands parse. Pages for users of other
programs name in their second column nothing but what exists here.
"""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flotilla_cli.main import load_commands
from flotilla_core.config import ConfigModel, PolicyConfig, RunConfig, StackConfig, load_text
from flotilla_core.config.other_programs import OURS
from flotilla_core.errors import InvalidConfig
from flotilla_core.telemetry.metrics import METRICS
from flotilla_testing.doc_pages import FENCED

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "docs" / "reference"
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != GENERATED]
PAGES += [
    ROOT / "README.md",
    *sorted(ROOT.glob("services/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("recipes/**/README.md")),
]
COMING_FROM = sorted((ROOT / "docs").glob("coming-from-*.md"))

CODE = re.compile(r"`([^`\n]+)`")
CELLS = re.compile(r"(?<!\\)\|")
FIRST_CELL = re.compile(r"^\|[^|]*(?=\|)", re.MULTILINE)
METRIC = re.compile(r"[a-z_]+(/[a-z0-9_@]+)+")
KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
SETTING = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*): (.+)")
NO_KEY = re.compile(r"telemetry\.start|.*\.(py|proto|yaml|md|jsonl?|log|txt|sqlite3?|toml|zst|sh|lock)")
"""A function and files, whose names look like keys."""
RECIPES = ROOT / "docs" / "contributing.md"
"""Its recipes add keys and commands that do not exist yet."""
FILES = {"run.yaml", "stack.yaml", "metrics.jsonl"}
COMMANDS: Any = load_commands()
COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?(flotilla(?: .*)?)")
REST_OF_A_RUN: dict[str, Any] = {"name": "page", "steps": 100, "data": {"train": "train.jsonl"}}
WITH_REWARDS: dict[str, Any] = {
    "rewards": [{"reward": "exact"}],
    "evaluation": {"data": "heldout.jsonl", "every_steps": 10},
}
"""What a part of a run file needs beside it to be one."""
WITHOUT_REWARDS = {"sft", "dpo", "reward_model", "distillation"}


def models_in(annotation: object) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def fields(model: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its path; names that a user gives are `*`."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        named = typing.get_origin(field.annotation) is dict
        for below in models_in(field.annotation):
            yield from fields(below, f"{prefix}{name}.{'*.' if named else ''}")


KEYS: dict[str, list[FieldInfo]] = {}
for one in (RunConfig, StackConfig):
    for path, field_of_path in fields(one):
        KEYS.setdefault(path, []).append(field_of_path)
MEASURED = [re.compile(re.sub(r"<[^>]*>", "[^/]+", metric.name)) for metric in METRICS]
FAMILIES = {metric.name.partition("/")[0] for metric in METRICS}
SECTIONS = {path.partition(".")[0] for path in KEYS}


def fields_of(key: str) -> list[FieldInfo]:
    """The fields that a key means, written from the top of its file or from a section on."""
    first, _, rest = key.partition(".")
    key = f"{first}.*.{rest.partition('.')[2]}" if first == "teachers" and "." in rest else key
    return KEYS.get(key) or [field for path in KEYS if path.endswith(f".{key}") for field in KEYS[path]]


def takes(field: FieldInfo, value: object) -> bool:
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def is_setting(text: str) -> bool:
    """Whether this is `key: value` with a key that takes the value."""
    match = SETTING.fullmatch(text)
    if match is None:
        return False
    values = (yaml.safe_load(match[2]), match[2])  # a plain `on` is a truth value to YAML alone
    return any(takes(field, value) for field in fields_of(match[1]) for value in values)


def wrong_command(line: str) -> str:
    """Return what is wrong with a command line, or nothing; brackets of a synopsis are taken away."""
    words = [word.strip("[]") for word in shlex.split(line.replace(r"\|", "|"), comments=True)][1:]
    command = COMMANDS
    while getattr(command, "commands", None) and words and words[0][0].islower():
        name = words.pop(0)
        if name not in command.commands:
            return f"{line}: there is no command {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    named = [word.partition("=")[0] for word in words if re.fullmatch(r"-{1,2}[a-z].*", word)]
    return "".join(f"{line}: there is no option {option}" for option in named if option not in known)


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text("utf-8")
    suites = {
        f"test-{folder.name}" for folder in (ROOT / "tests").iterdir() if list(folder.glob("test_*.py"))
    }
    return {
        name for line in re.findall(r"^([a-z][a-z0-9 -]+):", text, re.MULTILINE) for name in line.split()
    } | suites


TARGETS = targets()


def wrong_make(line: str) -> str:
    found = re.match(r"make ([a-z][a-z0-9-]*)", line)
    return f"{line}: there is no such target" if found and found[1] not in TARGETS else ""


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in FENCED.findall(page.read_text("utf-8")) if language in languages]


def spans(page: Path) -> list[str]:
    """Code within lines; the first column of a page about another program has names of that program."""
    text = FENCED.sub("", page.read_text("utf-8"))
    return CODE.findall(FIRST_CELL.sub("", text) if page in COMING_FROM else text)


def rows(page: Path) -> Iterator[list[str]]:
    """Rows of the tables of a page, without their heads."""
    head = ""
    for line in page.read_text("utf-8").splitlines():
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        elif not re.fullmatch(r"[|\s:-]+", line):
            yield [cell.strip() for cell in CELLS.split(line)[1:-1]]


def named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if page != RECIPES]))
def test_every_key_that_a_page_names_exists_and_takes_the_value_beside_it(page: Path) -> None:
    wrong = []
    for text in spans(page):
        key = text.partition(": ")[0]
        if not KEY.fullmatch(key) or key.partition(".")[0] not in SECTIONS or NO_KEY.fullmatch(key):
            continue
        if not fields_of(key) or (SETTING.fullmatch(text) and not is_setting(text)):
            wrong.append(text)
    assert wrong == []


@pytest.mark.parametrize("page", named(PAGES))
def test_every_metric_that_a_page_names_is_measured(page: Path) -> None:
    names = {text for text in spans(page) if METRIC.fullmatch(text) and text.partition("/")[0] in FAMILIES}
    assert {name for name in names if not any(metric.fullmatch(name) for metric in MEASURED)} == set()


@pytest.mark.parametrize("page", named([page for page in PAGES if page != RECIPES]))
def test_every_command_of_a_page_parses(page: Path) -> None:
    lines = [line.strip() for text in blocks(page, "", "sh", "bash", "console") for line in text.splitlines()]
    lines += spans(page)
    found = [wrong_command(match[1]) for line in lines if (match := COMMAND.fullmatch(line))]
    found += [wrong_make(line) for line in lines]
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.parametrize("page", named(PAGES))
def test_every_block_of_yaml_is_a_configuration_or_a_part_of_one(page: Path) -> None:
    refused = [error for text in blocks(page, "yaml") if (error := refusal(text, page.name))]
    assert refused == []


def refusal(text: str, source: str) -> str:
    """Return why a block of YAML is neither a stack, a run nor a part of one; empty if it is."""
    content = yaml.safe_load(text)
    top = set(content)
    of_a_run = RunConfig.model_fields.keys() | PolicyConfig.model_fields.keys()
    model: type[ConfigModel] = RunConfig
    if text.startswith("# stack.yaml") or not top <= of_a_run:
        model = StackConfig
    else:
        if not top <= RunConfig.model_fields.keys():
            content = {"algorithm": content}
        whole = REST_OF_A_RUN | content
        whole["data"] = {**REST_OF_A_RUN["data"], **content.get("data", {})}
        if content.get("algorithm", {}).get("type") not in WITHOUT_REWARDS:
            whole = WITH_REWARDS | whole
        text = yaml.safe_dump(whole)
    try:
        load_text(model, text, source=source)
    except InvalidConfig as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", named(COMING_FROM))
def test_a_page_for_users_of_another_program_names_what_exists(page: Path) -> None:
    metrics = {metric.name for metric in METRICS}
    unknown = []
    for row in rows(page):
        assert len(row) == 3, row
        ours = CODE.findall(row[1])
        assert ours or row[1] == "none", row
        assert ours or row[2], f"what to do instead of {row[0]}?"
        for text in ours:
            command = COMMAND.fullmatch(text)
            if command:
                unknown += [wrong] if (wrong := wrong_command(command[1])) else []
            elif text not in metrics | FILES and not is_setting(text) and not KEYS.get(text):
                unknown.append(text)
    assert unknown == []


def test_pages_and_error_messages_name_the_same_keys_for_those_of_other_programs() -> None:
    named_by_pages: dict[str, set[str]] = {}
    for row in (row for page in COMING_FROM if "roll" not in page.name for row in rows(page)):
        ours = {text.partition(": ")[0] for text in CODE.findall(row[1])}
        for theirs in CODE.findall(row[0]):
            parts = theirs.partition(": ")[0].split(".")
            endings = (".".join(parts[first:]) for first in range(len(parts)))
            if key := next((ending for ending in endings if ending in OURS), None):
                named_by_pages.setdefault(key, set()).update(ours)
    assert {key: OURS[key] for key, ours in named_by_pages.items() if OURS[key] not in ours} == {}
