"""`PoolOptions`: the options of a pool inside of an engine."""

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
        sharing: "none": the drafts of a request come only from its own text, `pool` and
            `prewarmed`. "all": they come from the text of all requests, past ones included.
        capacity_tokens: maximum tokens of a pool: the shared one, or that of each request.
        max_ngram_size: N; contexts of 1 to N tokens are indexed.
        min_probability: a draft ends where the chance that all of it is accepted falls below this.
        max_step_tokens: maximum draft tokens of a step, over all requests, and maximum prompt
            tokens that a step observes; limits the time of a step.
        pool: path of a pool's file to start from, read and never written; None to start empty.
        prewarmed: path of the table that `lade prewarm` made for the model; None for none.
        seed: seed of the pool's hashes; must be the same on all ranks of an engine.

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
        if self.seed is None:  # a secret seed would differ between ranks
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
