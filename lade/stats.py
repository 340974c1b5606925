"""`DecodeStats`, the only place where acceptance is counted and named."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

_LOOP_MAX_PERIOD = 32
_LOOP_MIN_TOKENS = 24
_LOOP_MIN_REPEATS = 3


class Step(NamedTuple):
    """The tokens one step committed to one row; the first step of a row is its prefill.

    Attributes:
        token_ids: Committed tokens, in order, up to where a stop condition was met; no padding.
        num_draft_tokens: Draft tokens that the step verified for this row.
        num_accepted: Number of `token_ids`, from the first on, that were drafted.
        row: Row in the batch.
    """

    token_ids: list[int]
    num_draft_tokens: int
    num_accepted: int
    row: int = 0


@dataclass(slots=True)
class SourceStats:
    """Counts and time of one of several sources of drafts.

    Attributes:
        num_asked: Requested drafts.
        num_draft_tokens: Proposed tokens, verified or not.
        num_accepted_tokens: Emitted tokens on a path that the source had proposed.
        sec: Drafting time.
    """

    num_asked: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    sec: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per token proposed."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    def add(self, other: "SourceStats") -> None:
        """Add the counts and times of `other`."""
        _add(self, other, self.__dataclass_fields__)


@dataclass(slots=True)
class WidthStats:
    """Expected tokens and time if every step had verified one number of draft tokens.

    Attributes:
        num_steps: Steps that verified this number, or more but fewer than the next listed number.
        num_tokens: Expected tokens of all steps at this number.
        sec: Expected time of all steps at this number, by the costs measured until each step.
    """

    num_steps: int = 0
    num_tokens: float = 0.0
    sec: float = 0.0

    @property
    def tokens_per_sec(self) -> float:
        """Expected tokens per second."""
        return _ratio(self.num_tokens, self.sec)

    def add(self, other: "WidthStats") -> None:
        """Add the counts and times of `other`."""
        _add(self, other, self.__dataclass_fields__)


@dataclass(slots=True)
class DecodeStats:
    """Counts and times of one or more generations.

    A step is one target forward after prefill; a row step is one row's part in it, so a single row
    has as many row steps as steps. `str` gives a one-line summary, `as_dict` everything.

    Attributes:
        arithmetic: The dtype that the model computed in, such as "float32"; empty if generations
            differ.
        num_steps: Forward passes of the target after the prefill.
        num_row_steps: Steps times rows, unfinished rows only.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted and emitted.
        num_committed_tokens: Accepted and bonus tokens of all steps.
        num_prefills: Prompts run; each commits one more token.
        num_reused_tokens: Prompt tokens that were not run, because the KV cache of an earlier text
            holds them (`Config.reuses_prefix`).
        num_drafted_row_steps: Row steps that verified at least one draft token.
        accepted_by_depth: Accepted draft tokens by depth in the tree, from depth 1.
        sources: Statistics of each source of drafts, by name.
        widths: How often the budget chose each number of draft tokens, and its expected tokens and
            time; empty if the number was fixed, or decided together with other calls.
        prefill_sec: Time of the prefills, until their choices are on the host.
        draft_sec: Time of asking the drafter and the budget, and of building the tree's tensors.
        forward_sec: Time of the target's forward passes, until their choices are on the host.
        verify_sec: Time of walking the tree, logits processors and stop conditions included.
        commit_sec: Time of compacting the cache and of feeding drafter and budget, without
            streamers.
    """

    num_steps: int = 0
    num_row_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_prefills: int = 0
    num_reused_tokens: int = 0
    num_drafted_row_steps: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    widths: dict[int, WidthStats] = field(default_factory=dict)
    prefill_sec: float = 0.0
    draft_sec: float = 0.0
    forward_sec: float = 0.0
    verify_sec: float = 0.0
    commit_sec: float = 0.0
    arithmetic: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, including one of each prefill."""
        return self.num_committed_tokens + self.num_prefills

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: tokens committed per row and step, bonus included; standard decoding is 1.00.

        vLLM's "mean acceptance length" is 1 + accepted tokens / drafts and leaves out steps without
        a draft: in terms of these counts, 1 + `num_accepted_tokens` / `num_drafted_row_steps`. MAT
        counts every step, so it is lower if some steps had no draft, and tokens per second follow
        it more closely.
        """
        return _ratio(self.num_committed_tokens, self.num_row_steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per draft token."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def draft_tokens_per_step(self) -> float:
        """Draft tokens verified per row and step, without the root."""
        return _ratio(self.num_draft_tokens, self.num_row_steps)

    @property
    def draft_sec_per_step(self) -> float:
        """Drafting time per step, for all rows of the batch, in seconds."""
        return _ratio(self.draft_sec, self.num_steps)

    @property
    def sec(self) -> float:
        """Time of all prefills and steps, in seconds.

        Excludes the setup of a call, and streamers and callbacks on a CPU; on a GPU these run
        beside the forward.
        """
        steps_sec = self.draft_sec + self.forward_sec + self.verify_sec + self.commit_sec
        return self.prefill_sec + steps_sec

    @property
    def tokens_per_sec(self) -> float:
        """Tokens emitted by all rows together, per second of `sec`."""
        return _ratio(self.num_tokens, self.sec)

    @property
    def overhead(self) -> float:
        """Share of the time of all steps spent outside the target's forward."""
        overhead_sec = self.draft_sec + self.verify_sec + self.commit_sec
        return _ratio(overhead_sec, overhead_sec + self.forward_sec)

    def summary(self) -> str:
        """Return a one-line summary: tokens, steps, speed, MAT and acceptance.

        >>> print(DecodeStats(2, 2, 8, 3, 5, 1, forward_sec=0.5))
        6 tokens in 2 steps, 12.0 tokens/s, MAT 2.50, 4.0 draft tokens/step, 38% accepted
        """
        parts = [f"{_counted(self.num_tokens, 'token')} in {_counted(self.num_steps, 'step')}"]
        if self.sec > 0:
            parts.append(f"{self.tokens_per_sec:.1f} tokens/s")
        if self.num_steps > 0:
            parts.append(f"MAT {self.mean_accepted_tokens:.2f}")
            parts.append(f"{self.draft_tokens_per_step:.1f} draft tokens/step")
        if self.num_draft_tokens > 0:
            parts.append(f"{self.acceptance_rate:.0%} accepted")
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.summary()

    def count_row_step(self, step: Step) -> None:
        """Count a step after prefill of a row that was not finished."""
        self.num_row_steps += 1
        self.num_draft_tokens += step.num_draft_tokens
        self.num_accepted_tokens += step.num_accepted
        self.num_committed_tokens += len(step.token_ids)
        self.num_drafted_row_steps += step.num_draft_tokens > 0
        self._add_depths([1] * step.num_accepted)

    def add(self, other: "DecodeStats") -> None:
        """Add the counts and times of `other`."""
        apart = {"accepted_by_depth", "sources", "widths", "arithmetic"}
        self.arithmetic = self.arithmetic or other.arithmetic
        if other.arithmetic not in (None, self.arithmetic):
            self.arithmetic = ""
        _add(self, other, self.__dataclass_fields__.keys() - apart)
        for name, of_source in other.sources.items():
            self.sources.setdefault(name, SourceStats()).add(of_source)
        for width, of_width in other.widths.items():
            self.widths.setdefault(width, WidthStats()).add(of_width)
        self._add_depths(other.accepted_by_depth)

    def _add_depths(self, more: Sequence[int]) -> None:
        self.accepted_by_depth = [*map(sum, zip_longest(self.accepted_by_depth, more, fillvalue=0))]

    def as_dict(self) -> dict[str, Any]:
        """Return counts, times and ratios, ready for JSON."""
        derived = [name for name, of in vars(type(self)).items() if isinstance(of, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}


def add_times(stats: DecodeStats, times: Sequence[float], *stages: str) -> None:
    """Add the time of stages, the first from `times[0]` to `times[1]`, to `<stage>_sec`."""
    for stage, begin, end in zip(stages, times, times[1:], strict=False):
        name = f"{stage}_sec"
        setattr(stats, name, getattr(stats, name) + end - begin)


def ends_in_loop(token_ids: Sequence[int], num_tokens: int = _LOOP_MIN_TOKENS) -> bool:
    """Return whether a text ends in the same few tokens over and over.

    That is, in a block of at most 32 tokens, three times or more, over `num_tokens` or more.
    Small models often loop in greedy decoding, which flatters every n-gram method.
    """
    for period in range(1, _LOOP_MAX_PERIOD + 1):
        length = max(_LOOP_MIN_REPEATS * period, num_tokens)
        tail = token_ids[-length:]
        if len(tail) == length and all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def _add(stats: Any, other: Any, names: Iterable[str]) -> None:
    """Add some counts and times of `other`."""
    for name in names:
        setattr(stats, name, getattr(stats, name) + getattr(other, name))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
