"""From messages to a prompt by the model's chat template, and from its tokens to what they say."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from lade.models.loading import LoadedModel
from lade.models.stream import TextStream
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


def told_to_template(messages: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """Yield messages as chat templates take them: texts whole, arguments of calls parsed.

    Raises:
        ValueError: arguments are no JSON.
    """
    for message in messages:
        content = " ".join(part["text"] for part in message.get("content") or ())
        told = {**message, "content": content}
        if calls := message.get("tool_calls"):
            told["tool_calls"] = [_with_arguments(call) for call in calls]
        yield told


def _with_arguments(call: Json) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": parsed}}


class TextReader:
    """Makes pieces of an answer of its tokens; without a parser all is said."""

    def __init__(
        self, tokenizer: Any, parser: ResponseParser | None, end_token_ids: Container[int]
    ) -> None:
        self._parser = parser
        # A parser sees special tokens, and knows an answer's end without that of its tokens.
        self._ends = () if parser is None else end_token_ids
        self._stream = TextStream(tokenizer, skips_special=parser is None)
        self._pending = ""  # text that no piece has told of
        self.num_chars = 0  # of the text up to now

    def begin(self) -> list[AnswerPiece]:
        """Return what the prompt has of the answer already."""
        return [] if self._parser is None else [*_pieces(self._parser.initial_events)]

    def feed(self, token_id: int) -> list[AnswerPiece]:
        """Return what is new with a token."""
        if token_id in self._ends:
            return []
        text = self._stream.put(token_id)
        self.num_chars += len(text)
        return self._read(text)

    def end(self) -> list[AnswerPiece]:
        """Return what is known at the end only."""
        return [*self._read(self._stream.end()), *self._read("", is_last=True)]

    def _read(self, text: str, *, is_last: bool = False) -> list[AnswerPiece]:
        parser = self._parser
        if parser is None:
            return [AnswerPiece("content", text)] if text else []
        self._pending += text
        try:
            pieces = [*_pieces(parser.finalize()[1] if is_last else parser.feed(text))]
        except (ValueError, RuntimeError, LookupError, TypeError):
            self._parser = None  # what looks like a call is none: it and the rest are text
            return self._read(self._pending)
        for piece in pieces:
            is_call = piece.kind == "tool_call"
            self._pending = "" if is_call else self._pending.partition(piece.text)[2]
        return pieces


def _pieces(events: Iterable[Json]) -> Iterator[AnswerPiece]:
    for event in events:
        field = event.get("field")
        if event["type"] == "region_close" and field == "tool_calls":
            yield _call(event["value"])
        elif event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field == "content":
                yield AnswerPiece("content", event["text"])
            elif field in _THOUGHTS:
                yield AnswerPiece("reasoning_content", event["text"])


def _call(value: Json) -> AnswerPiece:
    function = value["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return AnswerPiece("tool_call", text, function["name"])
