"""`Speculator`: the drafts that each step verifies, and the lessons from its outcome.

A call's sources are one list (`sources.py`). `lade/budget/asking.py` decides which sources are
asked, and `lade/budget/budget.py` how many of their draft tokens are verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed
from torch import Tensor

from lade.batch import Batch, Row
from lade.budget.asking import SourceGate, StepRate
from lade.budget.budget import Budget
from lade.compat import mesh_of, placeholders_of
from lade.drafting.drafter import DraftingCall
from lade.drafting.drafts import after, joined, narrowed
from lade.drafting.sources import Kind, Source
from lade.drafting.successors import Successors, rank, ranked_on_device
from lade.stats import SourceStats, Step, WidthStats
from lade.tree import Tree, matched_path, starts
from ngram_pool import Draft, SampledDraft

_NOTHING = Draft.empty()
_MAX_PENDING = 16  # tokens to run again; from then on, a step without a draft runs them for good


class Runner(Protocol):
    """A target's report on its next forward pass."""

    @property
    def num_pending(self) -> int:
        """Number of committed tokens that the next forward pass runs again."""

    @property
    def marginal_cost(self) -> float | None:
        """Expected tokens that a draft token must add in joint forward passes; None elsewhere."""

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward pass over `num_tokens` of each row."""


class Plan(NamedTuple):
    """The trees that one step runs."""

    trees: dict[Row, Tree]  # the root and the draft to verify
    proposed: Mapping[Row, Draft]  # the whole proposal, verified or not
    starts: dict[Row, int]  # index of each root among the nodes of all trees
    num_tokens: int  # of the largest tree
    num_nodes: int  # of all trees

    @classmethod
    def of(cls, trees: dict[Row, Tree], proposed: Mapping[Row, Draft]) -> "Plan":
        """Return the plan of trees, in ascending order of the rows."""
        sizes = [len(tree.token_ids) for tree in trees.values()]
        return cls(trees, proposed, starts(trees), max(sizes), sum(sizes))

    def without_drafts(self) -> "Plan":
        """Return the plan with the roots alone."""
        roots = {row: tree.without_draft() for row, tree in self.trees.items()}
        return Plan.of(roots, self.proposed)


class _Asked(NamedTuple):
    """A source that was asked for a draft."""

    source: Source
    before: Draft  # joint draft of the sources before it
    draft: Draft  # draft of this source alone
    sec: float


@dataclass(slots=True)
class _DraftedRow:
    """A row that sources draft for, and its last proposal."""

    handles: dict[Source, Any] = field(default_factory=dict)  # of the sources that have opened it
    num_run: dict[Source, int] = field(default_factory=dict)  # tokens of the text at the last draft
    asked: list[_Asked] = field(default_factory=list)  # until the outcome is known
    joint: Draft = _NOTHING  # of all that were asked
    ahead: Sequence[int] = ()  # the text, and the tokens that a grammar forces
    allowance: int = 0  # nodes that a source may propose: the step's wish without forced ones
    forced: list[int] = field(default_factory=list)  # first tokens, if a grammar forces them
    draft: Draft = field(default_factory=Draft.empty)  # forced tokens first, all of it possible
    max_depth: int = 0  # that the target can run


class Speculator:
    """Drafts for the rows of a batch.

    Sources propose as many draft tokens as they can for a row; the budget decides how many of them
    are verified. With rejection sampling, drafts are drawn after that: a number of nodes that
    depended on the drawn tokens would change the distribution of the text.

    Sources are asked in the order of their kinds, if the tokens that they add are worth their time.
    Tokens on the same path become one node, whose probability is learned from how often each
    source's nodes were right. With rejection sampling, one source drafts a step, and it is chosen
    before anything is drawn: a choice among draws would favour some tokens, and joining draws would
    change their distribution.

    No source can fail the call: an exception or an invalid draft becomes a warning, and the source
    is not asked again (`Source.ask`).

    Args:
        batch: the rows and their text.
        sources: the call's sources of drafts.
        call: properties of the call.
        budget: chooses the number of draft tokens.
        runner: reports on the target's next forward pass.
        grammar: source of the tokens that a grammar forces, if there is one.
    """

    def __init__(
        self,
        batch: Batch,
        sources: Sequence[Source],
        call: DraftingCall,
        budget: Budget,
        runner: Runner,
        grammar: Source | None = None,
    ) -> None:
        self._batch = batch
        self._sources = sorted(sources, key=attrgetter("kind"))
        self._call = call
        self._budget = budget
        self._runner = runner
        self._grammar = grammar
        # Processes that share a target measure different times, and must draft in the same steps.
        self._mesh = mesh_of(call.model)
        self._may_rest = self._mesh is None and grammar is None
        self._placeholders = np.array(placeholders_of(call.model), np.int32)
        self._pace = StepRate()
        # Sources that are asked only if they pay. The others are asked at every step.
        self._gates = {
            source: SourceGate(source.costs, self._pace)
            for source in (sources if self._mesh is None else ())
            if source.kind > Kind.POOL and (len(sources) > 1 or source.is_measured)
        }
        self._rows: dict[Row, _DraftedRow] = {}
        # Of the running step: seconds of asking sources, and number of emitted tokens.
        self._asking_sec, self._num_emitted = 0.0, 0

    def sources(self) -> dict[str, SourceStats]:
        """Return statistics by source."""
        return {source.name: source.stats for source in self._sources}

    def widths(self) -> dict[int, WidthStats]:
        """Return how often the budget chose each number of draft tokens, and what it expected."""
        return self._budget.widths

    # --- before a forward -------------------------------------------------------------------

    def open_all(self) -> None:
        """Feed the sources the prompts."""
        for row in self._batch.rows:
            state = self._rows[row] = _DraftedRow()
            for source in self._sources:
                source.ask(source.open, None, state.handles, row.context)

    def roots(self) -> Plan:
        """Return the plan of the prefill, whose roots are the prompts' last tokens."""
        trees = {
            # A prompt of embeddings has no tokens. Only a drafter looks at these roots.
            row: Tree.build([0, *row.context][-1], Draft.empty())
            for row in self._batch.rows
        }
        return Plan.of(trees, {})

    def plan(self, emitting: Sequence[Row]) -> Plan:
        """Return the plan of the next step: drafts for rows that emit, roots for the others."""
        wish = self._budget.wish
        rests = self._may_rest and self._budget.is_resting
        proposed = {row: self.propose(row, wish) for row in (() if rests else emitting)}
        nums = self._nums_of_nodes(proposed)
        drafts = {row: self._drawn(row, num) for row, num in nums.items()}
        if self._mesh is not None:
            drafts = dict(zip(drafts, agreed([*drafts.values()], self._mesh), strict=True))
        trees: dict[Row, Tree] = {}
        for row in self._batch.running:
            trees[row] = Tree.build(row.token_ids[-1], drafts.get(row, _NOTHING))
        return Plan.of(trees, proposed)

    def _nums_of_nodes(self, drafts: Mapping[Row, Draft]) -> dict[Row, int]:
        """Return how many draft tokens of each row to verify."""
        runner, budget = self._runner, self._budget
        if not drafts or runner.num_pending >= _MAX_PENDING:
            return dict.fromkeys(drafts, 0)
        if self._call.rngs is not None:
            drawn = {
                row: len(each) for row, each in drafts.items() if isinstance(each, SampledDraft)
            }
            if drawn:  # the number of verified tokens must not depend on the drawn tokens
                return dict.fromkeys(drafts, max(drawn.values())) | drawn
        probs = {row: draft.probs for row, draft in drafts.items()}
        nums = budget.nums_of_nodes(probs, runner.num_pending, runner.marginal_cost)
        if len(nums) == 1:
            # The slots that pad a forward to its width may as well hold draft tokens.
            (num,) = nums.values()
            nums = dict.fromkeys(nums, runner.width_of(1 + num) - 1)
        return nums

    # --- a row's draft ----------------------------------------------------------------------

    def propose(self, row: Row, wish: int) -> Draft:
        """Return a draft of at most `wish` tokens for a row, likeliest nodes first."""
        state, context = self._rows[row], row.context
        capacity_left = self._call.max_length - len(row.token_ids)
        max_depth = min(capacity_left, self._batch.lead_left(row)) - 1  # the bonus token follows
        state.max_depth, state.forced, state.asked, draft = max_depth, [], [], _NOTHING
        most = min(max_depth, wish)
        if most > 0 and (grammar := self._grammar) is not None:
            state.forced = grammar.ask(grammar.forced, [], row.index, row.token_ids, most)
        state.allowance = wish - len(state.forced)
        if state.forced and self._call.rngs is not None:
            state.allowance = 0  # nothing is drawn behind them
        if most > 0 and state.allowance > 0:
            state.ahead = [*context, *state.forced] if state.forced else context
            strategy = self._likeliest if self._call.rngs is None else self._one
            draft = state.joint = strategy(state)
            if self._call.max_candidates is not None and not isinstance(draft, SampledDraft):
                draft = narrowed(draft, self._call.max_candidates)
        state.draft = self._possible(state, draft)
        return state.draft

    def _likeliest(self, state: _DraftedRow) -> Draft:
        """Join the drafts of sources, the likeliest nodes first."""
        draft, drafts = _NOTHING, list[Draft]()
        for source in self._sources:
            found = self._ask(source, state, draft)
            if found is not None and len(self._sources) == 1:
                draft = found
            elif found is not None:
                believed = source.calibration.believed(found.probs)
                drafts.append(replace(found, probs=np.minimum.accumulate(believed)))
                draft = joined(drafts, state.allowance)
        return draft

    def _one(self, state: _DraftedRow) -> Draft:
        """Return the draft of one source, chosen before anything is drawn.

        A pool's proposal, which is not drawn yet, may decide whether a model is asked instead.
        """
        chosen: Draft | None = None
        for source in self._sources:
            if chosen is not None and source not in self._gates:
                continue
            found = self._ask(source, state, chosen or _NOTHING)
            if found is None or (source.kind is Kind.FREE and not found):
                continue
            chosen = found
            if source.kind is Kind.MODEL:
                break
        return chosen or _NOTHING

    def _ask(self, source: Source, state: _DraftedRow, before: Draft) -> Draft | None:
        """Return a source's draft; None if it has failed, or adds too little to those before."""
        length, gate = len(state.ahead) - len(state.forced), self._gates.get(source)
        num_behind = length - state.num_run.get(source, 0) if source.kind is Kind.MODEL else 0
        if gate is not None:
            num_to_come = max(0, self._call.max_length - length)
            if not gate.is_worth(float(before.probs.sum()), num_behind, num_to_come):
                return None
        start, args = perf_counter(), (state.handles.get(source), state.ahead, state.allowance)
        found: Draft | None = source.ask(source.draft, None, *args)
        if found is None:
            return None
        sec = perf_counter() - start
        if gate is not None:
            source.costs.record(1 + num_behind, sec)
            self._asking_sec += sec
        state.num_run[source] = length
        state.asked.append(_Asked(source, before, found, sec))
        source.stats.num_asked += 1
        source.stats.num_draft_tokens += len(found)
        source.stats.sec += sec
        return found

    def _drawn(self, row: Row, num_nodes: int) -> Draft:
        """Return the first `num_nodes` nodes of the proposal, or as many drawn nodes instead."""
        state, rngs = self._rows[row], self._call.rngs
        if isinstance(state.draft, SampledDraft):
            return state.draft if num_nodes else state.draft.first(0)
        proposed = state.draft.first(num_nodes)
        if rngs is None or state.forced or not proposed:
            return proposed
        source = state.asked[-1].source
        if source.kind is not Kind.POOL:
            return proposed
        args = state.handles.get(source), row.context, len(proposed), rngs[row.index]
        sampled = source.ask(source.draft, _NOTHING, *args)
        state.asked[-1] = state.asked[-1]._replace(draft=sampled)
        state.joint = sampled
        return self._possible(state, sampled)

    def _possible(self, state: _DraftedRow, draft: Draft) -> Draft:
        """Put forced tokens before a draft, and cut it before the first node that cannot be run.

        Such a node is too deep, or its token is a placeholder or outside the vocabulary, as from a
        pool with another model's text. For a drawn node, all tokens that it could have become are
        checked, not only the one that it became.
        """
        if state.forced:
            draft = after(state.forced, draft)
        vocab_size = self._call.vocab_size
        ids = draft.support_token_ids if isinstance(draft, SampledDraft) else draft.token_ids
        unknown = (ids < 0) | (ids >= vocab_size)
        if len(self._placeholders):
            unknown |= np.isin(ids, self._placeholders)
        if isinstance(draft, SampledDraft):
            unknown = np.any(unknown & (draft.support_probs > 0), axis=1)
        if len(draft) <= state.max_depth and not unknown.any():
            return draft
        impossible = np.flatnonzero((draft.depths > state.max_depth) | unknown)
        return draft.first(int(impossible[0])) if len(impossible) else draft

    # --- after a forward --------------------------------------------------------------------

    def rank(self, logits: Tensor, ranked: Successors | None) -> Callable[[], Successors] | None:
        """Find the likeliest tokens after each node, for drafters that harvest.

        Args:
            logits: [1, num_nodes, vocab_size or more].
            ranked: those of these logits if they are known, or None.

        Returns:
            What gets them once they are on the host; None if no drafter harvests.
        """
        wanted = [0, *(each.num_successors for each in self._sources if not each.has_failed)]
        if not (num_successors := max(wanted)):
            return None
        known = logits[..., : self._call.vocab_size]
        # Ranks of wider logits may contain tokens that the model has no embeddings for.
        is_whole = known.shape == logits.shape
        found = (ranked if is_whole else None) or rank(known, num_successors)
        return ranked_on_device(known, num_successors) if found is None else lambda: found

    def observe(self, row: Row, token_ids: Sequence[int]) -> None:
        """Feed all sources the emitted tokens, and learn from their proposals."""
        state = self._rows[row]
        row.context += token_ids
        for source, handle in state.handles.items():
            source.ask("observe", None, handle, token_ids)
        self._num_emitted += len(token_ids)
        emitted = [*token_ids[len(state.forced) :]]
        draws = self._call.rngs is not None
        # Of a draft that was not drawn from, nobody knows how much would have been verified.
        most = len(emitted) - (0 if draws else 1)
        joint = state.joint
        for source, before, draft, sec in reversed(state.asked if emitted else ()):
            if not draws and len(self._sources) > 1:
                source.calibration.learn(draft, emitted)
            source.stats.num_accepted_tokens += len(matched_path(draft, emitted))
            if (gate := self._gates.get(source)) is not None:
                with_it, without = (len(matched_path(each, emitted)) for each in (joint, before))
                num_added = min(most, with_it) - min(most, without)
                gate.record_gain(float(before.probs.sum()), num_added, sec)
            joint = before
        state.asked = []

    def learn(
        self,
        plan: Plan,
        steps: Sequence[Step],
        successors: Callable[[], Successors] | None,
        is_prefill: bool,
    ) -> None:
        """Learn from the last committed step: successors of all nodes, and outcomes of drafts.

        Args:
            plan: the step's plan.
            steps: tokens of the rows that emitted.
            successors: what `rank` returned.
            is_prefill: whether it was the first step, which has no drafts.
        """
        batch = self._batch
        emitted = {batch.rows[step.row]: step.token_ids for step in steps}
        if successors is not None:
            of_rows = successors()
            for row, start in plan.starts.items():
                length = len(row.context) - len(emitted.get(row, ()))  # before the step
                if not length or row not in self._rows:
                    continue
                tree = plan.trees[row]
                parents = [-1, *(tree.draft.parents + 1).tolist()]
                for source, handle in self._rows[row].handles.items():
                    if num := source.num_successors:
                        found = of_rows.of_tree(start, len(parents), num)
                        args = handle, row.context[:length], tree.token_ids, parents, found
                        source.ask("harvest", None, *args)
        if not is_prefill:
            outcomes = {
                row: (plan.proposed[row], emitted[row]) for row in emitted if row in plan.proposed
            }
            self._budget.learn(outcomes, {row: row.num_emitted for row in batch.running})

    def record(self, num_rows: int, num_tokens: float, sec: float, is_untimed: bool) -> None:
        """Learn the cost of a step.

        Args:
            num_rows: rows of the batch.
            num_tokens: tokens of its forward pass per row, besides the root; their mean if rows
                have no padding.
            sec: seconds of the whole step.
            is_untimed: whether it took other seconds than steps of this size.
        """
        if self._gates:
            self._pace.record(sec, self._num_emitted)
        for gate in self._gates.values():
            gate.passed(sec)
        if not is_untimed:  # sources that are asked where they pay count their own seconds
            self._budget.record(num_rows, num_tokens, sec - self._asking_sec)
        self._asking_sec, self._num_emitted = 0.0, 0

    def close(self, rows: Sequence[Row] | None = None) -> None:
        """End rows; all open ones by default."""
        for row in [*self._rows] if rows is None else rows:
            state = self._rows.pop(row, _DraftedRow())
            for source, handle in state.handles.items():
                source.ask("close", None, handle, even_if_failed=True)


def agreed(drafts: Sequence[Draft], mesh: Any) -> Sequence[Draft]:
    """Return the drafts of the first of the processes that run one model together, row by row.

    Pools may differ between processes, and measured costs always do. Every process must call this
    at every step.
    """
    group = (mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh).get_group()
    found = [drafts]
    torch.distributed.broadcast_object_list(found, group=group, group_src=0)
    return found[0]
