"""`PoolOptions`: what a user may set of a pool inside of an engine."""

from dataclasses import dataclass
from os import PathLike
from typing import Literal, get_args

from ngram_pool import NGramPool
from ngram_pool.arrays import positive
from ngram_pool.pool import DEFAULT_CAPACITY_TOKENS, DEFAULT_MAX_NGRAM_SIZE

Sharing = Literal["none", "all"]


@dataclass(frozen=True)
class PoolOptions:
    """How a pool drafts inside of an engine; every option has a default.

    Attributes:
        sharing: "none", so that each request is drafted for from its own text alone (and from
            `pool` and `prewarmed`); or "all", so that every request is drafted for from the text of
            all, also of those that ended.
        capacity_tokens: most tokens that a pool holds: the shared one, or that of each request.
        max_ngram_size: N; contexts of 1 to N tokens are indexed.
        min_probability: a draft ends where the chance that all of it is accepted is less than this.
        max_step_tokens: most tokens to draft in one step, for all requests together, and most
            tokens of prompts to observe in one step; bounds the time of a step.
        pool: path of a pool's file to start from, read and never written; None to start empty.
        prewarmed: path of the table that `lade prewarm` made for the model; None for none.
        seed: of the pool's hashes; the same on all ranks of an engine.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range; names it.
    """

    sharing: Sharing = "none"
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS
    max_ngram_size: int = DEFAULT_MAX_NGRAM_SIZE
    min_probability: float = 0.02
    max_step_tokens: int = 4096
    pool: str | None = None
    prewarmed: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sharing not in (shares := get_args(Sharing)):
            raise ValueError(f"expected sharing to be one of {shares}, got {self.sharing!r}")
        if self.seed is None:  # a secret one would be another on each rank
            raise TypeError("expected seed to be an integer, got None")
        NGramPool(self.capacity_tokens, self.max_ngram_size, self.seed)  # checks them
        positive("max_step_tokens", self.max_step_tokens)
        least = self.min_probability
        if isinstance(least, bool) or not isinstance(least, int | float):
            raise TypeError(f"expected min_probability to be a number, got {least!r}")
        if not 0.0 <= least <= 1.0:
            raise ValueError(f"expected min_probability from 0 to 1, got {least!r}")
        for name in ("pool", "prewarmed"):
            path = getattr(self, name)
            if not isinstance(path, str | PathLike | None):
                raise TypeError(f"expected {name} to be a path or None, got {path!r}")
