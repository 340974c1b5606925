"""Schemas that are taken are kept to the letter; all others are refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lade.server.client import Client, Json
from tests.lade.server.serving import loaded_model, serving

INTEGER: dict[str, Any] = {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
OF_KINDS = [
    {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
    {
        "type": "object",
        "properties": {"kind": {"const": "b"}, "v": INTEGER},
        "required": ["kind", "v"],
    },
]
# A schema, an instance of it or None, and one that breaks it.
KEPT: list[tuple[dict[str, Any], str | None, str]] = [
    (INTEGER, "1", '"a"'),
    ({**OBJECT, "required": ["a"]}, '{"a": 1}', '{"b": 1}'),
    ({"type": "object", "additionalProperties": INTEGER}, '{"b": 1}', '{"b": "x"}'),
    ({**OBJECT, "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"type": "array", "items": INTEGER, "maxItems": 1}, "[1]", "[1, 2]"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1]", "[1, 2]"),
    ({"type": "string", "enum": ["a", "b"]}, '"a"', '"c"'),
    ({"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "T"}, "null", '"a"'),
    ({"allOf": [INTEGER]}, "1", '"a"'),
    ({"oneOf": [INTEGER, {"type": "string"}]}, "1", "null"),
    ({"oneOf": OF_KINDS}, '{"kind": "a"}', '{"kind": "b"}'),
    (
        {"$defs": {"x": OF_KINDS[0], "y": OF_KINDS[1]}}
        | {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
        '{"kind": "a"}',
        '{"kind": "b"}',
    ),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"a"'),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    ({"type": "string", "pattern": "a"}, None, '"b"'),
    ({"type": "string", "format": "date-time"}, '"2020-01-01T00:00:00Z"', '"x"'),
    ({"type": "integer", "minimum": 3, "maximum": 5}, "3", "2"),
    ({"type": "number", "exclusiveMaximum": 3}, "2.5", "3.0"),
    ({"$defs": {"d": INTEGER}, "$ref": "#/$defs/d"}, "1", '"a"'),
    (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
        '{"n": {}}',
        '{"n": 1}',
    ),
    ({"type": ["integer", "null"]}, "null", '"a"'),
]
# A schema, an instance that breaks it though the grammar takes it, and what the error names.
NOT_KEPT: list[tuple[dict[str, Any], str, str]] = [
    ({"oneOf": [INTEGER, {"type": "number"}]}, "1", "oneOf"),
    ({"allOf": [INTEGER, {"enum": [1, 2]}]}, "3", "allOf"),
    ({**INTEGER, "not": {"const": 3}}, "3", "not"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]", "uniqueItems"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', "dependentRequired"),
    ({**INTEGER, "if": {"const": 3}, "then": {"const": 4}}, "3", "then|if"),
    ({"$ref": "http://a.b/c"}, '"a"', "$ref to http://a.b/c"),
    ({"$defs": {"d": INTEGER}, "$ref": "#/$defs/d", "maximum": 3}, "4", "$ref beside maximum"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"a"', "pattern, format and a length"),
    ({"type": "string", "format": "regex"}, '"["', "format 'regex'"),
    ({"type": "string", "enum": ["a", 1]}, "1", "enum of another type"),
    ({"type": "integer", "const": "a"}, '"a"', "const of another type"),
    ({**OBJECT, "anyOf": [{"required": ["b"]}]}, '{"a": 1}', "anyOf beside"),
    ({"minimum": 3}, "2", "minimum without its type"),
    ({**OBJECT, "required": ["z"]}, '{"a": 1}', "required 'z'"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(loaded_model(eos_token_id=93)) as client:
        yield client


def asking(schema: Json) -> Json:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"response_format": form, "max_tokens": 1}


def takes(schema: Json, instance: str) -> bool:
    """Return whether a grammar takes an instance."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return bool(_is_grammar_accept_string(grammar, instance))


@pytest.mark.parametrize("case", KEPT, ids=lambda case: json.dumps(case[0])[:60])
def test_what_is_taken_is_kept(client: Client, case: tuple[Json, str | None, str]) -> None:
    schema, instance, breaking = case
    assert client.text(**asking(schema))
    assert instance is None or takes(schema, instance)
    assert not takes(schema, breaking)


@pytest.mark.parametrize("case", NOT_KEPT, ids=lambda case: json.dumps(case[0])[:60])
def test_what_would_not_be_kept_is_refused(client: Client, case: tuple[Json, str, str]) -> None:
    schema, breaking, named = case
    for place, outer in (
        ("$", schema),
        ("$.items", {"type": "array", "items": schema}),
        ("$.anyOf.1", {"anyOf": [{"type": "null"}, schema]}),
    ):
        error = client.error(**asking(outer))
        assert any(each in error["message"] for each in named.split("|"))
        assert f" at {place} is not supported" in error["message"]
        assert error["param"] == "response_format"
    if "required" not in named:  # else nothing that is kept can be written
        assert takes(schema, breaking)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"items": "a"},
        {"enum": 3},
        {"type": [{}]},
        {"type": "nothing"},
        {"oneOf": [{"$ref": "#/a/b"}, {"$ref": "#/c"}]},
        {"properties": {str(number): {} for number in range(3000)}},
        {"description": "long" * 2**14},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_is_no_schema_is_refused(client: Client, schema: Json) -> None:
    assert client.error(**asking(schema))["param"] == "response_format"


def test_a_schema_wants_a_model_whose_answers_end() -> None:
    with serving(loaded_model()) as client:
        assert "no token that ends" in client.error(**asking(INTEGER))["message"]
