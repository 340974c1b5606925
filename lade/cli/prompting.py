"""Read and encode the user's prompts, and check them against the model's positions."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.cli.loading import note
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_positions, room_after

# Names of position tables in models; tables of distances have fewer rows than positions.
_POSITIONS = re.compile(r"position|pos_|wpe")


def read_prompt(argument: str) -> str:
    """Return a prompt, read from standard input if the argument is `-`; as `read_typed`."""
    if argument == "-":
        return _decoded(sys.stdin.buffer.read(), "on standard input").replace("\r\n", "\n")
    return read_typed(argument)


def read_prediction(path: Path) -> str:
    """Return what an answer will probably be, without the line break at the end of its file.

    Raises:
        OSError, UserError: the file cannot be read, is not UTF-8, or has no text.
    """
    text = _decoded(path.read_bytes(), f"in {path}").replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise UserError(f"expected a prediction in {path}, got no text")
    return text


def read_typed(argument: str) -> str:
    """Return a text given on the command line.

    Raises:
        UserError: it is not UTF-8.
    """
    # Bytes that are not UTF-8 arrive as surrogates, which no tokenizer knows.
    return _decoded(argument.encode(errors="surrogateescape"), "as prompt")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected UTF-8 {where}, got byte 0x{data[error.start]:02x} after {error.start} bytes"
        ) from None


def encode_prompt(
    loaded: LoadedModel, text: str, *, system: str | None = None, is_raw: bool = False
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a prompt, int64 [1, num_tokens].

    Raises:
        UserError: the prompt has no token, or there is no place for a system prompt.
    """
    if not (text if is_raw else text.strip()):
        raise UserError("expected a prompt of one token or more, got none")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        check_system(loaded, system)
        messages.insert(0, {"role": "system", "content": system})
    return encode_messages(loaded, messages, is_raw=is_raw)


def room_for(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens the answer may have; print a note if the positions run out.

    A model that computes its positions can go beyond those it was trained with, if poorly; one that
    looks them up in a table cannot.

    Raises:
        ContextLengthError: the prompt alone is too long for the table.
    """
    limit = num_positions(model)
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
    room = room_after(model, num_prompt_tokens)
    assert room is not None, "there is a limit"
    note(f"{name} has positions for {limit} tokens: the answer ends after {room} at the latest")
    return room


def check_prompts(loaded: LoadedModel, texts: Sequence[str], max_new_tokens: int) -> None:
    """Check that every prompt has a token and leaves room for the longest answer.

    Raises:
        UserError: one does not; nothing was generated.
    """
    longest = max(encode_prompt(loaded, text)["input_ids"].shape[1] for text in texts)
    room = room_for(loaded.model, longest, max_new_tokens)
    if room < max_new_tokens:
        raise UserError(
            f"expected --max-new-tokens of at most {room} after the longest prompt, "
            f"got {max_new_tokens}"
        )


def _has_table(model: Any, limit: int) -> bool:
    """Return whether positions are looked up in a finite table, learned or not."""
    from torch.nn import Embedding

    modules = model.named_modules()
    tables = [(name, each.weight) for name, each in modules if isinstance(each, Embedding)]
    tables += model.named_buffers()
    return any(
        _POSITIONS.search(name.rpartition(".")[2]) and table.dim() == 2 and len(table) >= limit
        for name, table in tables
    )
