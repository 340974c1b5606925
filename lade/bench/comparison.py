"""Answers of several methods to one prompt, held against plain `generate`; where their texts part.

For `lade demo` and for the chat's `/plain`; `lade bench` sums many prompts up (`run.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lade.closeness import is_exact_in, limit_of


class Side(NamedTuple):
    """One method's answer."""

    name: str
    token_ids: list[int]
    sec: float  # of the whole call

    @property
    def tokens_per_sec(self) -> float:
        """Tokens per second of all its time, the prompt's included."""
        return len(self.token_ids) / self.sec if self.sec else 0.0


class Difference(NamedTuple):
    """Where two answers diverge."""

    place: int  # of the first different token, counted from 1
    gap: float  # between the model's top two logits there, recomputed from the whole text
    is_tie: bool  # whether rounding alone may close the gap


def compared(model: Any, prompt_ids: Sequence[int], sides: Sequence[Side]) -> Iterator[str]:
    """Yield a line for each side, the first of which is plain `generate`."""
    plain = sides[0]
    width = max(len(side.name) for side in sides)
    for side in sides:
        line = f"{side.name.ljust(width)}  {len(side.token_ids):,} tokens in {side.sec:.1f} s"
        line += f", {side.tokens_per_sec:.1f} a second"
        if side is not plain:
            gain = side.tokens_per_sec / plain.tokens_per_sec if plain.tokens_per_sec else 0.0
            found = find_difference(model, prompt_ids, plain.token_ids, side.token_ids)
            line += f", {gain:.2f}x plain, {verdict(found)}"
        yield line


def find_difference(
    model: Any, prompt_ids: Sequence[int], expected: list[int], got: list[int]
) -> Difference | None:
    """Return where two answers diverge and whether it was a tie; None if they are the same."""
    if expected == got:
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    num_same = min(len(expected), len(got))
    num_same = next((i for i, (one, other) in pairs if one != other), num_same)
    prefix = torch.tensor([[*prompt_ids, *expected[:num_same]]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=prefix, use_cache=False).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    gap = best - second
    return Difference(num_same + 1, gap, gap <= limit_of(model) * float(logits.std()))


def verdict(difference: Difference | None) -> str:
    """Describe in a few words whether two answers are the same."""
    if difference is None:
        return "same text"
    why = "tie" if difference.is_tie else f"gap {difference.gap:.3g}"
    return f"differs at token {difference.place} ({why})"


def why_different(model: Any) -> str:
    """Explain why answers may differ in the model's dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    if is_exact_in(model):
        return f"The text should be the same in {dtype}: this is a fault of lade, please report it."
    return (
        f"In {dtype}, a forward over several tokens rounds differently from one over a single "
        "token, and where the model's two best tokens are nearly tied, the texts may part. "
        "--dtype float32 gives the same text."
    )
