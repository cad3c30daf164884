"""FILE... [key.path=value]... as commands take them."""

from __future__ import annotations

from pathlib import Path


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Files, then overrides; an existing file is a file whatever its name."""
    from flotilla_core.errors import InvalidRequest

    overrides = [text for text in arguments if "=" in text and not Path(text).exists()]
    files = [Path(text) for text in arguments if text not in overrides]
    if not files:
        raise InvalidRequest(
            "no configuration file is given",
            where=" ".join(arguments),
            next_step="name one or more YAML files before the key=value overrides",
        )
    return files, overrides
