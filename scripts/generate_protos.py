"""Generate the Python code of every contract under protos/ into libs/proto/src.

Invariants: the directory of a .proto file is its package and its import path; what lies under the output
root is exactly what the protos produce (stale files are removed); the same protos give the same bytes. Runs
with the interpreter of the tool environment (requirements/tools.txt), which is kept apart from the services
because the code generator and the runtime need different protobuf releases.
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

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGES = ROOT / "libs" / "proto" / "src"
SERVICE = re.compile(r"^service ", re.MULTILINE)
GENERATED_NAMES = ("__init__.py", "py.typed")
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
