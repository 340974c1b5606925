"""Answers of several methods to one prompt, held against plain `generate`; where their texts part.

For `lade demo` and for the chat's `/plain`; `lade bench` sums many prompts up (`run.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from lade.compat import dtype_of
from lade.compat.closeness import is_exact_in


class Side(NamedTuple):
    """One method's answer."""

    name: str
    token_ids: list[int]
    sec: float  # of the whole call

    @property
    def tokens_per_sec(self) -> float:
        """Tokens per second of all its time, the prompt's included."""
        return len(self.token_ids) / self.sec if self.sec else 0.0


def compared(sides: Sequence[Side]) -> Iterator[str]:
    """Yield a line for each side; the first one is plain `generate`."""
    plain = sides[0]
    width = max(len(side.name) for side in sides)
    for side in sides:
        line = f"{side.name.ljust(width)}  {len(side.token_ids):,} tokens in {side.sec:.1f} s"
        line += f", {side.tokens_per_sec:.1f} tokens a second"
        if side is not plain:
            gain = side.tokens_per_sec / plain.tokens_per_sec if plain.tokens_per_sec else 0.0
            pairs = zip_longest(plain.token_ids, side.token_ids)
            first = next((n for n, (one, other) in enumerate(pairs, 1) if one != other), None)
            line += f", {gain:.2f}x plain, "
            line += "same text" if first is None else f"differs at token {first}"
        yield line


def why_different(model: Any) -> str:
    """Explain why answers may differ in the model's dtype."""
    dtype = str(dtype_of(model)).removeprefix("torch.")
    if is_exact_in(model):
        return f"The text should be the same in {dtype}: this is a fault of lade, please report it."
    return (
        f"Plain generate computes in {dtype}, so where two tokens are nearly tied the texts can "
        "diverge. --dtype float32 gives the same text."
    )
