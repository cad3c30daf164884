"""JSON that fits a schema.

Invariants: a schema is checked before any response, and each keyword that is not checked here is refused by its name:
none is ignored silently. References stay within the schema, so nothing is ever fetched. Alternatives within
alternatives and patterns may take any time, so it runs in a process that can be killed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, field_validator

from flotilla_reward.builtin import BuiltinReward, CannotScore, Sample, Unreadable
from flotilla_reward.verifiers.formats import FORMATS
from flotilla_reward.verifiers.reading import NoJson, code_blocks, read_json

COLUMNS = ("json_schema", "schema")
ABOUT = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
ANNOTATIONS = frozenset({"$schema", "$id", "$comment", *ABOUT})
OF_ITEMS = ("items", "additionalItems", "contains")
ONE_SCHEMA = frozenset({*OF_ITEMS, "additionalProperties", "propertyNames", "not", "if", "then", "else"})
SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
COUNTS = tuple(
    f"{bound}{of}" for of in ("Items", "Length", "Properties", "Contains") for bound in ("min", "max")
)
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
VALUES = (
    "type",
    "enum",
    "const",
    "required",
    "dependentRequired",
    "uniqueItems",
    "pattern",
    "format",
    "$ref",
)
PLAIN = frozenset({*VALUES, *COUNTS, *NUMBERS})
# A character with its backslash, a class of characters, or the end.
PART_OF_PATTERN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]|\$", re.DOTALL)
KNOWN = ANNOTATIONS | ONE_SCHEMA | SCHEMAS | NAMED_SCHEMAS | PLAIN


def _as_python(part: re.Match[str]) -> str:
    return r"\Z" if part[0] == "$" else part[0]


@lru_cache(maxsize=256)
def pattern_of(text: str) -> re.Pattern[str]:
    """Return a pattern of JSON Schema, whose `$` is the very end and not also what is before a last line's end."""
    return re.compile(PART_OF_PATTERN.sub(_as_python, text))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
# For each keyword: the type that it is about, and whether a value keeps it.
RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda value, least: value >= least),
    "maximum": ("number", lambda value, most: value <= most),
    "exclusiveMinimum": ("number", lambda value, bound: value > bound),
    "exclusiveMaximum": ("number", lambda value, bound: value < bound),
    "multipleOf": ("number", lambda value, step: _fraction(value) % _fraction(step) == 0),
    "minLength": ("string", lambda value, least: len(value) >= least),
    "maxLength": ("string", lambda value, most: len(value) <= most),
    "pattern": ("string", lambda value, pattern: pattern_of(pattern).search(value) is not None),
    "format": ("string", lambda value, name: FORMATS[name](value)),
    "minItems": ("array", lambda value, least: len(value) >= least),
    "maxItems": ("array", lambda value, most: len(value) <= most),
    "uniqueItems": (
        "array",
        lambda value, unique: not unique or len(set(map(_canonical, value))) == len(value),
    ),
    "minProperties": ("object", lambda value, least: len(value) >= least),
    "maxProperties": ("object", lambda value, most: len(value) <= most),
}


class JsonSchema(BuiltinReward):
    """JSON that fits a schema.

    1 when the response, or its last fenced block of JSON, fits; else 0. A key that is there twice and NaN are no JSON.
    """

    bounded: ClassVar[bool] = False
    blames_response: ClassVar[bool] = True
    rules: ClassVar[int] = 2

    json_schema: dict[str, Any] | None = Field(
        default=None,
        description="The schema; by default the column `json_schema` or `schema` of the row, else its answer.",
    )
    partial: bool = Field(
        default=False,
        description="JSON that does not fit is worth the share of the schema's demands that it meets.",
    )

    @field_validator("json_schema")
    @classmethod
    def _sound(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            check_schema(schema, schema, "")
        return schema

    def score(self, sample: Sample) -> float:
        schema = self.json_schema if self.json_schema is not None else _schema_of(sample)
        try:
            value = read_json(_json_text(sample.response))
            met = list(demands(value, schema, schema))
        except NoJson:
            return 0.0
        except RecursionError as error:
            raise Unreadable("nested too deeply") from error
        return sum(met) / len(met) if self.partial and met else float(all(met))


def _json_text(response: str) -> str:
    blocks = [content for language, content in code_blocks(response) if language.lower() in ("json", "")]
    return blocks[-1] if blocks else response.strip().removeprefix("\ufeff")


def _schema_of(sample: Sample) -> dict[str, Any]:
    given = next((sample.info[name] for name in COLUMNS if sample.info.get(name)), sample.answer)
    if not given:
        raise CannotScore(
            f"there is no schema: neither as a parameter, nor in {' or '.join(COLUMNS)}, nor as the answer"
        )
    return _read_schema(given if isinstance(given, str) else json.dumps(given))


@lru_cache(maxsize=256)
def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = read_json(text)
        check_schema(schema, schema, "")
    except (NoJson, Unreadable, ValueError, RecursionError) as error:
        raise CannotScore(f"the schema of the row cannot be used: {error}") from error
    assert isinstance(schema, dict)
    return schema


def check_schema(schema: Any, root: Any, place: str) -> None:
    """Raise ValueError where a schema is wrong or asks for more than is checked here."""
    if isinstance(schema, bool) and place:
        return
    if not isinstance(schema, dict):
        raise ValueError(f"the schema{place and ' at ' + place} is no object")
    for keyword, demand in schema.items():
        here = f"{place}/{keyword}"
        if keyword not in KNOWN:
            close = difflib.get_close_matches(keyword, sorted(KNOWN), n=1)
            raise ValueError(
                f"{here}: the keyword is not known" + (f" (did you mean {close[0]}?)" if close else "")
            )
        # In earlier drafts `items` is a list where it is `prefixItems` now.
        listed = keyword in SCHEMAS or (keyword == "items" and isinstance(demand, list))
        if keyword in ONE_SCHEMA and not listed:
            check_schema(demand, root, here)
        elif listed or keyword in NAMED_SCHEMAS:
            for name, item in _parts(demand, listed, here):
                check_schema(item, root, f"{here}/{name}")
                if keyword == "patternProperties":
                    _check_plain("pattern", name, root, f"{here}/{name}")
        elif keyword in PLAIN:
            _check_plain(keyword, demand, root, here)


def _parts(demand: Any, listed: bool, here: str) -> Iterable[tuple[Any, Any]]:
    """Return the schemas of a keyword that has several, by their places or names."""
    if listed and (not isinstance(demand, list) or not demand):
        raise ValueError(f"{here} is no list of schemas")
    if not listed and not isinstance(demand, dict):
        raise ValueError(f"{here} is no object")
    return enumerate(demand) if listed else demand.items()


def _check_plain(keyword: str, demand: Any, root: Any, here: str) -> None:
    if keyword == "type":
        wrong = [name for name in _types(demand) if name not in TYPES]
        problem = f"{wrong[0]!r} is no type; types are {', '.join(TYPES)}" if wrong else ""
    elif keyword == "pattern":
        try:
            pattern_of(demand)
            problem = ""
        except (re.error, OverflowError, TypeError) as error:
            problem = f"not a regular expression: {error}"
    elif keyword == "format":
        known = isinstance(demand, str) and demand in FORMATS
        problem = "" if known else f"{demand!r:.100} is no format; formats are {', '.join(FORMATS)}"
    elif keyword == "$ref":
        seen: list[Any] = []
        while isinstance(demand, str) and demand not in seen:
            seen.append(demand)
            target = _target(demand, root)
            demand = target.get("$ref") if isinstance(target, dict) else None
        problem = "" if demand is None else "it refers to itself, or is no text"
    else:
        good = {
            "enum": isinstance(demand, list),
            "required": _is_names(demand),
            "dependentRequired": isinstance(demand, dict) and all(map(_is_names, demand.values())),
            "uniqueItems": isinstance(demand, bool),
            "const": True,
            "multipleOf": _is_number(demand) and demand > 0,
        }
        count = TYPES["integer"](demand) and demand >= 0
        problem = (
            ""
            if good.get(keyword, count if keyword in COUNTS else _is_number(demand))
            else "has a wrong value"
        )
    if problem:
        raise ValueError(f"{here}: {problem}")


def _is_names(demand: Any) -> bool:
    return isinstance(demand, list) and all(isinstance(name, str) for name in demand)


def _types(demand: Any) -> list[Any]:
    return demand if isinstance(demand, list) else [demand]


def _target(reference: str, root: Any) -> Any:
    """Return what a reference within the schema stands for."""
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference!r:.100} leads out of the schema")
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise ValueError(f"$ref {reference!r:.100} leads nowhere")
        found = found[name]
    return found


def demands(value: Any, schema: Any, root: Any) -> Iterator[bool]:
    """Yield for each demand of the schema whether the value meets it."""
    if isinstance(schema, bool):
        yield schema
        return
    if "$ref" in schema:
        yield from demands(value, _target(schema["$ref"], root), root)
    if "type" in schema:
        yield any(TYPES[name](value) for name in _types(schema["type"]))
    if "const" in schema:
        yield _canonical(value) == _canonical(schema["const"])
    if "enum" in schema:
        yield _canonical(value) in map(_canonical, schema["enum"])
    for keyword, (kind, keeps) in RULES.items():
        if keyword in schema and TYPES[kind](value):
            yield keeps(value, schema[keyword])
    yield from _of_parts(value, schema, root)
    if isinstance(value, list):
        yield from _of_list(value, schema, root)
    if isinstance(value, dict):
        yield from _of_object(value, schema, root)


def _of_parts(value: Any, schema: dict[str, Any], root: Any) -> Iterator[bool]:
    for part in schema.get("allOf", []):
        yield from demands(value, part, root)
    if "anyOf" in schema:
        yield any(fits(value, part, root) for part in schema["anyOf"])
    if "oneOf" in schema:
        yield sum(fits(value, part, root) for part in schema["oneOf"]) == 1
    if "not" in schema:
        yield not fits(value, schema["not"], root)
    if "if" in schema:
        branch = "then" if fits(value, schema["if"], root) else "else"
        if branch in schema:
            yield from demands(value, schema[branch], root)


def _of_list(value: list[Any], schema: dict[str, Any], root: Any) -> Iterator[bool]:
    first, rest = schema.get("prefixItems", []), schema.get("items")
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems")
    for item, part in zip(value, first, strict=False):
        yield from demands(item, part, root)
    for item in value[len(first) :] if rest is not None else []:
        yield from demands(item, rest, root)
    if "contains" in schema:
        found = sum(fits(item, schema["contains"], root) for item in value)
        yield schema.get("minContains", 1) <= found <= schema.get("maxContains", found)


def _of_object(value: dict[str, Any], schema: dict[str, Any], root: Any) -> Iterator[bool]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    dependent = [names for name, names in schema.get("dependentRequired", {}).items() if name in value]
    for name in [*schema.get("required", []), *(name for names in dependent for name in names)]:
        yield name in value
    for name, part in schema.get("dependentSchemas", {}).items():
        if name in value:
            yield from demands(value, part, root)
    for name, item in value.items():
        parts = [part for pattern, part in patterns.items() if pattern_of(pattern).search(name)]
        parts += [properties[name]] if name in properties else []
        if not parts and "additionalProperties" in schema:
            parts = [schema["additionalProperties"]]
        for part in parts:
            yield from demands(item, part, root)
        if "propertyNames" in schema:
            yield from demands(name, schema["propertyNames"], root)


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value meets all demands of a schema."""
    return all(demands(value, schema, root))


def _fraction(number: int | float) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _canonical(value: Any) -> str:
    """Return one text for equal values: 1 is 1.0, and true is not 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
