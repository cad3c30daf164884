"""Pins the packages that `flotilla` names to its own version, so that an installation is of one release."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class OneRelease(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies to those of the hook's table, each with the version of this build."""
        pin = f"=={metadata['version']}"
        metadata["dependencies"] = [name + pin for name in self.config["dependencies"]]
        metadata["optional-dependencies"] = {
            extra: [name + pin for name in names]
            for extra, names in self.config["optional-dependencies"].items()
        }
