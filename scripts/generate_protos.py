"""Generate the Python code of every contract under protos/, and of the table of roles, into libs/proto/src.

Invariants: every call of a contract has one line in protos/roles.yaml, and a line names a call; the directory of a
.proto file is its package and its import path; what lies under the output root is exactly what the protos produce
(stale files are removed); the same protos give the same bytes. Runs with the interpreter of the tool environment
(requirements/tools.txt), which is kept apart from the services because the code generator and the runtime need
different protobuf releases.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGES = ROOT / "libs" / "proto" / "src"
SERVICE = re.compile(r"^service ", re.MULTILINE)
ROLES = PROTOS / "roles.yaml"
ROLES_MODULE = Path("flotilla/common/v1/roles.py")
ROLE_LINE = re.compile(r"(?P<call>[\w.]+/\w+): (?P<role>read|run|admin)")
# Services of others have no contract here, and tests/contract/test_roles.py finds their calls.
OURS = "flotilla."
GENERATED_NAMES = ("__init__.py", "py.typed", ROLES_MODULE.name)
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def run_protoc(sources: list[str], *outputs: str) -> None:
    """Run the compiler over `sources`, with the stub plugins next to this interpreter."""
    plugins = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--proto_path={PROTOS}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            *outputs,
            *sources,
        ]
    )
    if status != 0:
        sys.exit(f"protoc failed with status {status}; see its message above")


def generate(output: Path) -> None:
    """Write the code of all protos below `output`, with `__init__.py` and `py.typed` in each leaf package."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    if not sources:
        sys.exit(f"no .proto file below {PROTOS}")
    with_services = [source for source in sources if SERVICE.search((PROTOS / source).read_text("utf-8"))]
    run_protoc(sources, f"--python_out={output}", f"--mypy_out=quiet:{output}")
    run_protoc(with_services, f"--grpc_python_out={output}", f"--mypy_grpc_out=quiet:{output}")
    for folder in sorted({(output / source).parent for source in sources}):
        package = folder.relative_to(output).as_posix().replace("/", ".")
        (folder / "__init__.py").write_text(f'"""Generated code of {package}."""\n', encoding="ascii")
        (folder / "py.typed").touch()
    (output / ROLES_MODULE).write_text(roles_module(roles(), calls_of(sources)), encoding="ascii")


def roles() -> dict[str, str]:
    """Return the role of every call that the table names; exit where a line is no `call: role`."""
    found: dict[str, str] = {}
    for number, line in enumerate(ROLES.read_text("utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = ROLE_LINE.fullmatch(text)
        if match is None or match["call"] in found:
            problem = "names a call again" if match else "is no `package.Service/Call: read|run|admin`"
            sys.exit(f"{ROLES}:{number} {problem}: {text}")
        found[match["call"]] = match["role"]
    return found


def calls_of(sources: list[str]) -> set[str]:
    """Return package.Service/Call of every call of the contracts."""
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder) / "descriptors.binpb"
        run_protoc(sources, f"--descriptor_set_out={descriptors}")
        files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
    return {
        f"{file.package}.{service.name}/{method.name}"
        for file in files
        for service in file.service
        for method in service.method
    }


def roles_module(table: dict[str, str], calls: set[str]) -> str:
    """Return the module that holds the table; exit where it does not name exactly the calls of the contracts."""
    ours = {call for call in table if call.startswith(OURS)}
    problems = [f"{call} has no line: say read, run or admin" for call in sorted(calls - ours)]
    problems += [f"{call} is no call of a contract" for call in sorted(ours - calls)]
    if problems:
        sys.exit("\n  ".join([f"{ROLES} does not fit the contracts:", *problems]))
    return "\n".join(
        [
            '"""Generated from protos/roles.yaml: the least role that a caller of each call has."""',
            "",
            "ROLES = {",
            *(f'    "/{call}": "{role}",' for call, role in table.items()),
            "}",
            "",
        ]
    )


def generated_files(root: Path) -> set[Path]:
    """Paths, relative to `root`, of every file that `generate` owns there."""
    return {
        path.relative_to(root)
        for path in root.rglob("*py*")
        if path.name in GENERATED_NAMES or path.name.endswith(GENERATED_SUFFIXES)
    }


def differences(fresh: Path, current: Path) -> list[str]:
    """One line for each file that is missing, outdated or left over in `current`."""
    wanted, present = generated_files(fresh), generated_files(current)
    lines = [f"missing: {path}" for path in sorted(wanted - present)]
    lines += [f"left over: {path}" for path in sorted(present - wanted)]
    lines += [
        f"outdated: {path}"
        for path in sorted(wanted & present)
        if not filecmp.cmp(fresh / path, current / path, shallow=False)
    ]
    return lines


def install(fresh: Path, current: Path) -> None:
    """Make `current` equal to `fresh`, touching only what differs."""
    for path in generated_files(current) - generated_files(fresh):
        (current / path).unlink()
    for path in generated_files(fresh):
        target = current / path
        if target.exists() and filecmp.cmp(fresh / path, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fresh / path, target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the Python code of the contracts in protos/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        stale = differences(fresh, PACKAGES)
        if check and stale:
            print("generated code is stale, run 'make proto':", *stale, sep="\n  ", file=sys.stderr)
            return 1
        if not check:
            install(fresh, PACKAGES)
        count = len(generated_files(fresh))
    print(f"{count} generated files, {len(stale)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
