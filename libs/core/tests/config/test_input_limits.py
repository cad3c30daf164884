"""Texts that would grow without bound are refused in little memory, by file, override and wire."""

from __future__ import annotations

import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from flotilla_core.config import RunConfig, load, load_text
from flotilla_core.config.document import DEEPEST, MOST_BYTES, MOST_VALUES
from flotilla_core.errors import InvalidConfig
from flotilla_core.json_text import json_object, read_json_object
from flotilla_core.model_folder import stored_shapes

MOST_MEMORY = 600 << 20
"""Bytes of a process that reads a configuration; half of it is Python with pydantic and protobuf."""

LETTERS = "abcdefghij"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise(LETTERS)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in pairwise(LETTERS)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))

VALUES, LEVELS, BYTES = (
    f"more than {MOST_VALUES}",
    f"more than {DEEPEST} levels",
    f"longer than {MOST_BYTES} bytes",
)
BOMBS = {
    "aliases": (LAUGHS, "run.yaml:5", VALUES),
    "merged aliases": (MERGES, "run.yaml:5", VALUES),
    "a chain of aliases": (CHAIN, "run.yaml:20", LEVELS),
    "many items": ("x: [" + "a," * 100_000 + "]", "run.yaml:1", VALUES),
    "brackets": ("x: " + "[" * 200_000, "run.yaml:1", LEVELS),
    "braces": ("x:\n  " + "{a: " * 60_000, "run.yaml:2", LEVELS),
    "indented": ("".join(" " * n + "a:\n" for n in range(600)), "run.yaml:20", LEVELS),
    "size": ("#" * 100_000_000, "run.yaml", BYTES),
    "a number": ("x: " + "9" * 200_000, "run.yaml:1", "200000 characters, and 400 is the limit"),
    "a number by sixties": ("x: 1" + ":1" * 100_000, "run.yaml:1", "and 400 is the limit"),
    "NUL": ("name: run\nx: a\0b", "run.yaml:2", "holds NUL"),
    "NUL as an escape": ('name: run\nx: "a\\0b"', "run.yaml:2", "holds NUL"),
    "half of a surrogate pair": ('x: "\\ud800"', "run.yaml:1", "surrogate pair"),
    "an alias to itself": ("x: &x [*x]", "run.yaml:1", "refers to itself"),
}


@pytest.mark.parametrize(("text", "place", "limit"), BOMBS.values(), ids=BOMBS.keys())
def test_what_would_grow_without_bound_is_refused_with_place_and_limit(
    text: str, place: str, limit: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_text(RunConfig, text, source="run.yaml")
    assert place in str(refused.value)
    assert limit in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["aliases", "many items", "brackets", "size", "NUL"])
def test_a_file_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    text, place, limit = BOMBS[name]
    (tmp_path / "run.yaml").write_text(text)
    refused = subprocess.run(
        [sys.executable, "-c", READER, "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=_limit_memory,
    )
    assert refused.returncode == 0, refused.stderr
    assert place in refused.stdout
    assert limit in refused.stdout


READER = """
import sys
from flotilla_core.config import RunConfig, load
from flotilla_core.errors import InvalidConfig
try:
    load(RunConfig, sys.argv[1:])
except InvalidConfig as error:
    print(error)
"""


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"/dev/zero.*262144 bytes"):
        load(RunConfig, ["/dev/zero"])


RUN = "name: run\nsteps: 1\ndata: {train: a.jsonl}\nrewards: [{reward: exact}]\n"


@pytest.mark.parametrize("name", BOMBS.keys() - {"an alias to itself", "a chain of aliases"})
def test_an_override_has_the_same_limits(name: str) -> None:
    text, _, limit = BOMBS[name]
    value = text.partition("x:")[2] if "x:" in text else text
    with pytest.raises(InvalidConfig) as refused:
        load_text(RunConfig, RUN, overrides=[f"steps={value}"])
    assert "override steps=" in str(refused.value)
    assert limit in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("a." * 100 + "b=1", "101 parts, and 20 is the limit"),
        ("rewards." + "9" * 5000 + "=1", "rewards has no item"),
        ("rewards.²=1", "rewards has no item"),
        ("steps=" + "9" * 5000, "400 is the limit"),
    ],
    ids=["path", "index", "a digit that is no number", "number"],
)
def test_an_override_that_leads_nowhere_is_refused(override: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match="override") as refused:
        load_text(RunConfig, RUN, overrides=[override])
    assert told in str(refused.value)


def test_more_overrides_than_a_thousand_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="1001 were given, and 1000 is the limit"):
        load_text(RunConfig, RUN, overrides=["steps=2"] * 1001)


def test_a_mistake_in_each_item_of_a_long_list_is_told_in_a_page() -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_text(
            RunConfig,
            RUN + f"algorithm: [{'1, ' * 15_000}]\nweights: {{{', '.join(f'k{n}: 1' for n in range(2000))}}}",
        )
    assert "and 1951 more" in str(refused.value)
    assert len(str(refused.value)) < 10_000


def test_aliases_and_merges_of_a_usual_size_are_read() -> None:
    text = RUN + (
        "optimizer: &one {learning_rate: 1e-5, weight_decay: 0.1}\n"
        "algorithm: {type: ppo, critic: {optimizer: {<<: *one, learning_rate: 1e-4}}}\n"
    )
    config = load_text(RunConfig, text)
    assert config.optimizer.learning_rate == 1e-5
    assert config.algorithm.model_dump()["critic"]["optimizer"]["learning_rate"] == 1e-4
    assert config.algorithm.model_dump()["critic"]["optimizer"]["weight_decay"] == 0.1


def test_an_alias_of_a_mapping_that_changes_what_it_merged_is_read_twice() -> None:
    text = RUN.replace("rewards", "unused") + (
        "base: &base {reward: exact, weight: 1}\nrewards: [&term {<<: *base, weight: 2}, *term]\n"
    )
    with pytest.raises(InvalidConfig) as refused:
        load_text(RunConfig, text)
    assert "twice" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "not JSON"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": 1e999}', "too large for a number"),
        (b'{"a": "\\ud800"}', "surrogate pair"),
        (b"\xff{}", "not JSON"),
        (b"[]", "it is a list"),
    ],
    ids=["lists", "objects", "digits", "NaN", "infinity", "surrogate", "bytes", "list"],
)
def test_json_that_nobody_could_mean_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told) as refused:
        json_object(content, "train.jsonl, line 3", finite=True)
    assert "train.jsonl, line 3" in str(refused.value)


def test_a_json_file_is_not_read_beyond_its_limit(tmp_path: Path) -> None:
    with (tmp_path / "endless.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidConfig, match="more than 1000 bytes, the limit"):
        read_json_object(tmp_path / "endless.json", most_bytes=1000)
    with pytest.raises(InvalidConfig, match="it is a device"):
        read_json_object(Path("/dev/zero"))
    (tmp_path / "weights.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidConfig, match=r"weights\.safetensors.*at most 104857600 bytes"):
        stored_shapes(tmp_path / "weights.safetensors")
