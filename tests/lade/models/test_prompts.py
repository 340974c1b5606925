"""Calls of tools are those that the chat template writes."""

from typing import Any

import pytest

from lade.models import tool_calls
from tests.lade.tiny import byte_tokenizer

TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>\
{%- endfor %}{% endfor %}"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"name": "now"},
]


def test_tool_calls_are_written_by_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert tool_calls(tokenizer, TOOLS) == (
        '<assistant><call>{"name": "weather", "arguments": {"city": ""}}</call>'
        '<assistant><call>{"name": "now", "arguments": {}}</call>'
    )
    assert tool_calls(tokenizer, []) == ""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "refuses a tool call"),
        ("{{ raise_exception('no tools') }}", "refuses a tool call"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "writes tool calls, got one without",
        ),
    ],
)
def test_templates_without_tool_calls_are_named(template: str | None, said: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said):
        tool_calls(tokenizer, TOOLS)
