"""The sources of a call's drafts: one list, each asked through one guard, joined to one tree.

Which of them are worth asking is decided in `lade/budget/asking.py`; how much of what they propose
is verified, in `budget.py` there. What windows find is told by `speculator.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lade.budget.asking import Asking, Pace, SourceCosts
from lade.budget.calibration import Calibration, Outcome
from lade.compat import mesh_of, placeholders_of
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import (
    after,
    checked,
    checked_ids,
    exploring,
    joined,
    matched_depth,
    narrowed,
)
from lade.drafting.guard import Guard
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors, compile_kernels
from lade.stats import SourceStats
from lade.tree import Tree
from ngram_pool import Draft, NGramPool, SampledDraft

_NO_TOKENS = np.empty(0, np.int32)


class Source(Guard):
    """One drafter in a call: what it can do, what it did, and its handles of the rows.

    Args:
        drafter: what the user gave, or a pool.
        name: in statistics; its class if it is none of several.
        costs: of its drafts in earlier calls, measured on.
        is_part: whether it is one of several.
        is_strict, device: see `Guard`.
    """

    def __init__(
        self,
        drafter: Drafter | NGramPool,
        name: str = "",
        *,
        costs: SourceCosts | None = None,
        is_part: bool = False,
        is_strict: bool = False,
        device: torch.device | None = None,
    ) -> None:
        kind = type(drafter).__name__
        is_named = is_part or name not in ("", kind)
        what = f"the drafter {name!r}: it" if is_named else f"drafts: {kind}"
        super().__init__(drafter, what, is_strict, device)
        self.name = name
        self.is_part = is_part
        self.stats = SourceStats()
        self.calibration = Calibration()
        self.costs = SourceCosts() if costs is None else costs
        self.num_successors = 0
        self.learns_ngrams = self.is_free = False
        # Whether it draws when it is told how much, or at once, where drafts are drawn.
        self.is_pool = self.is_made = False
        #: Whether it is a model that is asked only where that pays; None for no model.
        self.is_measured: bool | None = None
        self.handles: dict[int, Any] = {}  # by row
        self.num_run: dict[int, int] = {}  # tokens of the text at its last draft, by row
        self._call: DraftingCall | None = None

    def make(self, call: DraftingCall) -> "Source":
        """Make what drafts for a call, and look at it.

        Raises:
            LadeError: it cannot draft for this call.
        """
        self._call = call
        self.ask(self._make, None, call, may_refuse=True)
        return self

    def _make(self, call: DraftingCall) -> None:
        given = self.drafter
        if isinstance(given, NGramPool):
            pools = (NGramPool(), (given,)) if given.is_read_only else (given, ())
            made: Any = PoolDrafter(pools[0], call.max_candidates, layers=pools[1])
        else:
            made = given.for_call(call)
        if not isinstance(made, Drafter):
            raise TypeError(f"expected for_call to return a lade.Drafter, got {made!r}")
        self.asks(made)
        self.is_pool = isinstance(made, PoolDrafter)
        self.is_made = not self.is_pool and type(given).for_call is not Drafter.for_call
        wanted: Any = made.num_successors
        if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer):
            raise TypeError(f"expected num_successors to be an int, got {wanted!r}")
        if wanted < 0:
            raise ValueError(f"expected num_successors of at least 0, got {wanted}")
        if wanted:
            compile_kernels()
        self.num_successors = int(wanted)
        self.learns_ngrams, self.is_free = bool(made.learns_ngrams), bool(made.is_free)
        self.is_measured = getattr(made, "is_measured", None)

    def open(self, row: int, context: Sequence[int]) -> None:
        """Begin a row; called by `ask`."""
        self.handles[row] = self.drafter.open([*context])

    def draft(
        self,
        row: int,
        committed: Sequence[int],
        most: int,
        rng: np.random.Generator | None = None,
    ) -> Draft:
        """Return a valid draft, drawn by a pool if there is an `rng`; called by `ask`."""
        handle = self.handles.get(row)
        if rng is None:
            draft: Draft = self.drafter.draft(handle, committed, most)
        else:
            draft = self.drafter.sample(handle, committed, most, rng)
        # What lade's own drafters return is not checked: that took as long as half of drafting.
        if not self.is_own:
            draft = checked(draft, most)
        if isinstance(draft, SampledDraft):
            self._check_drawn(draft)
        return draft

    def _check_drawn(self, draft: SampledDraft) -> None:
        """Raise if a draft that is drawn cannot be verified as it is."""
        assert self._call is not None
        if self._call.rngs is None:
            raise ValueError("expected a Draft where drafts are not drawn, got a SampledDraft")
        most = self._call.max_candidates
        if most is not None and len(draft):
            # Of siblings, too: a later one is drawn only because an earlier one may be rejected.
            num_leaves = len(draft) - len(np.unique(draft.parents[draft.parents >= 0]))
            if num_leaves > most:
                raise ValueError(
                    f"expected a drawn draft of at most {most} paths, got {num_leaves}"
                )

    def close(self, row: int) -> None:
        """End a row."""
        self.num_run.pop(row, None)
        if row in self.handles:
            self.ask("close", None, self.handles.pop(row), even_if_failed=True)


class _Asked(NamedTuple):
    """A source that was asked for a draft, and what was known by then."""

    source: Source
    before: Draft  # what was proposed before
    after: Draft  # the same with the source's own
    draft: Draft  # its own
    sec: float


@dataclass(slots=True)
class _DraftedRow:
    """A row of the call, and its last proposal."""

    length: int  # of its text
    asked: list[_Asked] = field(default_factory=list)  # until the outcome is known
    source: Source | None = None  # the last that drafted
    forced: list[int] = field(default_factory=list)  # first tokens, where a grammar forces them
    draft: Draft = field(default_factory=Draft.empty)  # tokens to explore included
    room: int = 0  # maximum depth that the target can run


class Proposer:
    """Source of the drafts of every row of a batch, in two phases.

    `propose` asks for all there is, so that a budget can decide how much of it to verify; `draw`
    returns that much of it, or draws it anew where drafts are random. The number of nodes drawn
    must not depend on the tokens drawn, or the text would no longer have the right distribution.

    Sources are asked in the order of their cost, where the tokens that they add are worth their
    time. Tokens on the same path become one node, whose probability is learned from what became of
    each source's nodes. Where drafts are drawn, one source alone drafts a step. It is chosen before
    anything is drawn; choosing among draws would favour some tokens, and joining them would change
    what each was drawn from.

    No source can fail the call: whatever one raises and an invalid draft become a warning, and it
    is not asked again (`guard.py`).

    Args:
        sources: of the call.
        grammar: asks for the tokens that a grammar forces on the text, if there is one.
    """

    def __init__(
        self, sources: Sequence[Source], call: DraftingCall, grammar: Guard | None = None
    ) -> None:
        self._sources = sources
        self._call = call
        self._grammar = grammar
        model = call.model
        self._placeholders = np.array(() if model is None else placeholders_of(model), np.int32)
        self._pace = Pace()
        self._asking = {source: Asking(source.costs, self._pace) for source in sources}
        # Alone, a pool or a drafter of the user's is asked at every step; nothing is learned of it.
        self._learns = any(s.is_part or s.is_measured is not None for s in sources)
        # Times differ between processes that run a model together.
        is_shared = model is not None and mesh_of(model) is not None
        self._asks_all = is_shared or [s.is_measured for s in sources] == [False]
        # Where drafts are drawn, or paths are few, every node should be as likely as can be.
        explores = call.max_candidates is None and call.rngs is None
        self._explorer = next((s for s in sources if s.is_pool and explores), None)
        self._rows: dict[int, _DraftedRow] = {}
        # The step under way: when its first draft was asked for, rows drafted for, rows observed
        # and tokens emitted since.
        self._begun: float | None = None
        self._num_drafted = self._num_observed = self._num_emitted = 0

    @classmethod
    def alone(cls, drafter: Drafter, vocab_size: int) -> "Proposer":
        """Return the proposer of one drafter, outside of any call."""
        call = DraftingCall(None, vocab_size, max_length=2**31)
        return cls([Source(drafter).make(call)], call)

    @property
    def num_successors(self) -> int:
        """Top-k target tokens to report per node; 0 for none."""
        return max((s.num_successors for s in self._sources if not s.has_failed), default=0)

    @property
    def has_table(self) -> bool:
        """Whether a pool has a prewarmed table; then the ends of prompts are not harvested.

        That took more time (0.7 % of an answer) than it saved.
        """
        return any(s.is_pool and s.drafter.has_table for s in self._sources)

    @property
    def learns_ngrams(self) -> bool:
        """Whether a source learns the n-grams of lookahead windows."""
        return any(source.learns_ngrams for source in self._sources)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may force tokens."""
        return self._grammar is not None

    def sources(self) -> dict[str, SourceStats]:
        """Return what each source did, where there are several or models."""
        return {source.name: source.stats for source in self._sources} if self._learns else {}

    # --- rows ---------------------------------------------------------------------------------

    def open(self, row: int, context: Sequence[int]) -> None:
        """Begin a row with its prompt."""
        self._rows[row] = _DraftedRow(len(context))
        for source in self._sources:
            source.ask(source.open, None, row, context)

    def is_open(self, row: int) -> bool:
        """Return whether a row has begun and not ended."""
        return row in self._rows

    def close(self, row: int) -> None:
        """End a row."""
        self._rows.pop(row, None)
        for source in self._sources:
            source.close(row)

    def close_all(self) -> None:
        """End all open rows."""
        for row in [*self._rows]:
            self.close(row)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Tell all sources what a step emitted, and learn from what they had proposed."""
        state = self._rows[row]
        state.length += len(token_ids)
        for source in self._sources:
            if row in source.handles:
                source.ask("observe", None, source.handles[row], token_ids)
        self._num_emitted += len(token_ids)
        self._num_observed += 1
        emitted = [*token_ids[len(state.forced) :]]
        draws = self._call.rngs is not None
        # Of a draft that was not drawn from, nobody knows how much would have been verified.
        most = len(emitted) - (0 if draws else 1)
        for source, before, with_own, draft, sec in state.asked if emitted else ():
            if not draws:
                source.calibration.record([Outcome(row, draft, emitted)])
            source.stats.num_accepted_tokens += matched_depth(draft, emitted)
            num_added = min(most, matched_depth(with_own, emitted))
            num_added -= min(most, matched_depth(before, emitted))
            self._asking[source].record_gain(float(before.probs.sum()), num_added, sec)
        state.asked = []

    def harvest(self, row: int, context: Sequence[int], tree: Tree, successors: Successors) -> None:
        """Tell harvested successors of the nodes of a row's tree."""
        parents = [-1, *(tree.draft.parents + 1).tolist()]
        self._harvest(row, context, tree.token_ids, parents, successors)

    def harvest_prompt(self, row: int, context: Sequence[int], successors: Successors) -> None:
        """Tell harvested successors of a prompt's last tokens but the very last one."""
        num = successors.num_nodes
        committed, tokens = context[: len(context) - num], context[-1 - num : -1]
        self._harvest(row, committed, tokens, range(-1, num - 1), successors)

    def _harvest(
        self,
        row: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        found: Successors,
    ) -> None:
        for source in self._sources:
            if (num := source.num_successors) and row in source.handles:
                mine = found
                if num < found.token_ids.shape[1]:
                    mine = Successors(found.token_ids[:, :num], found.probs[:, :num])
                handle = source.handles[row]
                source.ask("harvest", None, handle, committed, token_ids, parents, mine)

    def observe_ngrams(self, row: int, ngrams: NDArray[np.int32]) -> None:
        """Tell n-grams [num_ngrams, ngram_size] of a row's lookahead window."""
        for source in self._sources:
            if source.learns_ngrams and row in source.handles:
                source.ask("observe_ngrams", None, source.handles[row], ngrams)

    # --- drafts -------------------------------------------------------------------------------

    def propose(
        self,
        row: int,
        committed: Sequence[int],
        context: Sequence[int],
        room: int,
        max_draft_tokens: int,
    ) -> Draft:
        """Return a draft of what may follow, likeliest nodes first.

        Args:
            committed: the row as logits processors see it, padding included.
            context: the row as drafters see it.
            room: maximum depth that the target can run.
        """
        state = self._rows[row]
        state.room, state.forced, draft = room, [], Draft.empty()
        most = min(room, max_draft_tokens)
        if most > 0 and self._grammar is not None:
            state.forced = self._forced(self._grammar, row, committed, most)
        left = max_draft_tokens - len(state.forced)
        if most > 0 and left > 0:
            ahead = [*context, *state.forced] if state.forced else context
            draft = self._joined(row, state, ahead, left)
            if self._call.max_candidates is not None and not isinstance(draft, SampledDraft):
                draft = narrowed(draft, self._call.max_candidates)
        state.draft = self._possible(after(state.forced, draft) if state.forced else draft, room)
        return state.draft

    def _joined(self, row: int, state: _DraftedRow, context: Sequence[int], most: int) -> Draft:
        """Ask the sources that are worth it, and join what they propose.

        Where drafts are drawn, a pool draws only when it is told how much, so what it proposes
        before may decide whether another source is worth asking instead.
        """
        state.asked, state.source = [], None
        if not self._learns:
            state.source = self._sources[0]
            alone: Draft = state.source.ask(state.source.draft, Draft.empty(), row, context, most)
            return alone
        self._begin_step(perf_counter())
        draws, drafts, draft = self._call.rngs is not None, list[Draft](), Draft.empty()
        for source in self._order():
            num_behind = state.length - source.num_run.get(row, 0) if source.is_made else 0
            if draws and drafts and (self._asks_all or source.is_free):
                continue
            if not self._pays(source, float(draft.probs.sum()), num_behind, state.length):
                continue
            start, before = perf_counter(), draft
            found = source.ask(source.draft, None, row, context, most)
            is_chosen = draws and source.is_free and not source.is_pool
            if found is None or (is_chosen and not len(found)):
                continue
            if draws:
                drafts, draft = [found], found
            elif len(self._sources) == 1:
                draft = found
            else:
                believed = source.calibration.believed(found.probs)
                drafts.append(replace(found, probs=np.minimum.accumulate(believed)))
                draft = joined(drafts, most)
            sec, state.source = perf_counter() - start, source
            state.asked.append(_Asked(source, before, draft, found, sec))
            source.costs.record(sec, num_behind)
            source.num_run[row] = state.length
            source.stats.num_asked += 1
            source.stats.num_draft_tokens += len(found)
            source.stats.sec += sec
            if draws and source.is_made:
                break
        self._num_drafted += 1
        return draft

    def _order(self) -> list[Source]:
        """Return the sources in the order in which they are asked, the cheapest first."""
        working = [source for source in self._sources if not source.has_failed]
        if not self._asks_all:
            working.sort(key=lambda source: source.costs.draft_sec or float("inf"))
        if self._call.rngs is not None:
            # First a prediction, then those that are not drawn from yet.
            working.sort(key=lambda s: (not s.is_free or s.is_pool, s.is_made))
        return working

    def _pays(self, source: Source, num_expected: float, num_behind: int, length: int) -> bool:
        if self._asks_all or source.is_free:
            return True
        num_to_come = max(0, self._call.max_length - length)
        return self._asking[source].is_worth(num_expected, num_behind, num_to_come)

    def _begin_step(self, now: float) -> None:
        """Learn how long the last step took, and begin another."""
        if self._begun is not None and not self._num_observed:
            return  # another row is drafted for
        if self._begun is not None:
            # A budget may rest for some steps; rows that share a step share its seconds.
            sec, num_steps = now - self._begun, self._num_observed / max(1, self._num_drafted)
            self._pace.record(sec, self._num_emitted, num_steps)
            for asking in self._asking.values():
                asking.passed(sec)
        self._begun = now
        self._num_drafted = self._num_observed = self._num_emitted = 0

    # --- tokens to explore ----------------------------------------------------------------------

    def explore(
        self, row: int, others: Sequence[NDArray[np.int32]], max_draft_tokens: int
    ) -> Draft:
        """Add tokens to explore to a row's proposal, and return it with these.

        They are run for what is harvested there, more than for their chance to be right, so nothing
        is learned of the drafter's probabilities from them.

        Args:
            others: tokens that other rows run in this step.
        """
        state = self._rows[row]
        if self._explorer is None or state.forced or min(state.room, max_draft_tokens) < 1:
            return state.draft
        excluded = np.concatenate([state.draft.token_ids, self._placeholders, *others])
        none = _NO_TOKENS, np.empty(0)
        token_ids, worths = self._explorer.ask(
            "explore", none, self._explorer.handles.get(row), excluded, max_draft_tokens
        )
        if len(token_ids):
            args = excluded, self._call.vocab_size, max_draft_tokens
            state.draft = exploring(state.draft, token_ids, worths, *args)
        return state.draft

    # --- drafts that are drawn --------------------------------------------------------------------

    def is_drawn(self, row: int) -> bool:
        """Return whether a row's proposal is drawn already, and so to be verified whole."""
        return isinstance(self._rows[row].draft, SampledDraft)

    def draw(self, row: int, context: Sequence[int], num_nodes: int) -> Draft:
        """Return the first `num_nodes` nodes of the proposal, or as many drawn in their place."""
        state, rngs = self._rows[row], self._call.rngs
        if isinstance(state.draft, SampledDraft):
            return state.draft if num_nodes else state.draft.first(0)
        proposed = state.draft.first(num_nodes)
        num_drawn = len(proposed) - len(state.forced)
        source = state.source
        if rngs is None or num_drawn < 1 or source is None or not source.is_pool:
            return proposed
        ahead = [*context, *state.forced] if state.forced else context
        none = Draft.empty()
        sampled = source.ask(source.draft, none, row, ahead, num_drawn, rngs[row])
        if state.asked:
            state.asked[-1] = state.asked[-1]._replace(draft=sampled, after=sampled)
        return self._possible(after(state.forced, sampled) if state.forced else sampled, state.room)

    @staticmethod
    def _forced(grammar: Guard, row: int, committed: Sequence[int], most: int) -> list[int]:
        """Return the tokens that a grammar forces, none where it fails to say."""

        def ask() -> list[int]:
            forced = grammar.drafter.forced_tokens(row, committed, most)
            return forced if grammar.is_own else checked_ids(forced)[:most]

        forced: list[int] = grammar.ask(ask, [])
        return forced

    def _possible(self, draft: Draft, room: int) -> Draft:
        """Cut a draft before the first node that the target cannot run.

        Such a node is deeper than `room`, or its token is a placeholder or outside the vocabulary,
        as from a pool that learned from another model's text. For a drawn node, the tokens that it
        could have become decide, not the one that it became.
        """
        vocab_size = self._call.vocab_size
        ids = draft.support_token_ids if isinstance(draft, SampledDraft) else draft.token_ids
        unknown = (ids < 0) | (ids >= vocab_size)
        if len(self._placeholders):
            unknown |= np.isin(ids, self._placeholders)
        if isinstance(draft, SampledDraft):
            unknown = np.any(unknown & (draft.support_probs > 0), axis=1)
        if len(draft) <= room and not unknown.any():
            return draft
        impossible = np.flatnonzero((draft.depths > room) | unknown)
        return draft.first(int(impossible[0])) if len(impossible) else draft
