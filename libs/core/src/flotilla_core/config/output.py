"""A configuration as YAML and its model as JSON Schema.

Invariant: what `dump_yaml` writes, `load` reads back to an equal configuration.
"""

from __future__ import annotations

from typing import Any

import yaml

from flotilla_core.config.model import ConfigModel


def dump_yaml(config: ConfigModel) -> str:
    """Every value, defaults included, in the order of the model."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def json_schema(model: type[ConfigModel]) -> dict[str, Any]:
    """For editors and for the reference page."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
