"""Renders chat templates: a list of messages becomes the text that the model continues.

Invariants: templates are untrusted code, so they run in jinja2's immutable sandbox; the environment is the one that
published templates are written for (trimmed blocks, loop controls, `raise_exception`, unescaped `tojson`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from flotilla_core.errors import InvalidConfig


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's part for other tools; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, where: str) -> None:
        self._where = where
        self._special_tokens = special_tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidConfig("the chat template cannot be read", where=where, why=str(error)) from error

    def render(self, messages: Sequence[dict[str, Any]], *, begin_answer: bool = True) -> str:
        """Return the messages as one text; with `begin_answer` it ends where the assistant begins to answer."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                add_generation_prompt=begin_answer,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidConfig(
                "the chat template refuses the messages", where=self._where, why=str(error)
            ) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
