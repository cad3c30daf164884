"""Runs chat templates, in the process that `flotilla_data.chat_template` bounds.

Invariants: a template runs in jinja2's immutable sandbox, in the environment that published templates are written for
(trimmed blocks, loop controls, `raise_exception`, unescaped `tojson`). What it raises, whatever it is, is an answer.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from flotilla_core.errors import InvalidConfig

LONGEST_REASON = 1000
_RAISED = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""The errors that templates raise, deep recursion among them."""


def render(question: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    """Return for each conversation its text, or why the template refuses it."""
    try:
        template = _compiled(question["source"])
    except _RAISED as error:
        raise InvalidConfig(
            "the chat template cannot be read", where=question["where"], why=_reason(error)
        ) from None
    return [_rendered(template, one, question["special_tokens"]) for one in question["conversations"]]


def _rendered(
    template: jinja2.Template, conversation: dict[str, Any], special_tokens: dict[str, str]
) -> tuple[str | None, str | None]:
    try:
        text = template.render(**conversation, **special_tokens)
        text.encode()
    except UnicodeEncodeError:
        return None, "it writes half of a surrogate pair"
    except _RAISED as error:
        return None, _reason(error)
    return text, None


def _reason(error: Exception) -> str:
    text = str(error)[:LONGEST_REASON].encode(errors="replace").decode()
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's part for other tools; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
