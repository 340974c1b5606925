"""What tells the parts of an answer: what is said, thought and called."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from lade.models.loading import LoadedModel
from lade.server.exchange import AnswerPiece

Json = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as templates call them
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}


def _template(start: str | list[str], calls: Json, ends: Json, thoughts: Json = _THINK) -> Json:
    """Return a response template, as tokenizers may bring one; blanks before a mark are its own."""
    fields = {
        "reasoning_content": thoughts,
        "tool_calls": {"repeats": True, **calls},
        "content": {"content": "text", **ends},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}


def _called(function: Any) -> Json:
    return {"transform": {"type": "function", "function": function}}


_NAMED = _called({"name": "{name}", "arguments": "{content}"})
_START = "<|im_start|>assistant\n"
_HERMES = _template(
    _START,
    {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json"}
    | _called("{content}"),
    {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
)
_XML = _template(
    _START,
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        **_NAMED,
    },
    {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
)
_GEMMA = _template(
    ["<|turn>model\n", "<tool_response|>"],
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        **_NAMED,
    },
    {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
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


def pieces_of(events: Iterable[Json]) -> Iterator[AnswerPiece]:
    """Yield what a parser has found."""
    for event in events:
        field = event.get("field")
        if event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield AnswerPiece("tool_call", text, function["name"])
        elif event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field == "content":
                yield AnswerPiece("content", event["text"])
            elif field in _THOUGHTS:
                yield AnswerPiece("reasoning_content", event["text"])
