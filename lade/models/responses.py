"""`AnswerParser`: divides a model's answer into content, thoughts and tool calls."""

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from lade.models.loading import LoadedModel

Json = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as templates call them
# Fields of an answer that are text, by the templates' names.
_TEXTS = {"content": "content", **dict.fromkeys(_THOUGHTS, "reasoning_content")}
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


class AnswerParser:
    """Divides the text of one answer, as it comes; what is no call after all is content.

    Args:
        template: the response template.
        prompt: of the answer; it may end within thoughts, content or a call.
        tools: JSON schemas of the functions that may be called.

    Attributes:
        is_thinking: whether the prompt ends within thoughts; None if it has none.
        marks: has all special tokens that the parser must see; others are no text.
    """

    def __init__(self, template: Json, prompt: str = "", tools: list[Json] | None = None) -> None:
        spec = load_response_template(template)
        self._parser: ResponseParser | None = ResponseParser(spec, prefix=prompt, tools=tools)
        self.marks = str(template["fields"]).replace("\\", "")
        self._fields, events = spec.fields, self._parser.initial_events
        # The text that no part covers yet, which begins with the prompt's, and how much of the text
        # was divided: a call becomes a part only when it is whole.
        self._text = spec.truncate_past_last_anchor(prompt)
        self._num_of_prompt, self._num_divided = len(self._text), 0
        self._is_calling = self._is_behind_mark = False
        self._divided(events)
        self._is_behind_mark = False  # of the answer's own
        thoughts = [event["type"] for event in events if event["field"] in _THOUGHTS]
        self.is_thinking = thoughts[-1] != "region_close" if thoughts else None

    def feed(self, text: str, *, is_last: bool = False) -> list[tuple[str, Any]]:
        """Take the next text; return new texts and whole calls, with their fields in an answer."""
        self._text += text
        if self._parser is not None:
            try:
                events = self._parser.feed(text)
                events += self._parser.finalize()[1] if is_last else []
                return self._divided(events)
            except (ValueError, RuntimeError, LookupError, TypeError):
                self._parser = None  # no tool call after all: this and the rest are content
        rest, self._text, self._num_of_prompt = self._text[self._num_of_prompt :], "", 0
        return [("content", rest)] if rest else []

    def _divided(self, events: Iterable[Json]) -> list[tuple[str, Any]]:
        parts: list[tuple[str, Any]] = []
        begin = 0 if self._is_calling else None  # of a call that has no end yet
        for event in events:
            name, kind, at = event["field"], event["type"], self._num_divided
            if kind == "region_chunk":
                at = self._text.index(event["text"], at)
                self._num_divided = at + len(event["text"])
                text = event["text"][max(0, self._num_of_prompt - at) :]
                text = text.lstrip() if self._is_behind_mark else text
                if text and name in _TEXTS and not event["dirty"]:
                    parts.append((_TEXTS[name], text))
                    self._is_behind_mark = False
                continue
            is_open, field = kind == "region_open", self._fields[name]
            mark = field.open_re if is_open else field.close_re
            found = mark and (mark.search if is_open else mark.match)(self._text, at)
            self._num_divided = found.end() if found else at
            self._is_behind_mark |= name in _THOUGHTS  # templates write blanks there
            if name == "tool_calls":
                begin = at if is_open else None
                parts += [] if is_open else [(name, _function_of(event["value"]))]
        done = self._num_divided if begin is None else begin
        self._text, self._num_divided = self._text[done:], self._num_divided - done
        self._num_of_prompt = max(0, self._num_of_prompt - done)
        self._is_calling = begin is not None
        return parts


def _function_of(call: Json) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"name": function["name"], "arguments": text}


def parser_of(loaded: LoadedModel, prompt: str, tools: list[Json] | None) -> AnswerParser | None:
    """Return a parser of the answer to a prompt; None if the model's answers are text alone."""
    template = _template_of(loaded)
    return None if template is None else AnswerParser(template, prompt, tools)


def _template_of(loaded: LoadedModel) -> Json | None:
    """Return the tokenizer's response template, else what transformers knows of its type."""
    kind = loaded.model.config.model_type.removesuffix("_text")  # of models that also see images
    of_kind = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    template: Json | None = get_response_template(loaded.tokenizer, of_kind)
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
    found = _AS_JSON.fullmatch(one) or _AS_TAGS.fullmatch(one)
    read = AnswerParser(template).feed(one, is_last=True)
    if found is None or read != [("tool_calls", _function_of(call))]:
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
