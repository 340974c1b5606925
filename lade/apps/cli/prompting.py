"""Encode the user's prompts, and check them against the model's positions."""

from collections.abc import Sequence
from typing import Any

from lade.apps.cli.loading import note
from lade.apps.cli.options import check_text
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_tokens_after


def encode_prompt(
    loaded: LoadedModel, text: str, *, system: str | None = None, is_raw: bool = False
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a prompt, int64 [1, num_tokens].

    Raises:
        UserError: the prompt has no token, or the chat template takes no system prompt.
    """
    check_text(text, is_raw=is_raw)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        check_system(loaded, system)
        messages.insert(0, {"role": "system", "content": system})
    return encode_messages(loaded, messages, is_raw=is_raw)


def max_answer_tokens(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens the answer may have; print a note if the positions run out.

    Raises:
        ContextLengthError: the prompt alone is too long.
    """
    num_left = num_tokens_after(model, num_prompt_tokens)
    if num_left is None or num_left >= max_new_tokens:
        return max_new_tokens
    limit = num_left + num_prompt_tokens - 1
    note(
        f"{type(model).__name__} has positions for {limit:,} tokens: the answer ends after "
        f"{num_left:,} at the latest"
    )
    return num_left


def encode_prompts(
    loaded: LoadedModel, texts: Sequence[str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Encode prompts, and check that each fits into the context with the longest answer.

    Raises:
        UserError: a prompt does not fit, or has no token; nothing was generated.
    """
    inputs = [encode_prompt(loaded, text) for text in texts]
    longest = max(each["input_ids"].shape[1] for each in inputs)
    num_left = max_answer_tokens(loaded.model, longest, max_new_tokens)
    if num_left < max_new_tokens:
        raise UserError(
            f"expected --max-new-tokens of at most {num_left} after the longest prompt, "
            f"got {max_new_tokens}"
        )
    return inputs
