"""Requests and their fields; an unknown field, at any depth, is refused by name or left out."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from lade.apps.server.errors import ApiError

Json = dict[str, Any]
# JSON values of a request: a conversation of a thousand turns has some thousands.
_MAX_VALUES = 50_000
MOST_ANSWERS = 64  # to one request
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def wrong(param: str | None, message: str) -> ApiError:
    """Return the error for an invalid field."""
    text = message if param is None else f"{param}: {message}"
    return ApiError(400, text, param=param, code="unsupported_or_invalid")


_LOWEST_TEMPERATURE = 1e-4  # below it, scores may overflow float32
_Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)
]
_Name = Annotated[str, Field(max_length=256)]
_unless_open = BeforeValidator(lambda value: None if value == -1 else value)
_Length = Annotated[int | None, Field(ge=1), _unless_open]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel, extra="allow", strict=True, allow_inf_nan=False, cache_strings="none"):
    """An object; `read` looks at its fields that are not declared."""

    #: OpenAI's and Anthropic's fields that change no text; a header of the answer names them.
    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Leave out fields that are null, which some clients send for all fields they know."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class _TextPart(_Strict):
    without_effect = frozenset({"cache_control", "prompt_cache_breakpoint"})
    type: Literal["text", "input_text", "output_text"]
    text: str


def _listed(part: Callable[[str], Any]) -> BeforeValidator:
    """Turn a text into a list, so that errors name a place in a list and no union of types."""
    return BeforeValidator(lambda value: [part(value)] if isinstance(value, str) else value)


_Content = Annotated[
    list[_TextPart], Field(fail_fast=True), _listed(lambda text: {"type": "text", "text": text})
]
_Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16), _listed(str)
]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = dict[Annotated[int, Field(ge=0, strict=False)], _Bias]


class Message(_Strict):
    """A message; the chat template may read fields that are not declared."""

    without_effect = frozenset({"cache_control", "name"})
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content | None = None
    tool_calls: Annotated[list[Json], Field(fail_fast=True)] | None = None

    def as_template_input(self) -> Json:
        """Return the message as chat templates take it: text as one string, no empty fields."""
        text = " ".join(part.text for part in self.content or ())
        fields = self.model_dump(exclude_unset=True)
        return {name: value for name, value in fields.items() if value} | {"content": text}


class _Prediction(_Strict):
    type: Literal["content"]
    content: _Content


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Schema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json, Field(alias="schema")]
    strict: bool | None = None


class _Format(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None  # llama.cpp's, for json_object


class _Function(_Strict):
    name: str


class _Choice(_Strict):
    type: Literal["none", "auto", "required", "function"]
    function: _Function | None = None


_as_choice = BeforeValidator(lambda how: {"type": how} if isinstance(how, str) else how)


class _Moderation(_Strict):
    model: str  # without a policy, nothing is to be blocked


class Asked(_Strict):
    """Fields of both endpoints."""

    without_effect = frozenset(
        {
            *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "reasoning_effort", "safety_identifier"),
            *("service_tier", "store", "verbosity"),
        }
    )
    is_chat: ClassVar[bool]
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Length = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stops | None = None
    logit_bias: Annotated[_Biases, Field(max_length=1024)] | None = None
    user: _Name | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    moderation: _Moderation | None = None
    # vLLM's and transformers'.
    cache_salt: _Name | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1 for all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    # lade's: whether to draft, and from which corpora.
    speculation: bool | None = None
    pools: Annotated[list[_Name], Field(max_length=8)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "expected it with stream only")
        if self.temperature and self.temperature < _LOWEST_TEMPERATURE:
            raise wrong("temperature", f"expected 0 or at least {_LOWEST_TEMPERATURE}")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token; None for no log-probabilities."""
        asked: bool | int | None = getattr(self, "logprobs", None)
        if not isinstance(asked, bool):
            return asked
        return getattr(self, "top_logprobs", None) or 0 if asked else None


class Chat(Asked):
    """A request for the next message of a conversation."""

    is_chat = True
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: _Length = None
    prediction: _Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Annotated[_Choice | None, _as_choice] = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    response_format: _Format | None = None
    chat_template_kwargs: Json | None = None
    # vLLM's and transformers': whether to continue the last message.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for index, tool in enumerate(self.tools or ()):
            _check_function(tool, f"tools.{index}")
        for index, each in enumerate(self.messages):
            for number, call in enumerate(each.tool_calls or ()):
                where = f"messages.{index}.tool_calls.{number}"
                _check_function(call, where)
                call["function"]["arguments"] = _arguments_of(call, f"{where}.function.arguments")
        choice = self.tool_choice
        if choice is not None and (choice.type == "function") != (choice.function is not None):
            raise wrong("tool_choice", "expected function with the type function alone")
        if choice is not None and choice.type == "none":
            self.tools = None
        if self.tools_forced == []:
            raise wrong("tool_choice", "expected one of tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "expected it with logprobs only")
        form = self.response_format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            raise wrong("response_format", "expected json_schema with the type json_schema alone")
        if form is not None and form.schema_ is not None and form.type != "json_object":
            raise wrong("response_format", "expected schema with the type json_object alone")
        if self.continue_final_message and self.add_generation_prompt:
            message = "expected no add_generation_prompt beside it"
            raise wrong("continue_final_message", message)
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise wrong("add_generation_prompt", "expected true, or continue_final_message")
        for name in sorted((self.chat_template_kwargs or {}).keys() & _NOT_OF_TEMPLATES):
            message = f"expected arguments of the chat template, got {name!r}"
            raise wrong("chat_template_kwargs", message)
        return self

    @property
    def tools_forced(self) -> list[Json] | None:
        """The tools, if one of them must be called."""
        choice = self.tool_choice
        if choice is None or choice.type in ("none", "auto"):
            return None
        name = choice.function and choice.function.name
        found = [tool["function"] for tool in self.tools or ()]
        return [function for function in found if name in (None, function["name"])]

    @property
    def calls_once(self) -> bool:
        """Whether the answer ends with its first tool call."""
        is_named = self.tool_choice is not None and self.tool_choice.type == "function"
        return bool(self.tools) and (is_named or self.parallel_tool_calls is False)

    @property
    def schema_asked(self) -> Json | None:
        """The JSON schema of the answer."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return form.json_schema.schema_ if form.json_schema else form.schema_ or {"type": "object"}


class Completion(Asked):
    """A request to continue texts."""

    is_chat = False
    prompt: Annotated[
        list[_Tokens | str],
        Field(min_length=1, max_length=MOST_ANSWERS, fail_fast=True),
        BeforeValidator(lambda value: value if _are_several(value) else [value]),
    ]
    max_tokens: Annotated[int | None, Field(ge=0), _unless_open] = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Literal[1] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "expected at least 1, or echo")
        if len(self.prompt) * (self.n or 1) > MOST_ANSWERS:
            raise wrong("n", f"expected at most {MOST_ANSWERS} answers to all prompts together")
        return self


def _are_several(prompt: Any) -> bool:
    """Return whether a value is a list of prompts, and not one prompt of token ids."""
    return isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))


# Arguments of `apply_chat_template` itself, and the template's name for the messages.
_NOT_OF_TEMPLATES = {
    *signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    "messages",
}


def _check_function(part: Json, where: str) -> None:
    function = part.get("function")
    if part.get("type", "function") != "function":
        raise wrong(f"{where}.type", "expected 'function'")
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise wrong(f"{where}.function", "expected a function with a name")


def _arguments_of(call: Json, where: str) -> Json:
    found = call["function"].get("arguments")
    if isinstance(found, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
    if not isinstance(found, dict):
        raise wrong(where, "expected a JSON object, {} for none")
    return found


def read(
    kind: type[Asked], data: bytes | bytearray, model: str, *, ignores_unknown: bool = False
) -> tuple[Asked, list[str]]:
    """Read a request, as JSON, in time that is bounded by the number of its bytes.

    Args:
        kind: of request.
        data: its body.
        model: that is served.
        ignores_unknown: whether unknown fields are left out; else they are refused.

    Returns:
        The request, and the names of its fields that have no effect.

    Raises:
        ApiError: it is not JSON, or a field is unknown, of a wrong type or not supported.
    """
    # Parsing holds the GIL until it ends, so the values are counted before.
    if sum(map(_STRINGS.sub(b"", data).count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ApiError(400, f"expected at most {_MAX_VALUES} values in a request, got more")
    try:
        asked = kind.model_validate_json(data)  # at most 200 deep
    except (
        ValidationError
    ) as error:  # its first error in OpenAI's form, without values of the request
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))[:200] or None
        raise wrong(param, first["msg"][:300]) from None
    useless = [*_taken_out(asked)]
    for place, is_known in useless:
        if not (is_known or ignores_unknown):
            raise wrong(place[:200], "not supported")
    if asked.model not in (None, model):
        message = f"expected the model {model!r}, got {asked.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return asked, sorted(place for place, _ in useless)


def _taken_out(part: Any, place: str = "") -> Iterator[tuple[str, bool]]:
    """Take out fields without effect, at any depth; yield their places, and if they are known."""
    if isinstance(part, list):
        for index, each in enumerate(part):
            yield from _taken_out(each, f"{place}{index}.")
    elif isinstance(part, _Strict):
        others = part.model_extra or {}
        is_templates = isinstance(part, Message)  # the chat template decides about its fields
        for name, value in [*part]:
            is_known = name in part.without_effect
            if (value if is_known else name in others) and not is_templates:
                yield f"{place}{name}", is_known
            yield from _taken_out(value, f"{place}{name}.")
        if not is_templates:
            others.clear()
