"""`Config`: what a user may fix by hand. Every default is automatic, none needs to be touched."""

from dataclasses import dataclass
from typing import Literal, get_args

Verifier = Literal["exact", "rejection"]
Way = Literal["tree", "rows", "chain", "snapshot", "plain"]

WAYS: tuple[Way, ...] = get_args(Way)  # of verifying drafts, best first
SPECULATING = WAYS[:-1]


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the decoding; no text depends on them in exact arithmetic, but see `verifier`.

    Raises:
        TypeError: a field is not an integer.
        ValueError: a field is out of its range.
    """

    #: G, the greatest number of candidates (root-to-leaf paths) in a draft; None for no limit.
    max_candidates: int | None = None
    #: The greatest number of draft tokens to verify in a step, and then every step verifies as many
    #: as the draft has. None lets the measured cost of a step decide (`lade.budget`). 0 drafts
    #: nothing.
    max_draft_tokens: int | None = None
    #: N of the pool made when none is passed; None for the pool's own default.
    max_ngram_size: int | None = None
    #: How sampled text is held against a draft. "exact" emits, seed for seed, the tokens that
    #: `generate(do_sample=True)` emits, and accepts a draft token where it is the same. "rejection"
    #: draws drafts from the pool's own probabilities and accepts or rejects them so that the text
    #: has the target's distribution (`lade.rejection`), with other tokens for the same seed. Greedy
    #: decoding is the same with both: its target distribution is one token.
    verifier: Verifier = "exact"
    #: How drafts are verified. "tree": all candidates in one forward, by a tree mask; "rows": as
    #: rows of a batch; "chain": the best one alone, the cache cropped behind what was accepted;
    #: "snapshot": the same, by a copy of the state from before the draft; "plain": not at all. None
    #: takes the best that a check of the model finds exact (`lade.probe`).
    target: Way | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_candidates", 1), ("max_draft_tokens", 0), ("max_ngram_size", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"expected Config({name}=…) to be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"expected Config({name}=…) of at least {least}, got {value}")
        for name, known in (("verifier", get_args(Verifier)), ("target", (*WAYS, None))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"expected Config({name}=…) of {', '.join(map(repr, known))}, "
                    f"got {getattr(self, name)!r}"
                )
