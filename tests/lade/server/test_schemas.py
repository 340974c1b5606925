"""Schemas that are taken are kept to the letter; all others are refused."""

import json
from typing import Any

import pytest

from lade.server.errors import ApiError
from lade.server.schemas import check_schema

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
    ({**OBJECT, "additionalProperties": False}, '{"a": 1}', '{"c": 1}'),
    ({"type": "object", "additionalProperties": INTEGER}, '{"b": 1}', '{"b": "x"}'),
    ({**OBJECT, "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"type": "array", "items": INTEGER, "minItems": 2}, "[1, 2]", "[1]"),
    ({"type": "array", "items": INTEGER, "maxItems": 1}, "[1]", "[1, 2]"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1]", "[1, 2]"),
    ({"enum": ["a", "b"]}, '"a"', '"c"'),
    ({"type": "string", "enum": ["a", "b"]}, '"a"', '"c"'),
    ({"const": True, "type": "boolean"}, "true", "false"),
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
    ({"type": "string", "format": "date"}, '"2020-01-01"', '"x"'),
    ({"type": "string", "format": "email"}, '"a@b.co"', '"x"'),
    ({"type": "string", "format": "uuid"}, None, '"x"'),
    ({"type": "string", "format": "date-time"}, '"2020-01-01T00:00:00Z"', '"x"'),
    ({"type": "integer", "minimum": 3, "maximum": 5}, "3", "2"),
    ({"type": "number", "exclusiveMaximum": 3}, "2.5", "3.0"),
    ({"type": "integer", "multipleOf": 3}, "3", "4"),
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
    ({"$ref": "http://a.b/c"}, '"a"', r"\$ref to http://a.b/c"),
    ({"$defs": {"d": INTEGER}, "$ref": "#/$defs/d", "maximum": 3}, "4", r"\$ref beside maximum"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"a"', "pattern, format and a length"),
    ({"type": "string", "format": "regex"}, '"["', "format 'regex'"),
    ({"type": "string", "enum": ["a", 1]}, "1", "enum of another type"),
    ({"type": "integer", "const": "a"}, '"a"', "const of another type"),
    ({**OBJECT, "anyOf": [{"required": ["b"]}]}, '{"a": 1}', "anyOf beside"),
    ({"minimum": 3}, "2", "minimum without its type"),
    ({**OBJECT, "required": ["z"]}, '{"a": 1}', "required 'z'"),
]


def takes(schema: dict[str, Any], instance: str) -> bool:
    """Return whether a grammar takes an instance."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return bool(_is_grammar_accept_string(grammar, instance))


@pytest.mark.parametrize("case", KEPT, ids=lambda case: json.dumps(case[0])[:60])
def test_what_is_taken_is_kept(case: tuple[dict[str, Any], str | None, str]) -> None:
    schema, instance, breaking = case
    check_schema(schema)
    assert instance is None or takes(schema, instance)
    assert not takes(schema, breaking)


@pytest.mark.parametrize("case", NOT_KEPT, ids=lambda case: json.dumps(case[0])[:60])
def test_what_would_not_be_kept_is_refused(case: tuple[dict[str, Any], str, str]) -> None:
    schema, breaking, named = case
    for place, outer in (
        (r"\$", schema),
        (r"\$.items", {"type": "array", "items": schema}),
        (r"\$.anyOf.1", {"anyOf": [{"type": "null"}, schema]}),
    ):
        with pytest.raises(ApiError, match=rf"{named}.* at {place} is not supported") as raised:
            check_schema(outer)
        assert (raised.value.status, raised.value.param) == (400, "response_format")
    if "required" not in named:  # else nothing that is kept can be written
        assert takes(schema, breaking)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"required": 5},
        {"items": "a"},
        {"anyOf": {}},
        {"enum": 3},
        {"type": [{}]},
        {"oneOf": [3, 4]},
        {"oneOf": [{"$ref": "#/a/b"}, {"$ref": "#/c"}]},
        {"properties": {str(number): {} for number in range(3000)}},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_is_no_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        check_schema(schema)
    assert raised.value.status == 400


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ApiError, match="32 deep"):
        check_schema(schema)
