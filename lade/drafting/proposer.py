"""Drafts for each row of a batch: from the drafter and the grammar, cut to what can be run."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lade.drafting.drafter import Abilities, Drafter, sources_of
from lade.drafting.drafts import after, exploring, narrowed
from lade.drafting.grammar import ForcedTokens
from lade.drafting.guard import Guard
from lade.drafting.successors import Successors, compile_kernels
from lade.stats import SourceStats
from lade.tree import Tree
from ngram_pool import Draft, SampledDraft

_NO_TOKENS = np.empty(0, np.int32)


class _Proposal(NamedTuple):
    """The last proposal for a row, and how it came about."""

    draft: Draft  # tokens to explore included
    forced: list[int]  # its first tokens, where a grammar forces them
    room: int  # maximum depth that the target can run


class _Prepared(NamedTuple):
    """Tokens to explore."""

    token_ids: NDArray[np.int32]
    worths: NDArray[np.float64]
    most: int  # how many were asked for

    def has_all(self, num_tokens: int, num_excluded: int) -> bool:
        """Return whether the best `num_tokens` that are not excluded are among them."""
        return len(self.token_ids) < self.most or self.most - num_excluded >= num_tokens


class Proposer:
    """Source of the drafts of every row of a batch, in two phases.

    `propose` asks for all there is, so that a budget can decide how much of it to verify; `draw`
    returns that much of it, or draws it anew where drafts are random. The number of nodes drawn
    must not depend on the tokens drawn, or the text would no longer have the right distribution.

    A drafter can never fail the call that it drafts for: whatever it raises and an invalid draft
    become a warning, and it is not asked again (`guard.py`).

    Args:
        drafter: fed by the caller through `open` and `observe`.
        vocab_size: exclusive upper bound of the token ids in a draft.
        max_candidates: paths of a draft that the target can verify at once; None for no limit.
        grammar: tokens forced by the grammar that constrains the text, if there is one.
        rngs: one for each row, to draw drafts with; None to take the likeliest.
        is_strict: let the drafter's exceptions through, for authors of drafters.
        placeholders: tokens that are never drafted, because a forward over them fails.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        max_candidates: int | None = None,
        grammar: ForcedTokens | None = None,
        rngs: Sequence[np.random.Generator] | None = None,
        is_strict: bool = False,
        placeholders: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        self._drafter = drafter
        self._guard = Guard(drafter, f"drafts: {type(drafter).__name__}", is_strict, device)
        self._placeholders = np.array(placeholders, np.int32)
        self._vocab_size = vocab_size
        self._max_candidates = max_candidates
        self._grammar = grammar
        what = f"forced tokens: {type(grammar).__name__}"
        self._foresight = Guard(grammar, what, is_strict, device)
        able = self._guard.ask(lambda: Abilities.of(drafter), Abilities())
        self._num_successors, self.has_table = able.num_successors, able.has_table
        # Where drafts are drawn, or paths are few, every node should be as likely as can be.
        self._explores = self._num_successors > 0 and max_candidates is None and rngs is None
        if self._num_successors:
            self._guard.ask(compile_kernels, None)
        self._may_be_drawn = rngs is not None  # by `draft` itself
        self._rngs = rngs if able.draws else None
        self._sequences: dict[int, int] = {}  # row -> the drafter's handle
        self._proposals: dict[int, _Proposal] = {}  # by row
        self._prepared: dict[int, _Prepared] = {}  # by row

    @property
    def num_successors(self) -> int:
        """Top-k target tokens to report to the drafter per node; 0 for none."""
        return 0 if self._guard.has_failed else self._num_successors

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may force tokens."""
        return self._grammar is not None

    def open(self, row: int, context: Sequence[int]) -> None:
        """Begin a row with its prompt."""

        def begin() -> None:
            self._sequences[row] = self._drafter.open(context)

        self._guard.ask(begin, None)

    def is_open(self, row: int) -> bool:
        """Return whether a row has begun and not ended."""
        return row in self._sequences

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Feed the drafter a row's emitted tokens."""
        self._guard.tell("observe", self._sequences.get(row), token_ids)

    def harvest(self, row: int, context: Sequence[int], tree: Tree, successors: Successors) -> None:
        """Feed the drafter harvested successors of the nodes of a row's tree."""
        parents = [-1, *(tree.draft.parents + 1).tolist()]
        sequence = self._sequences.get(row)
        self._guard.tell("harvest", sequence, context, tree.token_ids, parents, successors)

    def harvest_prompt(self, row: int, context: Sequence[int], successors: Successors) -> None:
        """Feed the drafter harvested successors of a prompt's last tokens but the very last one."""
        num = successors.num_nodes
        tokens = context[-1 - num : -1]
        committed = context[: len(context) - num]
        sequence, parents = self._sequences.get(row), range(-1, num - 1)
        self._guard.tell("harvest", sequence, committed, tokens, parents, successors)

    def observe_ngrams(self, row: int, ngrams: NDArray[np.int32]) -> None:
        """Feed the drafter n-grams [num_ngrams, ngram_size] of a row's lookahead window."""
        self._guard.tell("observe_ngrams", self._sequences.get(row), ngrams)

    def sources(self) -> dict[str, SourceStats]:
        """Return what each source of the drafter did; empty if it does not say."""
        return self._guard.ask(lambda: sources_of(self._drafter), {}, even_if_failed=True)

    def close(self, row: int) -> None:
        """End a row."""
        sequence = self._sequences.pop(row, None)
        self._prepared.pop(row, None)
        if sequence is not None:
            self._guard.tell("close", sequence, even_if_failed=True)

    def close_all(self) -> None:
        """End all open rows."""
        with ExitStack() as stack:  # one that raises does not keep the others open
            for row in [*self._sequences]:
                stack.callback(self.close, row)

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
            context: the row as the drafter sees it.
            room: maximum depth that the target can run.
        """
        forced: list[int] = []
        draft = Draft.empty()
        most = min(room, max_draft_tokens)
        if most > 0 and self._grammar is not None:
            forced = self._foresight.forced_tokens(row, committed, most)
        left = max_draft_tokens - len(forced)
        if most > 0 and left > 0:
            context = [*context, *forced] if forced else context
            sequence = self._sequences.get(row)
            found = self._guard.draft(sequence, context, left, self._check_drawn)
            draft = draft if found is None else found
            if self._max_candidates is not None and not isinstance(draft, SampledDraft):
                draft = narrowed(draft, self._max_candidates)
        draft = self._possible(after(forced, draft) if forced else draft, room)
        self._proposals[row] = _Proposal(draft, forced, room)
        return draft

    def prepare(self, row: int, max_draft_tokens: int) -> None:
        """Find tokens for the next `explore` of a row, after all that it can learn by then."""
        if self._explores and row in self._sequences:
            most = 2 * max_draft_tokens  # a draft may have half of them
            found = self._guard.explore(self._sequences[row], _NO_TOKENS, most)
            self._prepared[row] = _Prepared(*found, most)

    def explore(
        self, row: int, others: Sequence[NDArray[np.int32]], max_draft_tokens: int
    ) -> Draft:
        """Add tokens to explore to a row's proposal, and return it with these.

        They are run for what is harvested there, more than for their chance to be right, so nothing
        is learned of the drafter's probabilities from them.

        Args:
            others: tokens that other rows run in this step.
        """
        draft, forced, room = self._proposals[row]
        if not self._explores or forced or min(room, max_draft_tokens) < 1:
            return draft
        excluded = draft.token_ids
        if others or len(self._placeholders):
            excluded = np.concatenate([excluded, self._placeholders, *others])
        prepared = self._prepared.pop(row, None)
        if prepared is None or not prepared.has_all(max_draft_tokens, len(excluded)):
            found = self._guard.explore(self._sequences.get(row), excluded, max_draft_tokens)
        else:
            found = prepared.token_ids, prepared.worths
        if not len(found[0]):
            return draft
        draft = exploring(draft, *found, excluded, self._vocab_size, max_draft_tokens)
        self._proposals[row] = _Proposal(draft, forced, room)
        return draft

    def is_drawn(self, row: int) -> bool:
        """Return whether a row's proposal is drawn already, and so to be verified whole."""
        return isinstance(self._proposals[row].draft, SampledDraft)

    def draw(self, row: int, context: Sequence[int], num_nodes: int) -> Draft:
        """Return the first `num_nodes` nodes of the proposal, or as many drawn in their place."""
        proposed, forced, room = self._proposals[row]
        if isinstance(proposed, SampledDraft):
            return proposed if num_nodes else proposed.first(0)
        proposed = proposed.first(num_nodes)
        num_drawn = len(proposed) - len(forced)
        if self._rngs is None or num_drawn < 1:
            return proposed
        context = [*context, *forced] if forced else context
        sequence = self._sequences.get(row)
        sampled = self._guard.sample(sequence, context, num_drawn, self._rngs[row])
        return self._possible(after(forced, sampled) if forced else sampled, room)

    def _check_drawn(self, draft: Draft) -> None:
        """Raise if a draft is drawn and cannot be verified as it is."""
        if not isinstance(draft, SampledDraft):
            return
        if not self._may_be_drawn:
            raise ValueError("expected a Draft where drafts are not drawn, got a SampledDraft")
        if self._max_candidates is not None and len(draft):
            # Of siblings, too: a later one is drawn only because an earlier one may be rejected.
            num_leaves = len(draft) - len(np.unique(draft.parents[draft.parents >= 0]))
            if num_leaves > self._max_candidates:
                raise ValueError(
                    f"expected a drawn draft of at most {self._max_candidates} paths, "
                    f"got {num_leaves}"
                )

    def _possible(self, draft: Draft, room: int) -> Draft:
        """Cut a draft before the first node that the target cannot run.

        Such a node is deeper than `room`, or its token is a placeholder or outside the vocabulary,
        as from a pool that learned from another model's text. For a drawn node, the tokens that it
        could have become decide, not the one that it became.
        """
        if isinstance(draft, SampledDraft):
            outside = draft.support_token_ids >= self._vocab_size
            if len(self._placeholders):
                outside |= np.isin(draft.support_token_ids, self._placeholders)
            outside &= draft.support_probs > 0
            impossible = np.flatnonzero((draft.depths > room) | outside.any(axis=1))
        else:
            unknown = (draft.token_ids < 0) | (draft.token_ids >= self._vocab_size)
            if len(self._placeholders):
                unknown |= np.isin(draft.token_ids, self._placeholders)
            if len(draft) <= room and not unknown.any():
                return draft
            impossible = np.flatnonzero((draft.depths > room) | unknown)
        return draft.first(int(impossible[0])) if len(impossible) else draft
