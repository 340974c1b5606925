"""Bodies and headers made to take much of a server that looks at them before it refuses them."""

from collections.abc import Callable
from typing import Any


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the field that asks for an answer of a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of arrays in arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


#: By what they have; each makes what is to be added to a chat.
BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "a schema 880 deep": lambda: schema_of(nested(880)),
    "a multiple of many": lambda: schema_of({"type": "integer", "multipleOf": 999_983}),
    "900 patterns at once": lambda: schema_of(
        {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(900)]}
    ),
    "2,000 properties": lambda: schema_of(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
    ),
    "a million messages": lambda: {"messages": [1] * 1_000_000},
    "many messages": lambda: {"messages": [1] * 40_000},
    "many biases": lambda: {"logit_bias": dict.fromkeys(map(str, range(40_000)), "a")},
    "a prompt of 4 MB": lambda: {"messages": [{"role": "user", "content": "a-b" * 1_300_000}]},
    "tools of 4 MB": lambda: {"tools": [{"function": {"name": "a-b" * 1_300_000}}]},
    "many commas": lambda: {"messages": [{"role": "user", "content": "a," * 1_900_000}]},
    "deep JSON": lambda: {"chat_template_kwargs": {"a": nested(900)}},
    "5,000 digits": lambda: {"logit_bias": {"1" * 5_000: 1}},
    "a temperature of nearly 0": lambda: {"temperature": 1e-45},
}

_BEGIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
#: Headers without an end, by what they have.
FLOODS = {
    "many headers": _BEGIN + b"a: b\r\n" * 20_000,
    "a long header": _BEGIN + b"a: " + b"b" * 120_000,
    "a long path": b"GET /" + b"a" * 120_000,
}
