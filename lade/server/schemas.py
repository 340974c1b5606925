"""Which JSON schemas are kept to the letter; all others are refused, by the keyword at fault.

xgrammar passes over what it cannot express. What it was seen to pass over is listed here, and a
test has it take a breaking instance of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from lade.server.errors import ApiError

_MAX_SCHEMAS, _MAX_DEPTH = 2_000, 32
# Keywords of JSON Schema that assert something that grammars do not.
_NOT_KEPT = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependencies"),
    *("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef", "$anchor"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
_FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer"),
}
# Those that apply to one type alone: without it, they are passed over.
_TYPES = {"string", "integer", "number", "boolean", "null", "array", "object"}
_NUMBERS = {"integer", "number"}
_OF_TYPES = {
    **{name: {"string"} for name in ("minLength", "maxLength", "pattern", "format")},
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBERS),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBERS),
}
_ASSERTIONS = {
    *(_OF_TYPES.keys() | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties", "items", "prefixItems"),
    *("minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
}
# Beside these, others are passed over.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    "unevaluatedItems",
)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that grammars would not keep to the letter.

    Raises:
        ApiError: it is too large, or a keyword is not kept; names where.
    """
    try:
        for number, (place, part) in enumerate(_parts(schema, "$", 0)):
            if number >= _MAX_SCHEMAS:
                raise refusal(f"expected at most {_MAX_SCHEMAS} schemas within one, got more")
            _check(place, part, schema)
    except (TypeError, AttributeError) as error:  # a keyword's value is of a wrong type
        raise refusal(f"expected a JSON schema, got one that is none: {error}"[:300]) from None


def _parts(schema: Any, place: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and all within it, with their places."""
    if depth > _MAX_DEPTH:
        raise refusal(f"expected schemas at most {_MAX_DEPTH} deep, got a deeper one")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise refusal(f"expected a schema at {place}, got {type(schema).__name__}")
    yield place, schema
    for name in _MAPS:
        for key, each in _of_kind(schema, name, dict, place).items():
            yield from _parts(each, f"{place}.{name}.{key}", depth + 1)
    for name in _LISTS:
        for number, each in enumerate(_of_kind(schema, name, list, place)):
            yield from _parts(each, f"{place}.{name}.{number}", depth + 1)
    for name in _SINGLE:
        if name in schema:
            yield from _parts(schema[name], f"{place}.{name}", depth + 1)


def _of_kind(schema: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    value = schema.get(name, kind())
    if not isinstance(value, kind):
        raise refusal(f"expected {name} at {place} to be a JSON {kind.__name__}")
    return value


def _check(place: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    def refuse(what: str) -> NoReturn:
        raise refusal(f"{what} at {place[:200]} is not supported: it would not be kept")

    for name in schema.keys() & _NOT_KEPT:
        refuse(name)
    if schema.get("uniqueItems"):
        refuse("uniqueItems")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        refuse(f"$ref to {str(reference)[:100]}")
    if len(schema.get("allOf", ())) > 1:
        refuse("allOf of several schemas")
    if "oneOf" in schema and not _are_disjoint([_resolved(each, root) for each in schema["oneOf"]]):
        refuse("oneOf of schemas that are not told apart by type or by a constant")
    asserted = schema.keys() & _ASSERTIONS
    for name in schema.keys() & set(_ALONE):
        is_value = name in ("enum", "const")
        others = asserted - {name} - ({"type"} if is_value else set())
        if others:
            refuse(f"{name} beside {min(others)}")
        values = schema[name] if name == "enum" else [schema[name]]
        if is_value and not all(_has_type(value, schema) for value in values):
            refuse(f"{name} of another type")
    types = _types_of(schema)
    for unknown in types - _TYPES:
        refuse(f"type {unknown[:50]!r}")
    for name in schema.keys() & _OF_TYPES.keys():
        if not types or not types & _OF_TYPES[name]:
            refuse(f"{name} without its type")
    lengths = schema.keys() & {"minLength", "maxLength"}
    if len(schema.keys() & {"pattern", "format"}) + bool(lengths) > 1:
        refuse("more than one of pattern, format and a length")
    if "format" in schema and schema["format"] not in _FORMATS:
        refuse(f"format {str(schema['format'])[:50]!r}")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            refuse(f"required {str(name)[:50]!r}, which is no property,")


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type", [])
    return {types} if isinstance(types, str) else {str(each) for each in types}


_KINDS: Mapping[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    types = _types_of(schema)
    return not types or bool(_KINDS[type(value)] & types)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a local reference leads to, or the schema itself."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return schema
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if found else None
    return found


def _are_disjoint(branches: Sequence[Any]) -> bool:
    """Return whether no value is of two schemas: by their types, or by a property's constant."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    types = [_types_of(branch) for branch in branches]
    widened = [each | ({"integer"} if "number" in each else set()) for each in types]
    if all(types) and sum(map(len, widened)) == len(set().union(*widened)):
        return True
    shared = set.intersection(*({*branch.get("required", ())} for branch in branches))
    for name in shared:
        tags = [_constants(branch.get("properties", {}).get(name)) for branch in branches]
        if all(tags) and sum(map(len, tags)) == len(set().union(*tags)):
            return True
    return False


def _constants(schema: Any) -> set[str]:
    """Return the texts that a schema allows, if these are few."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return {*values} if all(isinstance(value, str) for value in values) else set()


def refusal(message: str) -> ApiError:
    """Return what a client is told whose schema is not taken."""
    return ApiError(400, message, param="response_format")
