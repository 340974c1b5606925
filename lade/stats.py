"""`DecodeStats`: the only place where acceptance is counted and named."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

_DERIVED = (
    *("num_tokens", "mean_accepted_tokens", "acceptance_rate", "correction_rate"),
    *("nodes_per_step", "draft_sec_per_step", "overhead"),
)


class Step(NamedTuple):
    """What one step committed to one row; the first step of a row is its prefill."""

    token_ids: list[int]  # in order; cut where a stop condition was met; no padding
    num_draft_tokens: int
    num_accepted: int  # how many of `token_ids`, from the front, were drafted
    row: int = 0  # of the batch
    #: Whether the last token is a bonus token in the place of rejected ones: the accepted path
    #: ended at a node under which tokens were drafted, all of them others.
    is_corrected: bool = False


@dataclass(slots=True)
class Timer:
    """How long a block took, once it has ended."""

    sec: float = 0.0


@dataclass(slots=True)
class DecodeStats:
    """Counts and times of one or more generations.

    A step is one target forward after prefill; a row step is the part of one row in it, so that a
    row alone has as many of them as steps.
    """

    num_steps: int = 0
    num_row_steps: int = 0  # of rows that were not finished
    num_draft_tokens: int = 0  # verified
    num_lookahead_tokens: int = 0  # of windows beside the drafts (`lade.lookahead`)
    num_accepted_tokens: int = 0  # of those, accepted and emitted
    num_committed_tokens: int = 0  # by steps: accepted and bonus tokens
    num_prefills: int = 0  # prompts run; each commits one token more
    num_drafted_row_steps: int = 0  # row steps that verified a draft token or more
    num_corrected_row_steps: int = 0  # of those, the ones that ended on a rejection; see `Step`
    #: Accepted draft tokens by their depth in the tree, from depth 1.
    accepted_by_depth: list[int] = field(default_factory=list)
    prefill_sec: float = 0.0
    draft_sec: float = 0.0  # asking the drafter and the budget, and building the tree's tensors
    forward_sec: float = 0.0  # the target's forward, until its choices are on the host
    verify_sec: float = 0.0  # walking the tree, logits processors and stop conditions included
    commit_sec: float = 0.0  # compacting the cache, feeding drafter and budget; not streamers

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, those of the prefills included."""
        return self.num_committed_tokens + self.num_prefills

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: tokens committed per row and step, bonus included; plain decoding is 1.00."""
        return _ratio(self.num_committed_tokens, self.num_row_steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per draft token."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def correction_rate(self) -> float:
        """Share of the row steps with a draft whose bonus token took the place of rejected ones.

        The rest were accepted to the end of a path of the tree, or stopped within it.
        """
        return _ratio(self.num_corrected_row_steps, self.num_drafted_row_steps)

    @property
    def nodes_per_step(self) -> float:
        """Draft tokens verified per row and step, the root not included."""
        return _ratio(self.num_draft_tokens, self.num_row_steps)

    @property
    def draft_sec_per_step(self) -> float:
        """Time per step to draft, for all rows of the batch."""
        return _ratio(self.draft_sec, self.num_steps)

    @property
    def overhead(self) -> float:
        """Share of the time of all steps that was not spent in the target's forward."""
        own = self.draft_sec + self.verify_sec + self.commit_sec
        return _ratio(own, own + self.forward_sec)

    @contextmanager
    def timed(self, stage: str) -> Iterator["Timer"]:
        """Add the time of the block to `<stage>_sec`; it is also in the yielded object, after."""
        name = f"{stage}_sec"
        timer = Timer()
        start = perf_counter()
        yield timer
        timer.sec = perf_counter() - start
        setattr(self, name, getattr(self, name) + timer.sec)

    def count_row_step(self, step: Step) -> None:
        """Count what a step after prefill did for a row that was not finished."""
        self.num_row_steps += 1
        self.num_draft_tokens += step.num_draft_tokens
        self.num_accepted_tokens += step.num_accepted
        self.num_committed_tokens += len(step.token_ids)
        self.num_drafted_row_steps += step.num_draft_tokens > 0
        self.num_corrected_row_steps += step.is_corrected
        missing = step.num_accepted - len(self.accepted_by_depth)
        self.accepted_by_depth += [0] * missing
        for depth in range(step.num_accepted):
            self.accepted_by_depth[depth] += 1

    def add(self, other: "DecodeStats") -> None:
        """Add the counts and times of `other` to these."""
        for name in self.__dataclass_fields__:
            if name != "accepted_by_depth":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        longer, shorter = sorted((self.accepted_by_depth, other.accepted_by_depth), key=len)[::-1]
        padded = [*shorter, *[0] * (len(longer) - len(shorter))]
        self.accepted_by_depth = [a + b for a, b in zip(longer, padded, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return counts, times and ratios, ready for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {name: getattr(self, name) for name in _DERIVED}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
