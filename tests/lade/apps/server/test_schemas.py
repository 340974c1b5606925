"""Schemas that are taken are kept to the letter; all others are refused."""

import json
from typing import Any

import pytest

from lade.models import LoadedModel
from tests.grids import thinned
from tests.lade.apps.server.client import Client, Json
from tests.lade.apps.server.hostile import schema_of
from tests.lade.apps.server.serving import loaded_model, serving, takes

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
    ({"type": "array", "items": INTEGER, "maxItems": 1}, "[1]", "[1, 2]"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1]", "[1, 2]"),
    ({"type": "string", "enum": ["a", "b"]}, '"a"', '"c"'),
    ({"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "T"}, "null", '"a"'),
    ({"allOf": [INTEGER]}, "1", '"a"'),
    ({"oneOf": [INTEGER, {"type": "string"}]}, "1", "null"),
    ({"oneOf": OF_KINDS}, '{"kind": "a"}', '{"kind": "b"}'),
    (
        {"$defs": {"x": OF_KINDS[0], "y": OF_KINDS[1]}}
        | {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}
        | {"discriminator": {"propertyName": "kind"}},
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
    ({"allOf": [INTEGER, {"enum": [1, 2]}]}, "1", "3"),
    ({"$defs": {"d": INTEGER}, "$ref": "#/$defs/d", "maximum": 3}, "3", "4"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"aaa"', '"a"'),
    ({"type": "string", "enum": ["a", 1]}, '"a"', "1"),
    ({**OBJECT, "anyOf": [{"required": ["b"]}]}, '{"b": 1}', '{"a": 1}'),
    ({"minimum": 3}, "3", "2"),
    ({**OBJECT, "required": ["z"]}, None, '{"a": 1}'),
]
# A schema, and what the error names.
NOT_KEPT: list[tuple[dict[str, Any], str]] = [
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    ({**INTEGER, "not": {"const": 3}}, "not"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**OBJECT, "maxProperties": 1}, "maxProperties"),
    ({**INTEGER, "if": {"const": 3}, "then": {"const": 4}}, '"if", "then"'),
    ({"$ref": "http://a.b/c"}, "http://a.b/c"),
    ({"type": "string", "format": "regex"}, "regex"),
    ({"%lark": "start: /a+/"}, "%lark"),
    ({"type": "string", "%lark": "start: /a+/"}, "%lark"),
    ({"anyOf": [INTEGER, {"%regex": "a+"}]}, "%regex"),
]


def asking(schema: Json) -> Json:
    return {**schema_of(schema), "max_tokens": 1}


def named(case: Any) -> str:
    return json.dumps(case[0])[:60]


@pytest.mark.parametrize("case", thinned(KEPT, *KEPT[1::4]), ids=named)
def test_what_is_taken_is_kept(
    loaded: LoadedModel, client: Client, case: tuple[Json, str | None, str]
) -> None:
    schema, instance, breaking = case
    assert client.text(**asking(schema))
    assert instance is None or takes(loaded, schema, instance)
    assert not takes(loaded, schema, breaking)


@pytest.mark.parametrize("case", thinned(NOT_KEPT, *NOT_KEPT[::2]), ids=named)
def test_what_would_not_be_kept_is_refused(client: Client, case: tuple[Json, str]) -> None:
    schema, told = case
    for outer in (
        schema,
        {"type": "array", "items": schema},
        {"type": "object", "properties": {"a": {"x-guidance": {"lenient": True}, **schema}}},
    ):
        error = client.error(**asking(outer))
        assert told in error["message"]
        assert error["param"] == "response_format"
    assert "x-guidance" in client.error(**asking({**schema, "x-guidance": {}}))["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"enum": 3},
        {"type": "nothing"},
        {"oneOf": [{"$ref": "#/a/b"}, {"$ref": "#/c"}]},
        {"description": "long" * 2**14},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_is_no_schema_is_refused(client: Client, schema: Json) -> None:
    assert client.error(**asking(schema))["param"] == "response_format"


def test_a_schema_wants_a_model_whose_answers_end() -> None:
    with serving(loaded_model()) as client:
        assert "no token that ends" in client.error(**asking(INTEGER))["message"]
