"""`Settings`: how answers of a conversation are generated."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings of answers, any of which may change between two of them.

    Raises:
        TypeError: a value has a wrong type.
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0  # 0 is greedy; above it, sampling from the whole vocabulary
    top_p: float = 1.0  # of no effect on greedy answers
    seed: int = 0  # of the first answer; each further one has the next

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"expected {name} to be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"expected {name} of {least} or more, got {value}")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"expected {name} to be a number, got {value!r}")
        check_sampling(self.temperature, self.top_p)

    def options(self) -> dict[str, Any]:
        """Return options for `generate`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            **sampling_options(self.temperature, self.top_p),
        }


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise if there is no such sampling.

    Raises:
        ValueError: one of them is out of its range.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"expected a finite temperature of 0 (greedy) or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"expected top_p above 0 and up to 1, got {top_p}")


def sampling_options(temperature: float, top_p: float) -> dict[str, Any]:
    """Return options for `generate` to sample from the whole vocabulary, or greedily at 0."""
    if temperature == 0:
        return {"do_sample": False}
    # top_k: transformers' own default would be 50.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
