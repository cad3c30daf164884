"""Write what an editable installation of the packages of a checkout leaves: their metadata and their commands.

For hosts without a package index, where `pip install` has nothing to install from:
`make_importable.py CHECKOUT METADATA SITE` writes metadata to a folder of PYTHONPATH, and commands to where this Python
keeps its own, with the NATS server of SITE beside them.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

COMMAND = """#!{python}
import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""


def main() -> int:
    """Write metadata and commands."""
    checkout, metadata, site = map(Path, sys.argv[1:])
    commands = Path(sysconfig.get_path("scripts"))
    shutil.rmtree(metadata, ignore_errors=True)
    metadata.mkdir(parents=True)
    version = (checkout / "VERSION").read_text().strip()
    for file in sorted(
        [*checkout.glob("libs/*/pyproject.toml"), *checkout.glob("services/*/pyproject.toml")]
    ):
        project = tomllib.loads(file.read_text())["project"]
        write_metadata(metadata, project, version)
        for name, target in project.get("scripts", {}).items():
            module, function = target.split(":")
            write_command(
                commands / name, COMMAND.format(python=sys.executable, module=module, function=function)
            )
    shutil.copy(site / "bin" / "nats-server", commands)
    (commands / "nats-server").chmod(0o755)
    return 0


def write_metadata(folder: Path, project: dict[str, Any], version: str) -> None:
    """Write the name, the version and the entry points of one package."""
    version = project.get("version", version)
    info = folder / f"{project['name'].replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
        if entries
    ]
    (info / "entry_points.txt").write_text("".join(lines))


def write_command(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
