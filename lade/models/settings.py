"""`Settings`: how answers are generated."""

import math
from dataclasses import dataclass
from typing import Any

from lade.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Settings of answers; they may change between two answers.

    Raises:
        UserError: a value is out of range.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0  # 0 is greedy, on which top_p and top_k have no effect
    top_p: float = 1.0
    seed: int = 0  # of the first answer; each further one has the next
    top_k: int = 0  # 0 samples from the whole vocabulary

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("seed", 0), ("top_k", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(
                    f"expected {name} to be an integer of {least} or more, got {value!r}"
                )
        if self.seed >= 2**63:  # the most that torch's generator takes, and one
            raise UserError(f"expected a seed below 2**63, got {self.seed}")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"expected a finite temperature of 0 (greedy) or more, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"expected top_p above 0 and up to 1, got {self.top_p}")

    def describe(self) -> str:
        """Describe in words how tokens are chosen."""
        parts = [f"sampling at temperature {self.temperature:g}" if self.temperature else "greedy"]
        if self.top_p < 1:
            parts.append(f"top-p {self.top_p:g}")
        if self.top_k:
            parts.append(f"top-k {self.top_k}")
        return ", ".join(parts)

    def options(self) -> dict[str, Any]:
        """Return options for `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        if self.temperature > 0:  # top_k: transformers' own default would be 50
            sampled = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            options |= {"do_sample": True, **sampled}
        return options
