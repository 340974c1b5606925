"""Prompts as tokens, by the chat template, within the model's context."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from lade.errors import ContextLengthError, UserError
from lade.models.loading import LoadedModel

# Fields of messages that a template may leave out: the order shows which call a result belongs to,
# and templates often leave out earlier thoughts on purpose.
_ANYWAY = {
    *("role", "content", "tool_call_id"),
    *("reasoning_content", "reasoning_details", "reasoning", "thinking"),
}


def encode(tokenizer: Any, prompt: str, device: Any = None) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask`, int64 [1, num_tokens], of a user's prompt.

    The tokenizer's chat template, if any, is applied.
    """
    return _encoded(tokenizer, [{"role": "user", "content": prompt}], device)


def encode_messages(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    is_raw: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the same as `encode`, for messages in the form of chat templates.

    Args:
        loaded: the model and its tokenizer.
        messages: the messages; without a chat template, one text for the model to continue.
        is_raw: whether to leave out the chat template.
        options: arguments of the chat template, such as tools.

    Raises:
        UserError: there is no token, or one that the model has no row for, or the chat template
            refuses the messages.
    """
    with _refusals(f"the chat template of {loaded.name} refuses the messages"):
        encoded = _encoded(loaded.tokenizer, messages, loaded.model.device, is_raw, options)
    if encoded["input_ids"].shape[1] == 0:
        has_template = loaded.tokenizer.chat_template and not is_raw
        why = "" if has_template else f": {loaded.name} has no chat template, or it is left out"
        raise UserError(f"expected a prompt of one token or more, got none{why}")
    if error := why_unknown(loaded, int(encoded["input_ids"].max())):
        raise UserError(error)
    return encoded


def why_unknown(loaded: LoadedModel, token_id: int) -> str | None:
    """Return an error's text if the model has no row for a token, as tokenizers may have more."""
    size = loaded.model.config.get_text_config(decoder=True).vocab_size
    if token_id < size:
        return None
    has_name = token_id < len(loaded.tokenizer)
    token = f", {loaded.tokenizer.convert_ids_to_tokens(token_id)!r}" if has_name else ""
    return f"expected ids of tokens below {size}, got {token_id}{token}: the model has no such row"


def _encoded(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    device: Any,
    is_raw: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    if tokenizer.chat_template and not is_raw:
        named = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        asked = [dict(message) for message in messages]
        encoded = tokenizer.apply_chat_template(asked, **{**named, **options})
    else:
        encoded = tokenizer(_as_text(messages), return_tensors="pt")
    # Some tokenizers add inputs, such as token types, that causal LMs do not need.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return all messages as one text; each answer follows its question at once."""
    return "".join(
        "\n" * (index > 0 and each["role"] == "user") + each["content"]
        for index, each in enumerate(messages)
    )


def useless_fields(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the fields that change no prompt, such as "messages.0.name".

    Args:
        tokenizer: with a chat template.
        messages, options: that it takes, as for `encode_messages`; tools are always among them.
    """
    from lade.compat.attempts import Attempt  # which takes torch

    variables = _variables_of(tokenizer.get_chat_template(tools=options["tools"]))
    for name in options.keys() - variables:
        if name != "tools":
            yield f"chat_template_kwargs.{name}"
        elif options["tools"]:
            yield name
    render = partial(
        tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **options
    )
    first_index: dict[str, int] = {}
    for index, each in enumerate(messages):
        for field in each.keys() - _ANYWAY - ({"name"} if each["role"] == "tool" else set()):
            first_index.setdefault(field, index)
    for field, index in first_index.items():
        without = [{name: each[name] for name in each if name != field} for each in messages]
        is_used = True
        with Attempt():  # a template may not do without it
            is_used = render(messages) != render(without)
        if not is_used:
            yield f"messages.{index}.{field}"


@lru_cache(8)
def _variables_of(template: str) -> frozenset[str]:
    from jinja2 import meta

    from lade.compat import parsed_template

    return frozenset(meta.find_undeclared_variables(parsed_template(template)))


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn errors of a chat template into a `UserError` about the messages."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        # An error that a template raises itself is meant for the author of the messages.
        why = error if type(error) is TemplateError else "it cannot read a role, content or call"
        raise UserError(f"{what} ({why})") from error


def check_system(loaded: LoadedModel, system: str) -> None:
    """Check that the model's chat template takes a system prompt.

    Raises:
        UserError: there is no chat template, or it refuses a system prompt or leaves it out.
    """
    if not loaded.tokenizer.chat_template:
        raise UserError(f"expected no system prompt: {loaded.name} has no chat template")
    user = {"role": "user", "content": "?"}
    render = loaded.tokenizer.apply_chat_template
    begin = f"expected no system prompt: the chat template of {loaded.name}"
    with _refusals(f"{begin} refuses it"):
        text = render([{"role": "system", "content": system}, user], tokenize=False)
    if text == render([user], tokenize=False):
        raise UserError(f"{begin} leaves it out")


def tool_calls(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a call of each tool, one after the other, in the form of the chat template.

    Use it as `prediction=`. Arguments are empty; drafting goes on behind the model's arguments.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: JSON schemas of functions, in the form of chat templates.

    Raises:
        ValueError: there is no chat template, or it refuses tool calls or leaves them out.
    """
    asked, texts = [{"role": "user", "content": "?"}], []
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        arguments = dict.fromkeys(schema.get("properties") or {}, "")
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        with _refusals("the chat template refuses a tool call"):
            text: str = render([*asked, said]).removeprefix(render(asked))
        if function["name"] not in text:
            raise UserError("expected a chat template that writes tool calls, got one without")
        texts.append(text)
    return "".join(texts)


def num_positions(model: Any) -> int | None:
    """Return the context length of a model; None if its config names none."""
    config = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit


def num_tokens_after(model: Any, num_prompt_tokens: int) -> int | None:
    """Return how many new tokens fit after a prompt; None for any number.

    Raises:
        ContextLengthError: the prompt alone is too long.
    """
    limit = num_positions(model)
    if limit is None:
        return None
    if num_prompt_tokens > limit:
        raise ContextLengthError(
            f"expected a prompt of at most {limit:,} tokens, as {type(model).__name__} has "
            f"positions for no more; got {num_prompt_tokens:,}"
        )
    return limit - num_prompt_tokens + 1  # the last new token is never fed
