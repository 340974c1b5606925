"""What a decoder does about drafts: what each step verifies, and what is learned from it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lade.batch import Batch, Prefix
from lade.budget.budget import Budget
from lade.budget.calibration import Outcome
from lade.config import Lookahead
from lade.drafting.lookahead import Window, likeliest_tokens
from lade.drafting.ranks import Ranks
from lade.drafting.sources import Proposer
from lade.drafting.successors import (
    PromptHarvester,
    Ranked,
    Successors,
    SuccessorsCopy,
    rank,
    with_probs,
)
from lade.stats import Step
from lade.tree import ROOT, Tree, starts
from ngram_pool import Draft


class Runner(Protocol):
    """What a target reports about its next forward."""

    vocab_size: int  # exclusive upper bound of the token ids in a draft

    @property
    def num_pending(self) -> int:
        """Committed tokens that the next forward runs again."""

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should have no draft."""

    @property
    def price(self) -> float | None:
        """Tokens that a draft token must add where other calls pay for it, too; None elsewhere."""

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step runs."""

    trees: dict[int, Tree]  # by row, the root and the draft to verify
    proposed: Mapping[int, Draft]  # by row, the whole proposal, verified or not
    window: Window | None  # run beside the draft of a single row
    context_lengths: Mapping[int, int]  # by unfinished row, before the step

    @property
    def num_tokens(self) -> int:
        """Tokens of the largest row, window included."""
        num_beside = 0 if self.window is None else self.window.num_cells
        return max(map(len, self.trees.values())) + num_beside

    def nodes(self) -> list[Tree]:
        """Return the trees followed by the window, which only the target sees."""
        trees, window = self.trees.values(), self.window
        return [*trees] if window is None else [tree.beside(window.cells()) for tree in trees]

    def without_drafts(self) -> "Plan":
        """Return the plan with the roots alone."""
        roots = {row: tree.without_draft() for row, tree in self.trees.items()}
        return replace(self, trees=roots, window=None)


class Cost(NamedTuple):
    """What a forward took."""

    num_rows: int
    num_tokens: float  # besides the root, the mean of all rows
    sec: float | None  # None where not representative of other forwards


@dataclass(frozen=True, slots=True)
class Done:
    """A committed step, and what is still to be learned from it."""

    plan: Plan
    steps: Sequence[Step]
    successors: SuccessorsCopy | None
    cost: Cost | None  # None for the prefill


class Speculator:
    """The drafts of a batch and the lookahead window of a single row: what to run and to learn.

    Args:
        lookahead: size of the window to run beside drafts, which takes verification by tree; None
            for no window.
        ranks: the processes that run the target together, if there are several.
        prompt_harvester: harvests successors from the prefill of a single row, for the drafter.
    """

    def __init__(
        self,
        batch: Batch,
        proposer: Proposer,
        budget: Budget,
        runner: Runner,
        lookahead: Lookahead | None = None,
        ranks: Ranks | None = None,
        prompt_harvester: PromptHarvester | None = None,
    ) -> None:
        self._batch = batch
        self._proposer = proposer
        self._budget = budget
        self._runner = runner
        self._ranks = ranks
        self._prompt_harvester = prompt_harvester
        # Processes that share a target measure different times, and must draft in the same steps.
        self._may_rest = ranks is None and lookahead is None and not proposer.has_grammar
        self._window: Window | None = None
        if lookahead is not None:
            self._window = Window(lookahead, batch.contexts[0], runner.vocab_size, seed=0)

    # --- before a forward -------------------------------------------------------------------

    def open_all(self) -> None:
        """Feed the drafter the prompts."""
        for row in self._batch.rows:
            self._proposer.open(row, self._batch.contexts[row])

    def watching_prompts(self) -> AbstractContextManager[Any]:
        """Return a context of the prefill: the view of the model to run; None for the model."""
        harvester = self._prompt_harvester
        return nullcontext() if harvester is None else harvester.watching()

    @property
    def num_harvested(self) -> int:
        """How many of a prompt's last tokens but the very last are harvested."""
        return 0 if self._prompt_harvester is None else self._prompt_harvester.max_tokens

    def roots(self) -> Plan:
        """Return the plan of the prefill, whose roots are the prompts' last tokens."""
        contexts = self._batch.contexts
        trees = {
            # A prompt of embeddings has no tokens. Only a drafter looks at these roots.
            row: Tree.build([0, *contexts[row]][-1], Draft.empty())
            for row in self._batch.rows
        }
        return Plan(trees, {}, None, self._context_lengths())

    def plan(self, emitting: Sequence[int]) -> Plan:
        """Return what the next step runs: drafts of the rows that emit, roots of the others."""
        batch, window = self._batch, self._open_window()
        is_resting = self._may_rest and self._budget.is_resting
        proposed = {} if is_resting else self._proposals(emitting)
        # Tokens to explore, different ones in each row, are added.
        explored, others = dict[int, Draft](), list[NDArray[np.int32]]()
        for row in proposed:
            explored[row] = self._proposer.explore(row, others, self._budget.max_draft_tokens)
            others.append(explored[row].token_ids)
        nums = self._nums_of_nodes(explored, window)
        drafts = {row: self._proposer.draw(row, batch.contexts[row], nums[row]) for row in explored}
        if self._ranks is not None:
            drafts = self._ranks.agree(drafts)
        trees = {
            row: Tree.build(batch.text.token_ids[row][-1], drafts.get(row, Draft.empty()))
            for row in batch.rows
        }
        return Plan(trees, proposed, window, self._context_lengths())

    def _context_lengths(self) -> dict[int, int]:
        batch = self._batch
        return {
            row: len(batch.contexts[row])
            for row in batch.rows
            if batch.contexts[row] and not batch.text.is_finished[row]
        }

    def _proposals(self, emitting: Sequence[int]) -> dict[int, Draft]:
        """Return all that there is to propose for the rows that emit."""
        batch, max_draft_tokens = self._batch, self._budget.max_draft_tokens
        return {
            row: self._proposer.propose(
                row,
                batch.text.token_ids[row],
                batch.contexts[row],
                batch.room(row),
                max_draft_tokens,
            )
            for row in emitting
        }

    def _nums_of_nodes(
        self, proposed: Mapping[int, Draft], window: Window | None
    ) -> dict[int, int]:
        """Ask the budget how many draft tokens of each row to verify."""
        runner, budget = self._runner, self._budget
        if runner.must_catch_up or not proposed:
            return dict.fromkeys(proposed, 0)
        drawn = {row: len(draft) for row, draft in proposed.items() if self._proposer.is_drawn(row)}
        if drawn:  # how many of them are verified must not depend on what was drawn
            return dict.fromkeys(proposed, max(drawn.values())) | drawn
        probs = [draft.probs for draft in proposed.values()]
        if len(probs) != 1:
            return dict(zip(proposed, budget.nums_of_nodes(probs), strict=True))
        num_beside = 0 if window is None else window.num_cells
        price = runner.price
        if price is None:
            num_nodes = budget.num_nodes(probs, runner.num_pending + num_beside)
        else:
            num_nodes = budget.num_nodes_at(price, probs)
        # The slots that pad a forward to its width may as well hold draft tokens.
        width = runner.width_of(1 + num_nodes + num_beside)
        return dict.fromkeys(proposed, width - 1 - num_beside)

    def _open_window(self) -> Window | None:
        """Return the lookahead window to run, if it ends no later than the text may.

        What a cut window found could hardly be used any more.
        """
        window = self._window
        return window if window is not None and window.depth <= self._batch.places(0) else None

    # --- after a forward --------------------------------------------------------------------

    def rank(self, logits: Tensor, ranked: Ranked | None) -> SuccessorsCopy | None:
        """Find the likeliest tokens after each node on the device, for drafters that harvest.

        Args:
            logits: [1, num_nodes, vocab_size or more].
            ranked: ranks of these logits that are known already, or None.
        """
        num_successors = self._proposer.num_successors
        if num_successors == 0:
            return None
        known = logits[..., : self._runner.vocab_size]
        # Ranks of wider logits may contain tokens that the model has no embeddings for.
        is_whole = known.shape == logits.shape
        ranked = (ranked if is_whole else None) or rank(known, num_successors)
        return with_probs(ranked, known)

    def rank_prompts(self, logits: Tensor) -> Successors | None:
        """Return the likeliest tokens after a prompt's last tokens but the very last, if known.

        Args:
            logits: of the very last token, [1, 1, vocab_size], or of more of them.
        """
        harvester = self._prompt_harvester
        return None if harvester is None else harvester.successors(logits)

    def advance_window(self, plan: Plan, logits: Tensor) -> int:
        """Move the plan's window on and feed the drafter the n-grams that it produced.

        Returns:
            The number of tokens that the window ran.
        """
        window = plan.window
        if window is None:
            return 0
        num_tokens, tree = window.num_cells, plan.trees[0]
        nodes = [len(tree) + cell for cell in window.newest]
        newest = likeliest_tokens(logits, nodes, self._runner.vocab_size)
        ngrams = window.advance(tree.token_ids[ROOT], newest)
        self._proposer.observe_ngrams(0, ngrams)
        return num_tokens

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Append emitted tokens to a row's context and feed them to the drafter."""
        self._batch.contexts[row] += token_ids
        self._proposer.observe(row, token_ids)

    def harvest_prompts(self, plan: Plan, successors: Successors | None) -> None:
        """Feed the drafter harvested successors of the prompts' last tokens.

        Args:
            successors: [1, num_tokens, num_successors], without those of the very last token.
        """
        if successors is None:
            return
        text = self._batch.text
        for row, length in plan.context_lengths.items():
            context = self._batch.contexts[row][:length]
            prompt = text.token_ids[row][: text.num_prompt]
            shared = 0  # tokens that both end with, up to anything that is masked
            for token_id, seen in zip(reversed(prompt), reversed(context), strict=False):
                if token_id != seen or shared > successors.num_nodes:
                    break
                shared += 1
            if shared > 1:
                self._proposer.harvest_prompt(row, context, successors.last(shared - 1))

    def learn(self, done: Done) -> None:
        """Feed the drafter the successors of all nodes, and the budget the step's cost."""
        batch = self._batch
        of_rows = None if done.successors is None else done.successors.get()
        trees = done.plan.trees
        for (row, tree), start in zip(trees.items(), starts(trees.values()), strict=True):
            length = done.plan.context_lengths.get(row)
            if of_rows is None or length is None or not self._proposer.is_open(row):
                continue
            context = Prefix(batch.contexts[row], length)
            self._proposer.harvest(row, context, tree, of_rows.of_tree(start, len(tree)))
        if done.cost is not None:
            self._budget.record(
                num_rows=done.cost.num_rows,
                num_nodes=done.cost.num_tokens,
                forward_sec=done.cost.sec,
                outcomes=[
                    Outcome(step.row, done.plan.proposed[step.row], step.token_ids)
                    for step in done.steps
                    if step.row in done.plan.proposed
                ],
                num_emitted=batch.working(),
            )

    def close(self, rows: Sequence[int]) -> None:
        """End rows."""
        for row in rows:
            self._proposer.close(row)

    def close_all(self) -> None:
        """End all open rows."""
        self._proposer.close_all()
