"""Names the packages of `flotilla`, all in its own version, so that an installation is of one release."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class OneRelease(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies to those of the hook's table, with all that they need of ours.

        Each other service is an extra of its name, beside those of the table.
        """
        tree = Path(self.root).parents[1]
        projects = {folder: _projects(tree / folder) for folder in ("libs", "services")}
        ours = projects["libs"] | projects["services"]
        always = set().union(*(_with_ours(name, ours) for name in self.config["dependencies"]))
        extras = {extra: set(names) for extra, names in self.config["optional-dependencies"].items()}
        for name in projects["services"].keys() - always:
            extras[name.removeprefix("flotilla-")] = _with_ours(name, ours) - always
        pin = f"=={metadata['version']}"
        metadata["dependencies"] = [name + pin for name in sorted(always)]
        metadata["optional-dependencies"] = {
            extra: [name + pin for name in sorted(names)] for extra, names in sorted(extras.items())
        }


def _projects(folder: Path) -> dict[str, list[str]]:
    """Return what each package of a folder depends on."""
    tables = [tomllib.loads(file.read_text("utf-8"))["project"] for file in folder.glob("*/pyproject.toml")]
    return {table["name"]: table.get("dependencies", []) for table in tables}


def _with_ours(name: str, ours: dict[str, list[str]]) -> set[str]:
    """Return a package with the packages of ours that it needs."""
    needed = (_with_ours(other, ours) for other in ours.get(name, ()) if other in ours)
    return {name}.union(*needed)
