"""What `Merged` does in a call: asks its parts, joins their drafts, and learns what came of them.

How drafts are joined is in `joining.py`, which parts are asked in `payoffs.py`; here is what both
are told, and all that the parts are besides: learning, exploring, drawing.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lade.drafters.joining import Joined, Joining, matched_depth
from lade.drafters.payoffs import Payoffs
from lade.drafting.drafter import (
    Drafter,
    ExploringDrafter,
    HarvestingDrafter,
    NgramDrafter,
    ReportingDrafter,
    SamplingDrafter,
    num_successors_of,
)
from lade.drafting.drafts import checked, checked_tokens
from lade.drafting.pool_drafter import PoolDrafter, has_table
from lade.drafting.successors import Successors
from lade.errors import DrafterWarning, in_one_line
from lade.stats import SourceStats
from ngram_pool import Draft

_T = TypeVar("_T")


@dataclass(slots=True)
class Part:
    """One of the drafters in a call."""

    name: str
    drafter: Drafter
    opens_late: bool  # when it is first asked: it learns nothing of other sequences
    is_dropped: bool = False
    stats: SourceStats = field(default_factory=SourceStats)


@dataclass(slots=True)
class _Asked:
    """Whether a source was asked for a draft, and what was known by then."""

    level: int  # of how sure the cheaper ones were
    was_asked: bool
    before: Draft | None = None  # what the cheaper ones proposed; None if none was asked
    sec: float = 0.0


@dataclass(slots=True)
class _Sequence:
    """A sequence of the call."""

    text: list[int]
    num_prompt: int
    handles: dict[int, int] = field(default_factory=dict)  # by part
    # Of the last proposal, until its outcome is known:
    asked: dict[int, _Asked] = field(default_factory=dict)
    drafts: dict[int, Draft] = field(default_factory=dict)  # by part
    joined: Joined | None = None  # None where drafts are drawn
    num_forced: int = 0  # tokens that a grammar forced before it
    drawing: int | None = None  # the part that is to draw


class MergedDrafter:
    """The drafter of one call by `Merged`.

    It has those of the optional methods of drafters that one of its parts has.
    """

    checks_drafts = True  # its drafts are what they should be

    def __init__(
        self,
        parts: Sequence[Part],
        joining: Joining,
        payoffs: Payoffs,
        lock: Lock,
        *,
        draws: bool,
        asks_all: bool,
        max_length: int,
        is_strict: bool,
    ) -> None:
        self._parts = parts
        self._joining = joining
        self._payoffs = payoffs
        self._lock = lock  # of what is shared with other calls
        self._draws = draws
        self._asks_all = asks_all
        self._max_length = max_length
        self._is_strict = is_strict
        self._sequences: dict[int, _Sequence] = {}
        self._num_opened = 0
        # The step under way: when its first draft was asked for, seconds of drafting since, and
        # what it emitted; None before the first.
        self._start: float | None = None
        self._asking_sec = 0.0
        self._num_emitted = 0
        self._num_observed = 0
        self._step: list[tuple[int, _Asked]] = []
        self._num_drafted = 0
        drafters = [part.drafter for part in parts]
        self._num_successors = [self._num_of(part) for part in parts]
        self.num_successors = max(self._num_successors)
        # Callers ask whether a drafter has a method, so there are those of the parts alone.
        if any(self._num_successors):
            self.harvest = self._harvest
        if any(isinstance(each, ExploringDrafter) for each in drafters):
            self.explore = self._explore
        if any(isinstance(each, SamplingDrafter) for each in drafters):
            self.sample = self._sample
        if any(isinstance(each, NgramDrafter) for each in drafters):
            self.observe_ngrams = self._observe_ngrams

    def _num_of(self, part: Part) -> int:
        return self._guarded(part, lambda: num_successors_of(part.drafter), 0)

    @property
    def has_prewarmed(self) -> bool:
        """Whether a part has a prewarmed table, so that no prompts need be harvested."""
        return any(has_table(part.drafter) for part in self._parts)

    @property
    def sources(self) -> Mapping[str, SourceStats]:
        """Counts and times by part, and of the sources that a part has itself."""
        found = {}
        for part in self._parts:
            found[part.name] = part.stats
            own: Mapping[str, SourceStats] = {}
            if isinstance(part.drafter, ReportingDrafter):
                own = self._guarded(part, partial(_sources_of, part.drafter), own)
            if len(own) > 1:
                found |= {f"{part.name}.{name}": stats for name, stats in own.items()}
        return found

    # --- sequences ----------------------------------------------------------------------------

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence in all parts that may learn from it."""
        self._num_opened += 1
        sequence = _Sequence([*prompt_ids], len(prompt_ids))
        self._sequences[self._num_opened] = sequence
        for source, part in enumerate(self._parts):
            if not part.opens_late:
                self._open(source, part, sequence)
        return self._num_opened

    def _open(self, source: int, part: Part, sequence: _Sequence) -> None:
        """Begin a sequence in one part, and tell it what was emitted since."""
        num_prompt = sequence.num_prompt

        def begin() -> None:
            handle = part.drafter.open(sequence.text[:num_prompt])
            sequence.handles[source] = handle
            if len(sequence.text) > num_prompt:
                part.drafter.observe(handle, sequence.text[num_prompt:])

        self._guarded(part, begin, None)

    def close(self, sequence: int) -> None:
        """End a sequence in all parts."""
        for source, handle in self._sequences.pop(sequence).handles.items():
            part = self._parts[source]
            self._guarded(part, partial(part.drafter.close, handle), None, even_if_dropped=True)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Tell all parts what a step emitted, and learn from what they had proposed."""
        known = self._sequences[sequence]
        known.text += token_ids
        for source, handle in known.handles.items():
            part = self._parts[source]
            self._guarded(part, partial(part.drafter.observe, handle, token_ids), None)
        self._num_emitted += len(token_ids)
        self._num_observed += 1
        emitted = [*token_ids[known.num_forced :]]
        if known.asked and emitted:
            with self._lock:
                self._learn(known, emitted)
        known.asked, known.drafts, known.joined, known.drawing = {}, {}, None, None

    def _learn(self, known: _Sequence, emitted: list[int]) -> None:
        """Learn what became of the drafts of each part."""
        if known.joined is not None:
            matched = self._joining.learn(known.joined, emitted)
        else:
            matched = {each: matched_depth(known.drafts[each], emitted) for each in known.drafts}
        num_accepted = len(emitted) - 1
        for source, asked in known.asked.items():
            if not asked.was_asked:
                continue
            self._parts[source].stats.num_accepted_tokens += matched[source]
            without = 0 if asked.before is None else matched_depth(asked.before, emitted)
            if known.joined is not None:  # it has what the cheaper ones proposed, too
                without = min(without, num_accepted)
            self._payoffs.record_gain(source, asked.level, num_accepted - without, asked.sec)

    # --- drafts -------------------------------------------------------------------------------

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Ask the parts that are worth it, and join what they propose."""
        begun = perf_counter()
        if self._num_observed or self._start is None:
            self._begin_step(begun)
        known = self._sequences[sequence]
        known.num_forced = max(0, len(committed) - len(known.text))
        known.asked, known.drafts, known.joined, known.drawing = {}, {}, None, None
        order = self._order()
        if self._draws:
            draft = self._drafted_to_draw(known, order, committed, max_draft_tokens)
        else:
            draft = self._drafted_together(known, order, committed, max_draft_tokens)
        self._num_drafted += 1
        self._step += known.asked.items()
        self._asking_sec += perf_counter() - begun
        return draft

    def _order(self) -> list[int]:
        """Return the parts in the order in which they are asked, the cheapest first."""
        working = [source for source, part in enumerate(self._parts) if not part.is_dropped]
        if self._asks_all or len(working) < 2:
            return working
        with self._lock:
            return self._payoffs.by_cost(working)

    def _drafted_together(
        self,
        known: _Sequence,
        order: Sequence[int],
        committed: Sequence[int],
        max_draft_tokens: int,
    ) -> Draft:
        """Return one draft out of those of the parts that are worth asking."""
        draft = Draft.empty()
        for source in order:
            if self._is_to_be_asked(source, known, draft):
                found = self._ask(source, known, committed, max_draft_tokens)
                if found is not None:
                    known.drafts[source] = found
                    with self._lock:
                        known.joined = self._joining.join({**known.drafts}, max_draft_tokens)
                    draft = known.joined.draft
        return draft

    def _is_to_be_asked(self, source: int, known: _Sequence, before: Draft) -> bool:
        """Return whether to ask a source, now that cheaper ones have proposed what they have."""
        with self._lock:
            level = self._payoffs.level_of(float(before.probs.sum()))
            is_asked = self._asks_all or self._pays(source, level, known)
        known.asked[source] = _Asked(level, is_asked, before if known.drafts else None)
        return is_asked

    def _pays(self, source: int, level: int, known: _Sequence) -> bool:
        payoffs, part = self._payoffs, self._parts[source]
        is_open = source in known.handles
        if type(part.drafter) is PoolDrafter:
            return True  # as without the other parts: what it knows comes and goes too fast
        if payoffs.is_cheap(source) or not (part.opens_late or payoffs.is_known(source)):
            return True
        num_prompt = 0 if is_open else len(known.text)
        num_to_come = max(0, self._max_length - len(known.text))
        return payoffs.is_worth_asking(source, level, num_prompt, num_to_come)

    def _ask(
        self, source: int, known: _Sequence, committed: Sequence[int], max_draft_tokens: int
    ) -> Draft | None:
        """Return a source's draft; None where it fails."""
        part = self._parts[source]
        start = perf_counter()
        num_to_run = 0 if source in known.handles else len(known.text)
        if num_to_run:
            self._open(source, part, known)

        def ask() -> Draft:
            draft = part.drafter.draft(known.handles[source], committed, max_draft_tokens)
            # Looking at a pool's drafts would take as long as half of drafting them.
            return draft if type(part.drafter) is PoolDrafter else checked(draft, max_draft_tokens)

        draft = self._guarded(part, ask, None)
        sec = perf_counter() - start
        if draft is None:
            known.asked[source].was_asked = False
            return None
        part.stats.num_asked += 1
        part.stats.num_draft_tokens += len(draft)
        part.stats.sec += sec
        known.asked[source].sec = sec
        with self._lock:
            self._payoffs.record_asking(source, sec, num_to_run)
        return draft

    def _begin_step(self, now: float) -> None:
        """Learn how long the last step took, and begin another."""
        if self._start is not None and self._num_emitted:
            sec = now - self._start
            # A budget may rest for some steps; rows that share a step share its seconds.
            is_one = self._num_drafted == 1 and self._num_observed == 1
            with self._lock:
                num_steps = self._num_observed / max(1, self._num_drafted)
                self._payoffs.record_step(sec, self._num_emitted, num_steps)
                if is_one and len(self._sequences) == 1:
                    for source, asked in self._step:
                        self._payoffs.record_rest(
                            source, asked.level, asked.was_asked, sec - self._asking_sec
                        )
        self._start, self._asking_sec = now, 0.0
        self._num_emitted = self._num_observed = self._num_drafted = 0
        self._step = []

    # --- drawn drafts ---------------------------------------------------------------------------

    def _drafted_to_draw(
        self,
        known: _Sequence,
        order: Sequence[int],
        committed: Sequence[int],
        max_draft_tokens: int,
    ) -> Draft:
        """Choose one source before anything is drawn, and return its draft.

        A pool draws only when it is told how much. What it proposes before is not drawn, so it may
        decide whether another source is worth asking instead.
        """
        draft = Draft.empty()
        first = next((each for each in order if not self._parts[each].opens_late), None)
        if first is not None and self._is_to_be_asked(first, known, draft):
            found = self._ask(first, known, committed, max_draft_tokens)
            if found is not None:
                draft = known.drafts[first] = found
                known.drawing = first
        others = [
            each for each in order if each != first and self._is_to_be_asked(each, known, draft)
        ]
        if self._asks_all:  # all processes must choose the same
            others = [] if known.drafts else others[:1]
        elif len(others) > 1:
            with self._lock:
                gains = {s: self._payoffs.net_gain(s, known.asked[s].level) for s in others}
            others = [max(others, key=lambda each: gains[each])]
        for source in order:
            if source != first:
                known.asked[source].was_asked = source in others
        for source in others:
            found = self._ask(source, known, committed, max_draft_tokens)
            if found is not None:
                draft = known.drafts[source] = found
                known.drawing = source
        return draft

    def _sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> Draft:
        """Draw with the part that drafts this step."""
        known = self._sequences[sequence]
        source = known.drawing
        assert source is not None
        part, drafter = self._parts[source], self._parts[source].drafter
        if not isinstance(drafter, SamplingDrafter):
            return known.drafts[source].first(max_draft_tokens)  # chosen, not drawn
        handle = known.handles[source]

        def draw() -> Draft:
            drawn = drafter.sample(handle, committed, max_draft_tokens, rng)
            return checked(drawn, max_draft_tokens)

        known.drafts[source] = self._guarded(part, draw, Draft.empty())
        return known.drafts[source]

    # --- what else parts may do ---------------------------------------------------------------

    def _harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Tell the parts that harvest what the target found likely, as much as each asks for."""
        for source, handle in self._sequences[sequence].handles.items():
            part, num = self._parts[source], self._num_successors[source]
            if num and isinstance(part.drafter, HarvestingDrafter):
                mine = successors
                if num < self.num_successors:
                    mine = Successors(successors.token_ids[:, :num], successors.probs[:, :num])
                tell = partial(part.drafter.harvest, handle, committed, token_ids, parents, mine)
                self._guarded(part, tell, None)

    def _explore(
        self, sequence: int, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Name what the parts would explore, each token once, the most worthwhile first."""
        named = [(np.empty(0, np.int32), np.empty(0))]
        for source, handle in self._sequences[sequence].handles.items():
            part, drafter = self._parts[source], self._parts[source].drafter
            if isinstance(drafter, ExploringDrafter):
                explore = partial(drafter.explore, handle, excluded, max_tokens)
                found = self._guarded(part, partial(_explored, drafter, explore), named[0])
                named.append(found)
        if len(named) < 3:
            return named[-1]
        token_ids, worths = map(np.concatenate, zip(*named, strict=True))
        order = np.argsort(-worths, kind="stable")
        _, firsts = np.unique(token_ids[order], return_index=True)
        kept = order[np.sort(firsts)][:max_tokens]
        return token_ids[kept], worths[kept]

    def _observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Tell the parts that learn n-grams those of a lookahead window."""
        for source, handle in self._sequences[sequence].handles.items():
            part = self._parts[source]
            if isinstance(part.drafter, NgramDrafter):
                self._guarded(part, partial(part.drafter.observe_ngrams, handle, ngrams), None)

    def _guarded(
        self, part: Part, ask: Callable[[], _T], instead: _T, *, even_if_dropped: bool = False
    ) -> _T:
        """Return what `ask` returns, or `instead` where the part fails or has failed."""
        if part.is_dropped and not even_if_dropped:
            return instead
        try:
            return ask()
        except Exception as failure:
            if self._is_strict:
                raise
            if not part.is_dropped:
                part.is_dropped = True
                warnings.warn(
                    f"lade goes on without the drafter {part.name!r}: it failed "
                    f"({in_one_line(failure)}); Config(strict_drafter=True) raises it",
                    DrafterWarning,
                    stacklevel=2,
                )
            return instead


def _explored(
    drafter: Drafter,
    explore: Callable[[], tuple[NDArray[np.int32], NDArray[np.float64]]],
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    named = explore()
    return named if type(drafter) is PoolDrafter else checked_tokens(*named)


def _sources_of(drafter: ReportingDrafter) -> Mapping[str, SourceStats]:
    return {**drafter.sources}
