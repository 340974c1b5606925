"""What tells the parts of an answer: what is said, thought and called."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from lade.models.loading import LoadedModel

Json = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as templates call them
_NAMED = {"name": "{name}", "arguments": "{content}"}


def _template(start: str | list[str], thoughts: Json, calls: Json, ends: Json) -> Json:
    """Return a response template, as tokenizers may bring one; blanks before a mark are its own."""
    call = {"type": "function", "function": calls.pop("function", _NAMED)}
    fields = {
        "reasoning_content": {"content": "text", **thoughts},
        "tool_calls": {"repeats": True, "transform": call, **calls},
        "content": {"content": "text", **ends},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}


def _qwen(**calls: Any) -> Json:
    ends = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
    thoughts = {"open": "<think>", "close": "</think>"}
    return _template("<|im_start|>assistant\n", thoughts, calls, ends)


_HERMES = _qwen(
    open_pattern=r"\s*<tool_call>", close="</tool_call>", content="json", function="{content}"
)
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
_XML = _qwen(
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": _PARAMETER},
)
_GEMMA = _template(
    ["<|turn>model\n", "<tool_response|>"],
    {"open": "<|channel>thought\n", "close": "<channel|>"},
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    },
    {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
)
# Of models whose tokenizers bring none, by the beginning of their type; the longest counts.
_TEMPLATES = {"qwen2": _HERMES, "qwen3": _HERMES, "qwen3_5": _XML, "gemma4": _GEMMA}


def template_of(loaded: LoadedModel) -> Json | None:
    """Return what tells the parts of a model's answers; None where they are text alone."""
    own: Json | None = getattr(loaded.tokenizer, "response_template", None)
    if own is not None:
        return own
    kind = loaded.model.config.model_type
    known = [name for name in _TEMPLATES if kind.startswith(name)]
    return _TEMPLATES[max(known, key=len)] if known else None


def parts_of(events: Iterable[Json]) -> Iterator[tuple[str, Any]]:
    """Yield what a parser has found: texts and called functions by their fields in an answer."""
    for event in events:
        field = event.get("field")
        if event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield field, {"name": function["name"], "arguments": text}
        elif event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field == "content":
                yield field, event["text"]
            elif field in _THOUGHTS:
                yield "reasoning_content", event["text"]
