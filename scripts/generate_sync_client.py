"""Generate the clients without asyncio, `SyncClient` and `SyncLoop`, from `Client` and `Loop`.

    .venv/bin/python scripts/generate_sync_client.py [--check]

Every public method gets a twin that waits, with the same signature and docstring. What the twins share is written by
hand in `flotilla_client/waiting.py`. `libs/client/tests/test_synchronous.py` holds the result to its sources.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "libs" / "client" / "src" / "flotilla_client"
RUFF = Path(sys.executable).parent / "ruff"

LEFT_OUT = {
    # The command line alone needs the configuration in addition to the run.
    "get_run_and_config",
    # A stack's client is found by `connect`, and a loop is open when it is handed out.
    "find",
    "open",
    # Written by hand.
    "close",
}
# It would be called in the background thread.
LEFT_OUT_PARAMETER = "tell"

LOOP_ATTRIBUTES = {"run_id": "str", "version": "Version", "steps_done": "int", "directory": "Path"}
"""The public attributes of `Loop`, which its twin shows as properties."""

HEAD = '''"""{summary}

Generated from `{source}` by scripts/generate_sync_client.py; do not edit.
"""

from __future__ import annotations

{imports}
'''

CLIENT = '''
if TYPE_CHECKING:
    from flotilla_client.loop import Loop
    from flotilla_client.synchronous_loop import SyncLoop


def connect(
    stack: str = "local",
    state_dir: str | Path = ".flotilla",
    coordinator: str | None = None,
    credential_file: str | Path | None = None,
) -> SyncClient:
    """A client of the stack's coordinator; use it in a `with` block or call `close`."""
    return SyncClient(stack, state_dir, coordinator, credential_file)


class SyncClient(WaitingClient):
    """Calls of one coordinator, each of which waits for its answer."""

    def _synchronous(self, loop: Loop) -> SyncLoop:
        # Loops alone need numpy.
        from flotilla_client.synchronous_loop import SyncLoop

        return SyncLoop(loop, self._wait, lambda reason: self.stop_run(loop.run_id, reason))
'''

CLIENT_IMPORTS = """from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from flotilla_client.waiting import WaitingClient
"""

LOOP = '''

class SyncLoop(WaitingLoop):
    """The primitives of one open run, each of which waits for its end; see docs/custom-loops.md."""
'''

LOOP_IMPORTS = "from flotilla_client.waiting import WaitingLoop\n"


@dataclass(frozen=True)
class Twin:
    """A class that is generated: where its model is, and its parts other than the methods."""

    source: str
    model: str
    target: str
    summary: str
    inner: str
    """The attribute that holds the model."""
    head: str
    imports: str


TWINS = (
    Twin(
        "client.py",
        "Client",
        "synchronous.py",
        "The same client without asyncio: every method waits.",
        "_client",
        CLIENT,
        CLIENT_IMPORTS,
    ),
    Twin(
        "loop.py",
        "Loop",
        "synchronous_loop.py",
        "The same loop without asyncio: every method waits.",
        "_loop",
        LOOP,
        LOOP_IMPORTS,
    ),
)


def generate(twin: Twin) -> str:
    """Write the module of one twin."""
    module = ast.parse((FOLDER / twin.source).read_text())
    model = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == twin.model)
    attributes = LOOP_ATTRIBUTES if twin.model == "Loop" else {}
    if attributes and set(attributes) != set(public_attributes(model)):
        sys.exit(f"LOOP_ATTRIBUTES does not name the attributes of {twin.model}: {public_attributes(model)}")
    written = [twin.head]
    for name, kind in attributes.items():
        written.append(f"@property\ndef {name}(self) -> {kind}:\n    return self.{twin.inner}.{name}\n")
    used = set(attributes.values())
    for method in model.body:
        if isinstance(method, ast.AsyncFunctionDef) and not method.name.startswith("_"):
            if method.name in LEFT_OUT:
                continue
            written.append(waiting(method, twin.inner))
            used |= names_in(method.args) | (names_in(method.returns) if method.returns else set())
    imports = twin.imports + "".join(imports_of(module, f"flotilla_client.{twin.source[:-3]}", used))
    body = textwrap.indent("\n".join(written[1:]), "    ", lambda line: bool(line.strip()))
    text = HEAD.format(summary=twin.summary, source=twin.model, imports=imports) + twin.head + "\n" + body
    return tidied(text, FOLDER / twin.target)


def waiting(method: ast.AsyncFunctionDef, inner: str) -> str:
    """Write the twin of a method: without `async`, and with what it waits for."""
    arguments = method.args
    kept = [
        (argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if argument.arg != LEFT_OUT_PARAMETER
    ]
    arguments.kwonlyargs = [argument for argument, _ in kept]
    arguments.kw_defaults = [default for _, default in kept]
    given = [argument.arg for argument in arguments.args[1:]]
    given += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    call = f"self.{inner}.{method.name}({', '.join(given)})"
    returned = ast.unparse(method.returns) if method.returns else "None"
    if returned.startswith("AsyncGenerator["):
        returned, result = returned.replace("AsyncGenerator", "Iterator", 1), f"self._iterate({call})"
    else:
        result = f"self._wait({call})"
    if returned == "Loop":
        returned, result = "SyncLoop", f"self._synchronous({result})"
    text = f'    """{docstring}"""\n' if (docstring := described(method)) else ""
    end = f"return {result}" if returned != "None" else result
    return f"def {method.name}({ast.unparse(arguments)}) -> {returned}:\n{text}    {end}\n"


def described(method: ast.AsyncFunctionDef) -> str:
    """Return the docstring of a method, without what it says of the parameter that is left out."""
    paragraphs = (ast.get_docstring(method) or "").split("\n\n")
    kept = "\n\n".join(part for part in paragraphs if f"`{LEFT_OUT_PARAMETER}`" not in part)
    text = textwrap.indent(kept, "    ", lambda line: bool(line.strip())).strip()
    return text + "\n    " if "\n" in text else text


def public_attributes(model: ast.ClassDef) -> list[str]:
    """List what the constructor of a class sets for everybody to read."""
    return [
        target.attr
        for method in model.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for statement in ast.walk(method)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Attribute) and not target.attr.startswith("_")
    ]


def names_in(node: ast.AST) -> set[str]:
    """Collect the names that an annotation or a default mentions."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def imports_of(module: ast.Module, name: str, used: set[str]) -> Iterator[str]:
    """Import the names that a module imports or defines itself; those for type checkers alone stay with the twin."""
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            for alias in node.names:
                if (alias.asname or alias.name) in used:
                    yield f"{origin} {ast.unparse(alias)}\n"
        elif isinstance(node, ast.Assign | ast.ClassDef):
            targets = [node.name] if isinstance(node, ast.ClassDef) else map(ast.unparse, node.targets)
            for target in used.intersection(targets):
                yield f"from {name} import {target}\n"


def tidied(text: str, path: Path) -> str:
    """Sort the imports and format the text as the rest of the tree is."""
    for command in (["check", "--quiet", "--fix-only", "--select", "I001,F401"], ["format", "--quiet"]):
        arguments = [str(RUFF), *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(arguments, input=text, check=True, capture_output=True, text=True).stdout
    return text


def main() -> int:
    """Write the twins, or name those that are stale."""
    parser = argparse.ArgumentParser(description="Generate the clients without asyncio.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is stale")
    check = parser.parse_args().check
    stale = []
    for twin in TWINS:
        text, path = generate(twin), FOLDER / twin.target
        if not path.exists() or path.read_text() != text:
            stale.append(twin.target)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"{', '.join(stale)}: stale, run scripts/generate_sync_client.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
