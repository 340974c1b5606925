"""Prompts that a user has typed or piped: read, encoded, and held against the model's positions."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from lade.cli.loading import note
from lade.models import LoadedModel, encode

# What models call their tables of positions; those of distances have fewer rows than positions.
_POSITIONS = re.compile(r"position|pos_|wpe")


def read_prompt(argument: str) -> str:
    """Return a prompt, from standard input where the argument is `-`.

    Raises:
        ValueError: it is not UTF-8.
    """
    if argument == "-":
        return _decoded(sys.stdin.buffer.read(), "on standard input").replace("\r\n", "\n")
    return read_typed(argument)


def read_typed(argument: str) -> str:
    """Return a prompt of the command line itself.

    Raises:
        ValueError: it is not UTF-8.
    """
    # Bytes that are not come as surrogates, of which no tokenizer knows anything.
    return _decoded(argument.encode(errors="surrogateescape"), "as prompt")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected UTF-8 {where}, got byte 0x{data[error.start]:02x} after {error.start} bytes"
        ) from None


def encode_prompt(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a prompt, int64 [1, num_tokens].

    Raises:
        ValueError: there is no token in it to go on from.
    """
    inputs = encode(loaded.tokenizer, text, loaded.model.device)
    if inputs["input_ids"].shape[1] == 0:
        why = f"the tokenizer of {loaded.name} makes no token of {text!r}"
        if not text:
            why = f"{loaded.name} has no chat template, and nothing to go on from"
        raise ValueError(f"expected a prompt of one token or more, got none: {why}")
    return inputs


def room_for(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens the answer may have, and say so where the model's positions end.

    A model that computes its positions goes on beyond those that it was trained with, if not well;
    one that has them in a table cannot.

    Raises:
        ValueError: the prompt alone is too long for a table.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # The last new token is never fed.
    if limit is None or num_prompt_tokens + max_new_tokens - 1 <= limit:
        return max_new_tokens
    name = type(model).__name__
    if not _has_table(model, limit):
        note(
            f"{name} was made for texts of {limit} tokens; {num_prompt_tokens} of the prompt and "
            f"up to {max_new_tokens} new ones are more, and may come to make no sense"
        )
        return max_new_tokens
    if num_prompt_tokens > limit:
        raise ValueError(
            f"expected a prompt of at most {limit} tokens, as {name} has positions for no more; "
            f"got {num_prompt_tokens}"
        )
    room: int = limit - num_prompt_tokens + 1
    note(f"{name} has positions for {limit} tokens: the answer ends after {room} at the latest")
    return room


def check_prompts(loaded: LoadedModel, texts: Sequence[str], max_new_tokens: int) -> None:
    """Raise where a prompt has no token, or answers as long as wanted do not fit the model.

    Raises:
        ValueError: that is so; nothing was generated.
    """
    longest = max(encode_prompt(loaded, text)["input_ids"].shape[1] for text in texts)
    room = room_for(loaded.model, longest, max_new_tokens)
    if room < max_new_tokens:
        raise ValueError(
            f"expected --max-new-tokens of at most {room} behind the longest prompt, "
            f"got {max_new_tokens}"
        )


def _has_table(model: Any, limit: int) -> bool:
    """Tell whether positions are looked up in a table, learned or not, that ends."""
    from torch.nn import Embedding

    modules = model.named_modules()
    tables = [(name, each.weight) for name, each in modules if isinstance(each, Embedding)]
    tables += model.named_buffers()
    return any(
        _POSITIONS.search(name.rpartition(".")[2]) and table.dim() == 2 and len(table) >= limit
        for name, table in tables
    )
