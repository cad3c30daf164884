from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from flotilla_reward.builtin import CannotScore, Sample, Unreadable
from flotilla_reward.verifiers.formats import FORMATS
from flotilla_reward.verifiers.structured import JsonSchema

GOLDEN = Path(__file__).parents[1] / "golden"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"type": "array", "items": {"$ref": "#"}}


def said(text: str) -> Sample:
    return Sample("", json.dumps(text), "", {})


@pytest.mark.parametrize(
    ("response", "schema", "expected"),
    [
        ('{"name": "Ada", "age": 36}', PERSON, 1),
        ('{"name": "Ada"}', PERSON, 1),
        ('{"age": 36}', PERSON, 0),
        ('{"name": "", "age": 36}', PERSON, 0),
        ('{"name": "Ada", "age": -1}', PERSON, 0),
        ('{"name": "Ada", "age": true}', PERSON, 0),
        ('{"name": "Ada", "age": 36.0}', PERSON, 1),
        ('{"name": "Ada", "age": 36.5}', PERSON, 0),
        ('{"name": "Ada", "job": "x"}', PERSON, 0),
        ('{"name": "Ada", "name": "Eve"}', PERSON, 0),
        ('{"name": "Ada", "age": NaN}', PERSON, 0),
        ('{"name": "Ada", "age": 1e999}', PERSON, 0),
        ('{"name": "Ada", "age": ' + "9" * 10_000 + "}", PERSON, 0),
        ('Here: {"name": "Ada"}', PERSON, 0),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', PERSON, 1),
        ('```json\n{}\n```\nBetter:\n```json\n{"name": "Ada"}\n```', PERSON, 1),
        ('```json\n{"name": "Ada"}\n```\nWorse:\n```json\n{}\n```', PERSON, 0),
        ('```json\n{"name": "Ada"}', PERSON, 0),
        ('````json\n{"name": "```"}\n````', PERSON, 1),
        ('{"name": "\\ud800"}', PERSON, 1),
        ("[]", PERSON, 0),
        ("", PERSON, 0),
        ("[[], [[]]]", TREE, 1),
        ("[[], [1]]", TREE, 0),
        ("1", {"enum": [1, "a"]}, 1),
        ("true", {"enum": [1, "a"]}, 0),
        ("1.0", {"const": 1}, 1),
        ("[1, 1.0]", {"uniqueItems": True}, 0),
        ("[1, true]", {"uniqueItems": True}, 1),
        ("0.3", {"multipleOf": 0.1}, 1),
        ("7", {"multipleOf": 2}, 0),
        ('"a1"', {"pattern": "^[a-z]\\d$"}, 1),
        ('"abc\\n"', {"pattern": "^[a-z]+$"}, 0),
        ('"abc\\n"', {"pattern": "^[a-z]+\\n$"}, 1),
        ('"a$"', {"pattern": "^a[$]$|^b\\$$"}, 1),
        ('"b$"', {"pattern": "^a[$]$|^b\\$$"}, 1),
        ('"a]$\\n"', {"pattern": "^a[]$]+$"}, 0),
        ('"a]$"', {"pattern": "^a[]$]+$"}, 1),
        ('{"a\\n": 1}', {"patternProperties": {"^a$": False}}, 1),
        ('"a"', {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 1),
        ("3", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 0),
        ("3", {"not": {"type": "integer"}}, 0),
        ('["a", 1, 2]', {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, 1),
        ('["a", 1]', {"prefixItems": [{"type": "string"}], "items": False}, 0),
        ("null", {"type": ["null", "string"]}, 1),
        ("[1]", {"minItems": 2}, 0),
        ('["a", 1]', {"items": [{"type": "string"}], "additionalItems": {"type": "integer"}}, 1),
        ('["a", "b"]', {"items": [{"type": "string"}], "additionalItems": {"type": "integer"}}, 0),
        ("[1, 2, 3]", {"contains": {"const": 2}}, 1),
        ("[1, 3]", {"contains": {"const": 2}}, 0),
        ("[2, 2]", {"contains": {"const": 2}, "maxContains": 1}, 0),
        ("[]", {"contains": {"const": 2}, "minContains": 0}, 1),
        ('{"x_a": 1, "b": "c"}', {"patternProperties": {"^x_": {"type": "integer"}}}, 1),
        ('{"x_a": "1"}', {"patternProperties": {"^x_": {"type": "integer"}}}, 0),
        ('{"x_a": 1, "b": 2}', {"patternProperties": {"^x_": True}, "additionalProperties": False}, 0),
        ('{"card": 1, "address": 2}', {"dependentRequired": {"card": ["address"]}}, 1),
        ('{"card": 1}', {"dependentRequired": {"card": ["address"]}}, 0),
        ('{"card": 1}', {"dependentSchemas": {"card": {"minProperties": 2}}}, 0),
        (
            '{"in": "US", "zip": "1"}',
            {"if": {"properties": {"in": {"const": "US"}}}, "then": {"required": ["zip"]}},
            1,
        ),
        ('{"in": "US"}', {"if": {"properties": {"in": {"const": "US"}}}, "then": {"required": ["zip"]}}, 0),
        ('{"in": "FR"}', {"if": {"properties": {"in": {"const": "US"}}}, "else": {"required": ["cp"]}}, 0),
        ("3", {"format": "date"}, 1),
        ('{"a": 1}', {"minProperties": 1, "propertyNames": {"maxLength": 1}}, 1),
        (
            '{"a": {"b": 1}}',
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"required": ["c"]}}},
            0,
        ),
    ],
)
def test_json_fits_its_schema_wherever_that_comes_from(response: str, schema: dict, expected: float) -> None:
    assert JsonSchema(json_schema=schema).score(Sample("", response, "", {})) == expected
    assert JsonSchema().score(Sample("", response, "", {"schema": schema})) == expected
    assert JsonSchema().score(Sample("", response, json.dumps(schema), {})) == expected


def test_formats_are_those_of_the_documents_that_json_schema_names() -> None:
    rows = [line.split("\t") for line in (GOLDEN / "formats.tsv").read_text().splitlines()]
    wrong = [
        row for row in rows if JsonSchema(json_schema={"format": row[0]}).score(said(row[2])) != float(row[1])
    ]
    assert wrong == []
    assert {row[0] for row in rows} == {*FORMATS}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "regex"])
@pytest.mark.parametrize("text", ["1", "a", "a.", "a@", "a:", "/", "//a@", "%41", "[", "P1", "~0", '"\\a'])
def test_no_text_keeps_a_format_busy(name: str, text: str) -> None:
    started = time.process_time()
    JsonSchema(json_schema={"format": name}).score(said(text * 100_000))
    assert time.process_time() - started < 1.0


def test_partial_credit_is_the_share_of_demands_that_are_met() -> None:
    # Met: the type, the type and bound of the age. Not met: the name.
    assert JsonSchema(json_schema=PERSON, partial=True).score(Sample("", '{"age": 3}', "", {})) == 3 / 4
    assert JsonSchema(json_schema=PERSON, partial=True).score(Sample("", "age 3", "", {})) == 0


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"requried": ["a"]}, r"/requried: the keyword is not known \(did you mean required\?\)"),
        (
            {"properties": {"a": {"format": "day"}}},
            "/properties/a/format: 'day' is no format; formats are date,",
        ),
        (
            {"properties": {"a": {"unevaluatedProperties": False}}},
            "unevaluatedProperties: the keyword is not",
        ),
        ({"patternProperties": {"(": True}}, "not a regular expression"),
        ({"dependentRequired": {"a": "b"}}, "/dependentRequired: has a wrong value"),
        ({"type": "float"}, "'float' is no type"),
        ({"pattern": "("}, "not a regular expression"),
        ({"minItems": -1}, "/minItems: has a wrong value"),
        ({"$ref": "https://example.org/schema"}, "leads out of the schema"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "#"}, "refers to itself"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(schema: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JsonSchema(json_schema=schema)
    with pytest.raises(CannotScore, match=says):
        JsonSchema().score(Sample("", "1", "", {"schema": schema}))


def test_a_row_without_a_schema_is_no_score() -> None:
    with pytest.raises(CannotScore, match="there is no schema"):
        JsonSchema().score(Sample("", "1", "", {}))


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_json_nested_beyond_reading_is_the_responses_fault(depth: int) -> None:
    try:
        assert JsonSchema(json_schema=TREE).score(Sample("", "[" * depth + "]" * depth, "", {})) == 1
    except Unreadable:
        assert depth > 300
