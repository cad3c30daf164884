from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from flotilla_reward.builtin import CannotScore, Sample, Unreadable
from flotilla_reward.verifiers.structured import JsonSchema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"type": "array", "items": {"$ref": "#"}}


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
        ('"a"', {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 1),
        ("3", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 0),
        ("3", {"not": {"type": "integer"}}, 0),
        ('["a", 1, 2]', {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, 1),
        ('["a", 1]', {"prefixItems": [{"type": "string"}], "items": False}, 0),
        ("null", {"type": ["null", "string"]}, 1),
        ("[1]", {"minItems": 2}, 0),
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


def test_partial_credit_is_the_share_of_demands_that_are_met() -> None:
    # Met: the type, the type and bound of the age. Not met: the name.
    assert JsonSchema(json_schema=PERSON, partial=True).score(Sample("", '{"age": 3}', "", {})) == 3 / 4
    assert JsonSchema(json_schema=PERSON, partial=True).score(Sample("", "age 3", "", {})) == 0


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"requried": ["a"]}, r"/requried: the keyword is not known \(did you mean required\?\)"),
        ({"properties": {"a": {"format": "date"}}}, "/properties/a/format: the keyword is not known"),
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
