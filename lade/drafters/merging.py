"""What `Merged` does in a call: asks its parts, joins their drafts, and learns what came of them.

Which parts are worth asking is decided in `lade/budget/sources.py`; drafts are joined by
`joining.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.budget.calibration import Calibration, Outcome
from lade.budget.sources import SourceCosts, Sources
from lade.compat import mesh_of
from lade.drafters.joining import joined
from lade.drafters.prediction import Prediction
from lade.drafting.drafter import Abilities, Drafter, DraftingCall, sources_of
from lade.drafting.drafts import matched_depth
from lade.drafting.guard import Guard
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors
from lade.stats import SourceStats
from ngram_pool import Draft

_NONE = Abilities()  # until a part was looked at


@dataclass(slots=True)
class Part:
    """One of the drafters in a call."""

    name: str
    drafter: Drafter
    guard: Guard  # drops it, with one warning, where it fails
    able: Abilities = _NONE
    # For the call, as models are: then `draft` draws where drafts are drawn.
    is_made: bool = False
    stats: SourceStats = field(default_factory=SourceStats)

    @property
    def is_pool(self) -> bool:
        """Whether it is asked at every step: what pools know comes and goes too fast to measure."""
        return isinstance(self.drafter, PoolDrafter | Prediction)

    @property
    def is_prediction(self) -> bool:
        """Whether it knows what the answer will probably be, or that it does not."""
        return isinstance(self.drafter, Prediction)


class _Asked(NamedTuple):
    """A part that was asked for a draft, and what was known by then."""

    source: int
    before: Draft  # what they proposed
    after: Draft  # the same with the part's own
    draft: Draft  # its own
    sec: float


@dataclass(slots=True)
class _MergedSequence:
    """A sequence of the call."""

    text: list[int]
    handles: dict[int, int] = field(default_factory=dict)  # by part
    num_run: dict[int, int] = field(default_factory=dict)  # tokens of the text, by part
    # Of the last proposal, until its outcome is known:
    asked: list[_Asked] = field(default_factory=list)
    num_forced: int = 0  # tokens that a grammar forced before it


class MergedDrafter(Drafter):
    """The drafter of one call by `Merged`; it can do what one of its parts can.

    Args:
        asks_all: whether all parts are asked at every step, whatever that costs.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        costs: Sequence[SourceCosts],
        call: DraftingCall,
        *,
        asks_all: bool = False,
    ) -> None:
        self._parts = parts
        self._costs = costs
        self._sources = Sources(costs)
        self._calibrations = [Calibration() for _ in parts]
        self._draws = call.rngs is not None
        # Times differ between processes that run a model together.
        self._asks_all = asks_all or mesh_of(call.model) is not None
        self._max_length = call.max_length
        self._open: dict[int, _MergedSequence] = {}
        self._num_opened = 0
        # The step under way: when its first draft was asked for, rows drafted for, rows observed
        # and tokens emitted since.
        self._begun: float | None = None
        self._num_drafted = self._num_observed = self._num_emitted = 0
        able = [part.able for part in parts]
        self.num_successors = max(each.num_successors for each in able)
        self.draws = any(each.draws for each in able)
        self.learns_ngrams = any(each.learns_ngrams for each in able)
        self.has_table = any(each.has_table for each in able)

    @property
    def sources(self) -> Mapping[str, SourceStats]:
        """Counts and times by part, and of the sources that a part has itself."""
        found = {}
        for part in self._parts:
            found[part.name] = part.stats
            own: Mapping[str, SourceStats] = {}
            own = part.guard.ask(partial(sources_of, part.drafter), own, even_if_failed=True)
            if len(own) > 1:
                found |= {f"{part.name}.{name}": stats for name, stats in own.items()}
        return found

    # --- sequences ----------------------------------------------------------------------------

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence in all parts."""
        self._num_opened += 1
        known = self._open[self._num_opened] = _MergedSequence([*prompt_ids])
        for source, part in enumerate(self._parts):
            part.guard.ask(partial(_open, part.drafter, source, known), None)
        return self._num_opened

    def close(self, sequence: int) -> None:
        """End a sequence in all parts."""
        for source, handle in self._open.pop(sequence).handles.items():
            self._parts[source].guard.tell("close", handle, even_if_failed=True)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Tell all parts what a step emitted, and learn from what they had proposed."""
        known = self._open[sequence]
        known.text += token_ids
        for source, handle in known.handles.items():
            self._parts[source].guard.tell("observe", handle, token_ids)
        self._num_emitted += len(token_ids)
        self._num_observed += 1
        emitted = [*token_ids[known.num_forced :]]
        # Of a draft that was not drawn from, nobody knows how much would have been verified.
        most = len(emitted) - (0 if self._draws else 1)
        for source, before, after, draft, sec in known.asked if emitted else ():
            if not self._draws:
                self._calibrations[source].record([Outcome(0, draft, emitted)])
            self._parts[source].stats.num_accepted_tokens += matched_depth(draft, emitted)
            num_added = min(most, matched_depth(after, emitted))
            num_added -= min(most, matched_depth(before, emitted))
            self._sources.record_gain(source, float(before.probs.sum()), num_added, sec)
        known.asked = []

    # --- drafts -------------------------------------------------------------------------------

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Ask the parts that are worth it, and join what they propose.

        Where drafts are drawn, one part drafts, which is chosen before anything is drawn. A pool
        draws only when it is told how much, so what it proposes before may decide whether another
        part is worth asking instead.
        """
        self._begin_step(perf_counter())
        known = self._open[sequence]
        known.num_forced = max(0, len(committed) - len(known.text))
        known.asked = []
        drafts: list[Draft] = []
        draft = Draft.empty()
        for source in self._order():
            part = self._parts[source]
            if self._draws and drafts and (self._asks_all or part.is_pool):
                continue
            if not self._pays(source, float(draft.probs.sum()), known):
                continue
            start, before = perf_counter(), draft
            handle = known.handles.get(source)
            found = part.guard.draft(handle, committed, max_draft_tokens)
            if found is None or (self._draws and part.is_prediction and not len(found)):
                continue
            if self._draws:
                drafts, draft = [found], found
            else:
                believed = self._calibrations[source].believed(found.probs)
                drafts.append(replace(found, probs=np.minimum.accumulate(believed)))
                draft = joined(drafts, max_draft_tokens)
            sec = perf_counter() - start
            known.asked.append(_Asked(source, before, draft, found, sec))
            self._count(source, known, found, sec)
            if self._draws and part.is_made:
                break
        self._num_drafted += 1
        return draft

    def _order(self) -> list[int]:
        """Return the parts in the order in which they are asked, the cheapest first."""
        working = [s for s, part in enumerate(self._parts) if not part.guard.has_failed]
        if not self._asks_all and len(working) > 1:
            working = self._sources.by_cost(working)
        if self._draws:  # those that are not drawn from yet come first, before them a prediction
            working.sort(
                key=lambda s: (not self._parts[s].is_prediction, self._parts[s].is_made),
            )
        return working

    def _pays(self, source: int, num_expected: float, known: _MergedSequence) -> bool:
        if self._asks_all or self._parts[source].is_pool:
            return True
        num_to_come = max(0, self._max_length - len(known.text))
        return self._sources.is_worth_asking(
            source, num_expected, self._num_behind(source, known), num_to_come
        )

    def _num_behind(self, source: int, known: _MergedSequence) -> int:
        """Return how many tokens of the text a part has not run; 0 for one that runs none."""
        is_model = self._parts[source].is_made
        return len(known.text) - known.num_run.get(source, 0) if is_model else 0

    def _count(self, source: int, known: _MergedSequence, draft: Draft, sec: float) -> None:
        self._costs[source].record(sec, self._num_behind(source, known))
        known.num_run[source] = len(known.text)
        stats = self._parts[source].stats
        stats.num_asked += 1
        stats.num_draft_tokens += len(draft)
        stats.sec += sec

    def _begin_step(self, now: float) -> None:
        """Learn how long the last step took, and begin another."""
        if self._begun is not None and not self._num_observed:
            return  # another row is drafted for
        if self._begun is not None:
            # A budget may rest for some steps; rows that share a step share its seconds.
            num_steps = self._num_observed / max(1, self._num_drafted)
            self._sources.record_step(now - self._begun, self._num_emitted, num_steps)
        self._begun = now
        self._num_drafted = self._num_observed = self._num_emitted = 0

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> Draft:
        """Draw with the part that drafts this step."""
        known = self._open[sequence]
        asked = known.asked[-1]
        part, handle = self._parts[asked.source], known.handles[asked.source]
        if not part.able.draws:
            return asked.draft.first(max_draft_tokens)  # chosen, not drawn
        drawn = part.guard.sample(handle, committed, max_draft_tokens, rng)
        known.asked[-1] = asked._replace(draft=drawn, after=drawn)
        return drawn

    # --- what else parts may do ---------------------------------------------------------------

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Tell the parts that harvest what the target found likely, as much as each asks for."""
        for source, handle in self._open[sequence].handles.items():
            part = self._parts[source]
            if num := part.able.num_successors:
                mine = Successors(successors.token_ids[:, :num], successors.probs[:, :num])
                part.guard.tell("harvest", handle, committed, token_ids, parents, mine)

    def explore(
        self, sequence: int, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Name what the parts would explore, each token once, the most worthwhile first."""
        named = [(np.empty(0, np.int32), np.empty(0))]
        for source, handle in self._open[sequence].handles.items():
            part = self._parts[source]
            if part.able.num_successors:
                named.append(part.guard.explore(handle, excluded, max_tokens))
        if len(named) < 3:
            return named[-1]
        token_ids, worths = map(np.concatenate, zip(*named, strict=True))
        order = np.argsort(-worths, kind="stable")
        _, firsts = np.unique(token_ids[order], return_index=True)
        kept = order[np.sort(firsts)][:max_tokens]
        return token_ids[kept], worths[kept]

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Tell the parts that learn n-grams those of a lookahead window."""
        for source, handle in self._open[sequence].handles.items():
            if self._parts[source].able.learns_ngrams:
                self._parts[source].guard.tell("observe_ngrams", handle, ngrams)


def guard_of(name: str, drafter: object, call: DraftingCall) -> Guard:
    """Return what asks one of the drafters of a call, or what makes it."""
    device = None if call.target is None else call.target.device
    return Guard(drafter, f"the drafter {name!r}: it", call.is_strict, device)


def alone(
    name: str, drafter: Drafter, costs: SourceCosts, call: DraftingCall, *, asks_all: bool
) -> Drafter:
    """Return what asks one drafter of a call where it pays, or always; itself if it is a part."""
    if call.is_part:
        return drafter
    part = Part(name, drafter, guard_of(name, drafter, call), is_made=True)
    return MergedDrafter([part], [costs], call, asks_all=asks_all)


def _open(drafter: Drafter, source: int, known: _MergedSequence) -> None:
    known.handles[source] = drafter.open([*known.text])
