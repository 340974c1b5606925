"""Parsers that divide a model's answer into content, thoughts and tool calls."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from lade.models.loading import LoadedModel

Json = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as templates call them
_NAMED = {"name": "{name}", "arguments": "{content}"}
# A sample call; the chat template shows by it how calls are written.
_ARGUMENTS = {"lade_argument": "lade_value", "lade_other": "lade_more"}
_CALL: Json = {"name": "lade_function", "arguments": _ARGUMENTS}
_AS_JSON = re.compile(
    r'(.*?)lade_function(.*?)\{\s*"lade_argument"\s*:\s*"lade_value"\s*,'
    r'\s*"lade_other"\s*:\s*"lade_more"\s*\}(.*)',
    re.DOTALL,
)
_AS_TAGS = re.compile(
    r"(.*?)lade_function(.*?)(<[^<]*)lade_argument([^<]*)lade_value([^<]*<[^<]*)"
    r"\3lade_other\4lade_more\5(.*)",
    re.DOTALL,
)


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


def parser_of(loaded: LoadedModel, prefix: str, tools: list[Json] | None) -> Any:
    """Return a parser of the answer to a prompt; None if the model's answers are text alone."""
    template = _template_of(loaded)
    return template and ResponseParser(template, prefix=prefix, tools=tools)


def _template_of(loaded: LoadedModel) -> Json | None:
    template: Json | None = getattr(loaded.tokenizer, "response_template", None)
    kind = loaded.model.config.model_type
    known = [name for name in _TEMPLATES if kind.startswith(name)]
    if template is None and known:
        template = _TEMPLATES[max(known, key=len)]
    return template


class CallForm(NamedTuple):
    """How a model's answers call functions."""

    begin: str  # in front of the name
    middle: str  # between name and arguments
    #: The text before an argument's name, between name and value, and behind the value; None if
    #: the arguments are a JSON object.
    tags: tuple[str, str, str] | None
    end: str  # behind the arguments
    between: str | None  # between two calls; None if an answer has only one
    thoughts: tuple[str, str] | None  # marks around thoughts before a call; None without thoughts


def call_form_of(loaded: LoadedModel) -> CallForm | None:
    """Return the form of calls in the chat template; None if template or parser have none.

    Raises:
        Exception: the chat template refuses calls.
    """
    template = _template_of(loaded)
    if template is None:
        return None
    spec = load_response_template(template)
    call = {"type": "function", "function": _CALL}
    tool = {"type": "function", "function": {"name": _CALL["name"], "parameters": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    render = loaded.tokenizer.apply_chat_template
    text = render([{"role": "user", "content": "?"}, said], tools=[tool], tokenize=False)
    text, field = spec.truncate_past_last_anchor(text), spec.fields.get("tool_calls")
    begun = field and field.open_re and field.close_re and field.open_re.search(text)
    ended = begun and field.close_re.search(text, begun.end())
    if not ended:
        return None
    one, rest = text[begun.start() : ended.end()].lstrip(), text[ended.end() :]
    parser, found = ResponseParser(spec, prefix=""), _AS_JSON.fullmatch(one)
    found = found or _AS_TAGS.fullmatch(one)
    read = [*parts_of(parser.feed(one)), *parts_of(parser.finalize()[1])]
    said = {**_CALL, "arguments": json.dumps(_CALL["arguments"])}
    if found is None or read != [("tool_calls", said)]:
        return None
    thoughts = None
    for name in spec.fields.keys() & {*_THOUGHTS}:
        opens, closes = spec.fields[name].open_literals, spec.fields[name].close_literals
        if opens and closes and opens[0] in loaded.tokenizer.get_chat_template(tools=[tool]):
            thoughts = opens[0], closes[0]
    begin, middle, *tags, end = found.groups()
    between = rest.partition(one)[0] if one in rest else None
    return CallForm(
        begin, middle, (tags[0], tags[1], tags[2]) if tags else None, end, between, thoughts
    )


def leaves_thoughts_open(parser: ResponseParser) -> bool | None:
    """Return whether thoughts that a prompt begins have no end in it; None if it begins none."""
    found = [event for event in parser.initial_events if event.get("field") in _THOUGHTS]
    return found[-1]["type"] != "region_close" if found else None


def parts_of(events: Iterable[Json]) -> Iterator[tuple[str, Any]]:
    """Yield the texts and function calls of a parser's events, with their fields in an answer."""
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
