"""Read and encode the user's prompts, and check them against the model's positions."""

import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lade.cli.loading import note
from lade.models.loading import LoadedModel, encode
from lade.models.prompts import check_system, num_positions, room_after

# Names of position tables in models; tables of distances have fewer rows than positions.
_POSITIONS = re.compile(r"position|pos_|wpe")


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt and how to present it to a model.

    Raises:
        ValueError: `system` is combined with `is_raw`, or a stop is empty.
    """

    text: str
    system: str | None = None  # a prompt that chat templates place before it
    is_raw: bool = False  # whether to leave out the chat template
    stops: Sequence[str] = ()  # the answer ends with the first of these found in it
    prediction: str | None = None  # what the answer will probably be

    @classmethod
    def read(
        cls,
        prompt: str,
        *,
        system: str | None,
        is_raw: bool,
        stops: Sequence[str],
        prediction: Path | None = None,
    ) -> "AskedPrompt":
        """Read the arguments, a file with a prediction, and standard input where the prompt is `-`.

        Raises:
            ValueError: a text is not UTF-8, or as for the constructor.
        """
        system = None if system is None else read_typed(system)
        predicted = None if prediction is None else read_prediction(prediction)
        return cls(read_prompt(prompt), system, is_raw, [*map(read_typed, stops)], predicted)

    def __post_init__(self) -> None:
        if self.system is not None and self.is_raw:
            raise ValueError("expected --system or --raw, got both: a raw prompt is all there is")
        if "" in self.stops:
            raise ValueError("expected each --stop to be a text of one character or more, got ''")


def new_seed() -> int:
    """Return a random seed short enough to type."""
    return secrets.randbelow(10**6)


def read_prompt(argument: str) -> str:
    """Return a prompt, read from standard input if the argument is `-`.

    Raises:
        ValueError: it is not UTF-8.
    """
    if argument == "-":
        return _decoded(sys.stdin.buffer.read(), "on standard input").replace("\r\n", "\n")
    return read_typed(argument)


def read_prediction(path: Path) -> str:
    """Return what an answer will probably be, without the line break at the end of its file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    return _decoded(path.read_bytes(), f"in {path}").replace("\r\n", "\n").removesuffix("\n")


def read_typed(argument: str) -> str:
    """Return a text given on the command line.

    Raises:
        ValueError: it is not UTF-8.
    """
    # Bytes that are not UTF-8 arrive as surrogates, which no tokenizer knows.
    return _decoded(argument.encode(errors="surrogateescape"), "as prompt")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected UTF-8 {where}, got byte 0x{data[error.start]:02x} after {error.start} bytes"
        ) from None


def encode_prompt(loaded: LoadedModel, asked: AskedPrompt | str) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a prompt, int64 [1, num_tokens].

    Raises:
        ValueError: the prompt has no token, or there is no place for a system prompt.
    """
    if isinstance(asked, str):
        asked = AskedPrompt(asked)
    if asked.system is not None:
        check_system(loaded, asked.system)
    inputs = encode(
        loaded.tokenizer,
        asked.text,
        loaded.model.device,
        system=asked.system,
        is_raw=asked.is_raw,
    )
    if inputs["input_ids"].shape[1] == 0:
        why = f"the tokenizer of {loaded.name} makes no token of {asked.text!r}"
        if not asked.text and not asked.is_raw:
            why = f"{loaded.name} has no chat template, and nothing to go on from"
        raise ValueError(f"expected a prompt of one token or more, got none: {why}")
    return inputs


def room_for(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens the answer may have; print a note if the positions run out.

    A model that computes its positions can go beyond those it was trained with, if poorly; one that
    looks them up in a table cannot.

    Raises:
        ValueError: the prompt alone is too long for the table.
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
        ValueError: one does not; nothing was generated.
    """
    longest = max(encode_prompt(loaded, text)["input_ids"].shape[1] for text in texts)
    room = room_for(loaded.model, longest, max_new_tokens)
    if room < max_new_tokens:
        raise ValueError(
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
