"""Grammars of JSON schemas and tool calls; tokens that a grammar forces are drafted for free."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from lade.apps.server.checking import LIMITS, check
from lade.apps.server.errors import ApiError
from lade.compat import end_tokens
from lade.drafting.drafter import ForcedTokens
from lade.models.loading import LoadedModel
from lade.models.responses import CallForm

_MAX_CHARS = 2**16
# Keywords that llguidance silently leaves out of schemas.
_FOREIGN = {"%lark", "%json", "%regex"}
# No free whitespace, with which a model may fill its whole answer.
_NAME = re.compile(r"[\w.-]+")
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords that no value depends on, and those of an object whose parameters stand side by side.
_NOTES = {"title", "description", "default", "examples"}
_OF_CALLS = {"type", "properties", "required", "additionalProperties", "$defs", *_NOTES}


class Grammars:
    """Makes grammars of schemas. Its methods may be called from threads."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._ends = [*end_tokens(loaded.model.generation_config)]

    def made(self, schema: Mapping[str, Any], tenant: str = "") -> llguidance.LLMatcher:
        """Return the grammar of a JSON schema, in its first state.

        Args:
            schema: of the answer.
            tenant: who asks, for others it takes as long as if nobody had asked before; "" for
                somebody who shares nothing, not even with requests of its own.

        Raises:
            ApiError: it is too long or takes too much, or is not one that grammars keep.
        """
        text, make = _text_of(schema), llguidance.LLMatcher.grammar_from_json_schema
        return self._checked(lambda _: make(text, overrides=_FORM), tenant)

    def of_calls(
        self,
        form: CallForm,
        functions: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None = None,
        tenant: str = "",
        *,
        is_thinking: bool = False,
    ) -> llguidance.LLMatcher:
        """Return the grammar of tool calls, in its first state; thoughts may come before.

        Args:
            form: the form in which the model writes calls.
            functions: names and parameters (JSON schemas) of the functions.
            schema: of the answer in place of calls; None if there is to be a call.
            tenant: as for `made`.
            is_thinking: whether the prompt ends within thoughts.

        Raises:
            ApiError: as for `made`.
        """
        texts: dict[str, str] = {}
        for each in functions:
            given = each.get("parameters") or {"additionalProperties": False}
            is_object = isinstance(given, dict) and given.get("type", "object") == "object"
            if not (is_object and _NAME.fullmatch(each["name"])):
                raise refusal("expected functions with plain names and objects as parameters")
            given = {"type": "object", **given}
            if form.tags is None:
                texts[each["name"]] = f"%json {_text_of(given, _FORM)}"
            else:
                self.made(given, tenant)  # raises for a schema that is none
                texts[each["name"]] = _tagged(form.tags, given)
        answer = None if schema is None else f"%json {_text_of(schema, _FORM)}"
        if sum(map(len, (*texts.values(), answer or ""))) > _MAX_CHARS:
            raise refusal(f"expected schemas of at most {_MAX_CHARS} characters together")
        return self._checked(partial(_lark, form, texts, answer, is_thinking), tenant)

    def _checked(
        self, write: Callable[[Mapping[str, int]], str], tenant: str
    ) -> llguidance.LLMatcher:
        """Return the grammar that `write` makes for the special tokens of the tokenizer."""
        if not self._ends:
            raise refusal("expected no schema, for the model has no token that ends an answer")
        try:  # by bytes alone, where no token is special
            (check if tenant else check.__wrapped__)(write({}), tenant)
        except ValueError as error:  # one that is too deep is not even read
            raise refusal(f"expected a JSON schema that can be kept: {error}"[:300]) from None
        grammar = write(self._specials)
        return llguidance.LLMatcher(self.tokens, grammar, log_level=0, limits=LIMITS)

    @cached_property
    def _specials(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self._loaded.tokenizer.added_tokens_decoder
        return {added[each].content: each for each in added if self.tokens.is_special_token(each)}

    @cached_property
    def tokens(self) -> llguidance.LLTokenizer:
        """The tokenizer of llguidance, which knows the bytes of every token."""
        model, tokenizer, _ = self._loaded
        size = model.config.get_text_config(decoder=True).vocab_size
        ends: Any = self._ends or None
        return llguidance.hf.from_tokenizer(tokenizer, size, ends)


class GrammarProcessor(LogitsProcessor, ForcedTokens):  # type: ignore[misc]
    """Logits processor that makes one answer keep its grammar; it advances the grammar."""

    def __init__(self, grammar: llguidance.LLMatcher, num_prompt_tokens: int) -> None:
        self._grammar = grammar
        self._num_seen = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the tokens that the grammar forbids; called once for each emitted token."""
        self._grammar.consume_tokens(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        bits = np.frombuffer(self._grammar.compute_bitmask(), np.uint8)
        if self._grammar.is_error():
            raise refusal(f"the answer's schema takes too much: {self._grammar.get_error()}"[:300])
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        allowed = allowed[: scores.shape[-1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        """Return the forced tokens, as most tokenizers would write them."""
        ahead = self._grammar.deep_copy()
        ahead.consume_tokens([*committed[self._num_seen :]])
        return ahead.compute_ff_tokens()[:max_tokens]


def _lark(
    form: CallForm,
    texts: Mapping[str, str],
    answer: str | None,
    is_thinking: bool,
    specials: Mapping[str, int],
) -> str:
    """Write a grammar of calls, or else of an answer.

    Texts are the expressions of functions' arguments, by name.
    """
    longest = sorted(map(re.escape, specials), key=len, reverse=True)

    def said(text: str) -> str:
        parts = re.split(f"({'|'.join(longest)})", text) if longest else [text]
        return " ".join(
            f"<[{specials[part]}]>" if part in specials else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    calls = (
        f"{said(form.begin + name + form.middle)} {text} {said(form.end)}"
        for name, text in texts.items()
    )
    rules = ["call: " + " | ".join(calls)]
    if form.tags is not None:  # a parser must find no other end in a text
        marks = (r"\s*".join(map(re.escape, each.split())) for each in (form.tags[2], form.end))
        inside = "|".join(marks).replace("/", r"\/")
        rules.append(
            f"text[suffix={json.dumps(form.tags[2])}]: "
            rf"/(.|\n)*/ & ~/(.|\n)*({inside})(.|\n)*/"
        )
    more = "" if form.between is None else f" ({said(form.between)} call)*"
    thought = ""
    if form.thoughts is not None:
        opening, closing = map(said, form.thoughts)
        any_text, blank = r"/(.|\n)*/", r"/\s{0,4}/"
        is_text = closing.startswith('"')  # a quote must not end thoughts
        rules.append(
            f"rest[suffix={closing}]: {any_text}" if is_text else f"rest: {any_text} {closing}"
        )
        thought = f"rest {blank} " if is_thinking else f"({opening} rest {blank})? "
    if answer is not None:
        rules.append(f"answer: {answer}")
    said_then = f"call{more}" if answer is None else f"(call{more} | answer)"
    return "\n".join([f"start: {thought}{said_then}", *rules])


def _tagged(tags: tuple[str, str, str], schema: Mapping[str, Any]) -> str:
    """Write the expression of arguments, each in its tags, in the order of a valid schema.

    Raises:
        ApiError: a parser might not read the arguments as the schema has them.
    """
    before, middle, behind = tags
    known = {"$defs": schema.get("$defs") or {}}
    properties, required = schema.get("properties") or {}, {*schema.get("required", ())}
    if not (schema.keys() <= _OF_CALLS and required <= properties.keys()):
        raise refusal("expected parameters that depend on no others")
    arguments = []
    for name, each in properties.items():
        parts = _NAME.fullmatch(name) and _values(each, known, json.dumps(behind))
        if not parts:
            raise refusal(f"expected a plain parameter of one type, got {name!r}")
        argument = f"{json.dumps(before + name + middle)} ({' | '.join(parts)})"
        arguments.append(argument if name in required else f"({argument})?")
    return " ".join(arguments)


def _values(schema: Any, known: Mapping[str, Any], behind: str) -> list[str]:
    """Return the expressions of an argument and its end; none if a parser may mistake its type."""
    choices = [schema]
    if isinstance(schema, dict) and "anyOf" in schema and schema.keys() <= {"anyOf", *_NOTES}:
        choices = schema["anyOf"]
    kinds = [each.get("type") if isinstance(each, dict) else None for each in choices]
    if "string" in kinds and not all(kind in ("string", "null") for kind in kinds):
        return []
    values: list[str] = []
    for each, kind in zip(choices, kinds, strict=True):
        if isinstance(kind, str) and kind != "string":
            values.append(f"%json {_text_of({**each, **known}, _FORM)} {behind}")
        elif kind == "string" and each.keys() <= {"type", *_NOTES}:
            values.append("text")
        elif kind == "string" and each.keys() <= {"type", "enum", *_NOTES}:
            texts = [text for text in each["enum"] if isinstance(text, str)]
            values += [f"{json.dumps(text)} {behind}" for text in texts if text == text.strip()]
        else:
            return []
    return values


def _text_of(schema: Mapping[str, Any], form: Any = None) -> str:
    """Return a JSON schema as text, with llguidance's options for whitespace if given."""
    if "x-guidance" in schema:  # it would loosen the grammar
        raise refusal("expected a schema without x-guidance")
    text = json.dumps(json.loads(json.dumps(schema), object_hook=_read))
    if len(text) > _MAX_CHARS:
        raise refusal(f"expected a schema of at most {_MAX_CHARS} characters, got {len(text)}")
    return text if form is None else f'{{"x-guidance": {json.dumps(form)}, {text[1:]}'


def _read(part: dict[str, Any]) -> dict[str, Any]:
    """Replace the `oneOf` of a tagged union by `anyOf`, as its parts exclude each other.

    A grammar does not find that out where they are references.

    Raises:
        ApiError: it has another grammar in it, which would not be kept.
    """
    if foreign := _FOREIGN & part.keys():
        raise refusal(f"expected a schema without {min(foreign)}")
    if isinstance(part.get("oneOf"), list) and "discriminator" in part and "anyOf" not in part:
        part["anyOf"] = part.pop("oneOf")
    return part


def refusal(message: str) -> ApiError:
    """Return the error for a refused schema."""
    return ApiError(400, message, param="response_format")
