"""What may be asked: every field is understood or refused by name.

Fields that transformers' handlers know are passed on to them, the rest is ours.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from lade.server.errors import ApiError
from lade.server.exchange import Asked, Endpoint
from lade.server.grammars import Grammars

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}
Json = dict[str, Any]
# Of a request: a conversation of a thousand turns has some thousands.
_MAX_VALUES, _MAX_DEPTH = 50_000, 64
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAX_STOPS = 4
_MAX_BIASES = 1024
_MAX_POOLS = 8  # each of which every draft looks into
_MAX_TOP_LOGPROBS = 20
_MAX_COMPLETION_LOGPROBS = 5


def _only(supported: Any) -> AfterValidator:
    def check(value: Any) -> Any:
        if value != supported:
            raise ValueError(f"nothing but {json.dumps(supported)} is supported")
        return value

    return AfterValidator(check)


# Fields of OpenAI's that are accepted where they ask for what is done anyway.
_Zero = Annotated[float, _only(0)] | None
_One = Annotated[int, _only(1)] | None
_False = Annotated[bool, _only(False)] | None
_True = Annotated[bool, _only(True)] | None
_Nothing = (
    Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)]
)
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
# Below these, scores divided by them may exceed what float32 holds.
_LOWEST_TEMPERATURE, _LOWEST_PENALTY, _HIGHEST_PENALTY = 1e-4, 0.01, 100.0
_Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Name = Annotated[str, Field(max_length=256)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _finite_temperature(value: float) -> float:
    if not (value == 0 or value >= _LOWEST_TEMPERATURE):
        raise ValueError(f"expected 0 or at least {_LOWEST_TEMPERATURE}")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _TextPart(_Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(_Loose):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(_Loose):
    function: _Function


class _Message(_Loose):
    role: _Role
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] | None = None


class _Prediction(_Strict):
    """What the answer will probably be."""

    type: Literal["content"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)]

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class _Obfuscation(_Strict):
    include_obfuscation: bool | None = None


class _StreamOptions(_Obfuscation):
    include_usage: bool | None = None


class _Schema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class _Format(_Strict):
    """`response_format` of chats: the schema is in an object of its own."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "_Format":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with the type json_schema alone")
        return self

    @property
    def schema_(self) -> dict[str, Any] | None:
        return None if self.json_schema is None else self.json_schema.schema_


class _FlatFormat(_Strict):
    """`text.format` of responses: the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "_FlatFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("expected schema with the type json_schema alone")
        return self


class _Text(_Strict):
    format: _FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class _Any(_Strict):
    """What all endpoints take."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(le=2), AfterValidator(_finite_temperature)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: _Int64 | None = None
    user: _Name | None = None
    # Ours: whether anything is drafted, how much a step verifies at most, and from which corpora.
    speculation: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    pools: Annotated[list[_Name], Field(max_length=_MAX_POOLS)] | None = None
    # Of vLLM and transformers.
    cache_salt: _Name | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=_LOWEST_PENALTY, le=_HIGHEST_PENALTY)] | None = (
        None
    )


class _Sampled(_Any):
    """What the two older endpoints take."""

    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] | None = None
    n: _One = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    frequency_penalty: _Zero = None
    presence_penalty: _Zero = None


class _Chat(_Sampled):
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    prediction: _Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None
    response_format: _Format | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: _True = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    metadata: _Nothing | None = None
    store: _False = None
    service_tier: Literal["auto", "default"] | None = None


class _Completion(_Sampled):
    prompt: str
    logprobs: Annotated[int, Field(ge=0, le=_MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: _One = None
    echo: _False = None


class _ItemPart(_TextPart):
    annotations: _Nothing | None = None
    logprobs: _Nothing | None = None


class _Item(_Strict):
    """What an earlier answer was made of comes back with these."""

    id: str | None = None
    status: str | None = None


class _ItemMessage(_Item):
    type: Literal["message"] | None = None
    role: _Role
    content: str | Annotated[list[_ItemPart], Field(fail_fast=True)]


class _ItemCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _ItemOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class _Thought(_Strict):
    type: Literal["reasoning_text"]
    text: str


class _ItemReasoning(_Item):
    type: Literal["reasoning"]
    content: Annotated[list[_Thought], Field(fail_fast=True)] | None = None
    summary: _Nothing | None = None


_Items = Annotated[
    list[_ItemMessage | _ItemCall | _ItemOutput | _ItemReasoning],
    Field(min_length=1, fail_fast=True),
]


class _Response(_Any):
    input: str | Annotated[list[_TextPart], Field(min_length=1, fail_fast=True)] | _Items
    instructions: str | None = None
    stream_options: _Obfuscation | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: _Text | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: _Nothing | None = None
    include: _Nothing | None = None
    store: _False = None
    background: _False = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None


class _Corpus(_Strict):
    text: str | Annotated[list[str], Field(fail_fast=True)]


_MODELS: Mapping[Endpoint, type[_Any]] = {
    "chat": _Chat,
    "completions": _Completion,
    "responses": _Response,
}
# What transformers' handlers get of a request, and understand as we do.
_PASSED_ON = {
    *("model", "messages", "prompt", "input", "instructions", "stream", "tools", "logit_bias"),
    *("chat_template_kwargs", "parallel_tool_calls"),
}
# Arguments of `apply_chat_template` that are not the template's.
_NOT_OF_TEMPLATES = {
    *("add_generation_prompt", "continue_final_message", "conversation", "documents"),
    *("chat_template", "load_audio_from_video", "max_length", "padding", "processor_kwargs"),
    *("return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize"),
    *("tokenizer_kwargs", "tools", "truncation", "num_frames"),
}


class ReadRequest(NamedTuple):
    """A valid request."""

    asked: Asked
    schema: str | None  # that the answer is to keep, as JSON
    body: Json  # for transformers' handler


class Reader:
    """Reads requests to one model.

    Args:
        name: of the model, as clients call it.
        vocab_size: of the model.
        grammars: of the schemas in them.
    """

    def __init__(self, name: str, vocab_size: int, grammars: Grammars) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self.grammars = grammars

    def read(self, endpoint: Endpoint | None, data: bytes | bytearray) -> ReadRequest:
        """Read a request, in time that is bounded by the number of its bytes.

        Args:
            endpoint: that it came to; None for that of its fields, a chat or a completion.
            data: JSON.

        Raises:
            ApiError: it is not JSON, or a field is unknown, of a wrong type or not supported.
        """
        body = _json(data)
        if endpoint is None:
            endpoint = "chat" if "messages" in body else "completions"
        if isinstance(biases := body.get("logit_bias"), dict) and len(biases) > _MAX_BIASES:
            raise ApiError(
                400,
                f"expected at most {_MAX_BIASES} biases, got {len(biases)}",
                param="logit_bias",
            )
        try:
            valid = _MODELS[endpoint].model_validate(body)
        except ValidationError as error:
            _refuse(error, body)
        if valid.model not in (None, self._name):
            raise ApiError(
                404,
                f"expected the model {self._name!r}, got {valid.model!r}",
                param="model",
                code="model_not_found",
            )
        self._check_bias(valid)
        _check_template_kwargs(valid)
        schema = self._schema(valid)
        return ReadRequest(_asked(endpoint, valid), schema, _passed_on(valid, body))

    def _schema(self, valid: _Any) -> str | None:
        """Return the schema of the answer, checked, as JSON."""
        form: _Format | _FlatFormat | None = None
        if isinstance(valid, _Chat):
            form = valid.response_format
        elif isinstance(valid, _Response) and valid.text is not None:
            form = valid.text.format
        if form is None or form.type == "text":
            return None
        if getattr(valid, "tools", None) and getattr(valid, "tool_choice", None) != "none":
            raise ApiError(400, "expected a schema or tools, got both: calls are not of the schema")
        return self.grammars.checked({"type": "object"} if form.schema_ is None else form.schema_)

    def _check_bias(self, valid: _Any) -> None:
        for token in getattr(valid, "logit_bias", None) or ():
            is_number = token.isdecimal() and token.isascii() and len(token) < 20
            if not (is_number and int(token) < self._vocab_size):
                raise ApiError(
                    400,
                    f"expected ids of tokens below {self._vocab_size} in logit_bias, "
                    f"got {token[:20]!r}",
                    param="logit_bias",
                )


def texts_of(data: bytes | bytearray) -> list[str]:
    """Read the texts of a corpus.

    Args:
        data: JSON, `{"text": …}`, a text or a list of these.

    Raises:
        ApiError: it is something else.
    """
    body = _json(data)
    try:
        text = _Corpus.model_validate(body).text
    except ValidationError as error:
        _refuse(error, body)
    return text if isinstance(text, list) else [text]


def _asked(endpoint: Endpoint, valid: _Any) -> Asked:
    """Return what is asked for, by the fields that an endpoint has."""
    fields = dict(valid)
    options: _Obfuscation | None = fields.get("stream_options")
    if options is not None and not valid.stream:
        raise ApiError(400, "expected stream_options with stream alone", param="stream_options")
    num_logprobs = fields.get("logprobs")
    if endpoint == "chat":
        if fields["top_logprobs"] is not None and not fields["logprobs"]:
            raise ApiError(400, "expected top_logprobs with logprobs", param="top_logprobs")
        num_logprobs = fields["top_logprobs"] or 0 if fields["logprobs"] else None
    stop = fields.get("stop") or []
    lengths = map(fields.get, ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    prediction: _Prediction | None = fields.get("prediction")
    sampling = {name: fields[name] for name in ("top_k", "min_p", "repetition_penalty")}
    return Asked(
        endpoint,
        is_stream=bool(valid.stream),
        seed=valid.seed,
        temperature=valid.temperature,
        top_p=valid.top_p,
        sampling={name: value for name, value in sampling.items() if value is not None},
        max_new_tokens=next((each for each in lengths if each is not None), None),
        stops=tuple(stop) if isinstance(stop, list) else (stop,),
        num_logprobs=num_logprobs,
        includes_usage=bool(getattr(options, "include_usage", False)),
        obfuscates=options is None or options.include_obfuscation is not False,
        user=valid.user,
        salt=valid.cache_salt,
        prediction=None if prediction is None else prediction.text(),
        speculates=valid.speculation is not False,
        max_draft_tokens=valid.max_draft_tokens,
        pools=None if valid.pools is None else tuple(valid.pools),
    )


def _json(data: bytes | bytearray) -> Json:
    """Read a JSON object.

    Raises:
        ApiError: it is none, or takes long to look at.
    """
    # A parser lets nobody else go on until it is done, so values are counted before.
    if _num_marks(data) > _MAX_VALUES and _num_marks(_STRINGS.sub(b"", data)) > _MAX_VALUES:
        raise ApiError(400, f"expected at most {_MAX_VALUES} values in a request, got more")
    try:
        body = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"expected JSON, got an error: {error}"[:300]) from None
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, got {type(body).__name__}")
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [
            each
            for value in level
            for each in (value.values() if isinstance(value, dict) else value)
            if isinstance(each, dict | list)
        ]
        if not level:
            return body
    raise ApiError(400, f"expected JSON at most {_MAX_DEPTH} deep, got a deeper one")


def _num_marks(data: bytes | bytearray) -> int:
    """Return how many values JSON has, and more if there are such characters in its strings."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _refuse(error: ValidationError, body: Json) -> NoReturn:
    """Raise the first error of a request as OpenAI would put it; values are not repeated."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the members of a union, that which fits best.
    places = [_place(each["loc"], body, each["type"] == "missing") for each in errors]
    of_first = [
        place for place, each in enumerate(errors) if each["loc"][:1] == errors[0]["loc"][:1]
    ]
    best = max(
        of_first,
        key=lambda place: (
            len(places[place]),
            not errors[place]["type"].endswith(("_type", "missing")),
        ),
    )
    first, param = errors[best], ".".join(places[best]) or None
    if first["type"] == "extra_forbidden":
        message = f"{param} is not supported"
    else:
        message = first["msg"].removeprefix("Value error, ")
        message = message if param is None else f"{param}: {message}"
    if param == "tool_choice":
        message += "; calls cannot be forced"
    raise ApiError(400, message, param=param, code="unsupported_or_invalid")


def _place(steps: Sequence[int | str], body: Any, is_missing: bool) -> list[str]:
    """Return where in a request an error is; pydantic also names types, of unions."""
    place: list[str] = []
    for number, step in enumerate(steps, 1):
        try:
            body = body[step]
        except (KeyError, IndexError, TypeError):
            if not (is_missing and number == len(steps)):
                continue
        place.append(str(step))
    return place


def _check_template_kwargs(valid: _Any) -> None:
    for name in getattr(valid, "chat_template_kwargs", None) or ():
        if name in _NOT_OF_TEMPLATES:
            raise ApiError(
                400,
                f"expected arguments of the chat template, got {name!r}",
                param=f"chat_template_kwargs.{name}",
            )


def _passed_on(valid: _Any, body: Json) -> Json:
    kept = {name: body[name] for name in _PASSED_ON & body.keys() if body[name] is not None}
    kept["stream"] = bool(valid.stream)  # responses are streamed by default there
    biases = kept.pop("logit_bias", None)
    if biases:  # transformers takes nothing but floats, and no empty dict
        kept["logit_bias"] = {token: float(bias) for token, bias in biases.items()}
    if getattr(valid, "tool_choice", None) == "none":
        kept.pop("tools", None)
    return kept
