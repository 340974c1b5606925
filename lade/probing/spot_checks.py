"""Spot checks: a step over drafts held against forwards of one token, before any of it is emitted.

A check is valid for the model that was checked. `structure.py` and `values.py` see most changes of
it; what code of the user's own does (`own_code.py`) nobody can see. So the first step with a draft
of a call is not believed where that matters: it is run and taken back, and the tokens are decoded
one by one, as plain decoding does. Their logits must be those that the step gave for them. If they
are not, nothing wrong was emitted, and the keys and values of the text so far are plain decoding's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lade.closeness import distance, is_exact_in, limit_of
from lade.compat import Model
from lade.drafting.speculator import Plan
from lade.probing.own_code import PLAIN, state_of
from lade.probing.structure import Structure
from lade.targets.base import Forward, Target
from lade.tree import ROOT, Tree, of_trees, starts
from ngram_pool import Draft

# Steps with a draft until the next check of a call, and the factor between one such distance and
# the next. A check costs about two plain steps. Without code of the user's own there is hardly
# anything left that could go wrong.
FIRST_CHECK, _FACTOR = 384, 2
_FIRST_OF_OWN_CODE, _FACTOR_OF_OWN_CODE = 4, 4
# In half precision, logits of the same text differ by chance, and where experts are chosen by a
# near-tie, by more than a check allows: only so many failures in a row count.
_NUM_IN_HALF_PRECISION = 3


class FlawError(Exception):
    """A step over drafts may not give what forwards of one token give.

    Attributes:
        keeps_cache: whether the keys and values of the text so far are plain decoding's.
        blames_method: whether the way in which drafts are verified is at fault.
    """

    def __init__(self, reason: str, keeps_cache: bool, blames_method: bool = True) -> None:
        super().__init__(reason)
        self.keeps_cache = keeps_cache
        self.blames_method = blames_method


@dataclass
class _Held:
    """What a step gave for the tree of one row, and how far plain decoding has come in it."""

    tree: Tree
    logits: Tensor  # [num_nodes, vocab_size]
    node: int | None = ROOT  # whose token is run next; None once the text has left the tree
    has_begun: bool = False  # whether the root is committed


class SpotChecks:
    """The spot checks of one call.

    Args:
        is_due: tells whether the first step with a draft is to be checked; asked after the prompts,
            unless these are run otherwise than `generate` runs them.
        runs_prompts_apart: whether they may be.
        interval: steps with a draft until the first check otherwise.
        own_code: what of the user's own code runs in forwards, or None.
        structure: of the model, to be compared before each step; None if nothing can change it in
            the middle of the call.
        on_good: called when a check has found nothing.
    """

    def __init__(
        self,
        model: Model,
        *,
        is_due: Callable[[], bool] = lambda: False,
        runs_prompts_apart: bool = True,
        interval: int = FIRST_CHECK,
        own_code: str | None = None,
        structure: Structure | None = None,
        on_good: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._is_own = own_code is not None
        self._structure = structure
        self._sees_state = self._is_own and structure is not None
        self._on_good = on_good
        self._limit = limit_of(model)
        self._is_exact = is_exact_in(model)
        self._interval = min(interval, _FIRST_OF_OWN_CODE) if self._is_own else interval
        self._ask_due, self._runs_prompts_apart = is_due, runs_prompts_apart
        self._num_left: int | None = None  # until it was asked
        self._num_apart = 0
        # Whether all that is cached was run as plain decoding does, or is as good.
        self._is_pure = True
        #: Forwards that were run for checks alone.
        self.num_forwards = 0
        self._held: dict[int, _Held] = {}  # by row, while a step is compared
        self._has_left_roots = False  # whether a node besides the roots was compared

    @property
    def is_due(self) -> bool:
        """Whether the next step with a draft is to be checked."""
        if self._num_left is None:
            self._num_left = 0 if self._is_own or self._ask_due() else self._interval
        return self._num_left <= 0

    @property
    def is_checking(self) -> bool:
        """Whether a step is held, so that what is run is not as fast as it may be."""
        return bool(self._held)

    @property
    def wants_plain_prompts(self) -> bool:
        """Whether the prompts are to be run exactly as `generate` runs them."""
        return self._is_own or (self._runs_prompts_apart and self.is_due)

    def note_state(self) -> None:
        """Note the state after a forward, for what forwards change themselves is no change."""
        if self._structure is not None:
            self._attributes = self._structure.attributes_of(self._model)
        if self._sees_state:
            self._state = state_of(self._model)

    def begin_step(self, plan: Plan, target: Target) -> Plan:
        """Return what of a plan is to be run, and compare what was held for other nodes than it.

        Raises:
            FlawError: the model was changed, or a step gave something else than one token alone.
        """
        self._look_for_changes()
        self._held = {row: held for row, held in self._held.items() if row in plan.trees}
        if self._held and not self._has_left_roots:
            self._look_beside(plan, target)
        if self._held and all(held.node is None for held in self._held.values()):
            self._end()
        if self._held or (self.is_due and target.num_pending):
            return plan.without_drafts()
        return plan

    def launch(self, plan: Plan, inputs: object, target: Target) -> tuple[Plan, Forward]:
        """Run a step and return it with what of its plan it is; a checked one has no draft.

        Raises:
            FlawError: the step that is held gave something else.
        """
        if plan.width > 1 and self.is_due:
            self._hold(plan, target.forward(inputs))
            target.discard()
            self.num_forwards += 1
            plan = plan.without_drafts()
        if self._held or (self._is_own and plan.num_tokens == 1):
            output = target.forward_plainly([*plan.trees.values()])
        else:
            output = target.forward(inputs)
            if plan.width > 1 and self._num_left is not None:
                self._num_left -= 1
                self._is_pure = False
        if self._held:
            nodes = {row: held.node for row, held in self._held.items() if held.node is not None}
            try:
                self._compare(plan.trees, output, nodes)
            except FlawError:
                target.discard()  # nothing of it is emitted
                raise
        self.note_state()
        return plan, output

    def end_step(self, paths: Mapping[int, Sequence[int]], text: Sequence[Sequence[int]]) -> None:
        """Follow the tokens that a step has emitted."""
        for row, path in paths.items():
            held = self._held.get(row)
            if held is not None and held.node is not None and path:
                held.has_begun = True
                held.node = held.tree.children.get((held.node, text[row][-1]))

    def _look_for_changes(self) -> None:
        """Compare the model with what the last forward left; callbacks may have changed it."""
        if self._structure is None:
            return
        attributes = self._structure.attributes_of(self._model)
        is_same = len(attributes) == len(self._attributes) and all(
            now is before or (type(now) in PLAIN and now == before)
            for now, before in zip(attributes, self._attributes, strict=True)
        )
        if not (is_same and self._structure.is_of(self._model)):
            # The views of the call have copies of its modules, which may be true no more.
            reason = "the model was changed in the middle of the call"
            raise FlawError(reason, keeps_cache=True, blames_method=False)
        if self._sees_state and state_of(self._model) != self._state:
            self._is_pure, self._num_left, self._held = True, 0, {}

    def _hold(self, plan: Plan, output: Forward) -> None:
        places = starts(plan.trees.values())
        self._held = {
            # A copy: later forwards may write to the same memory.
            row: _Held(tree, output.logits[0, start : start + len(tree)].clone())
            for (row, tree), start in zip(plan.trees.items(), places, strict=True)
        }
        self._has_left_roots = False

    def _look_beside(self, plan: Plan, target: Target) -> None:
        """Run a child of the root alone where the text has left the tree at once.

        What treats the first token of a forward apart would not be noticed at the root.
        """
        trees = plan.without_drafts().trees
        nodes = {}
        for row, held in self._held.items():
            children = [node for (parent, _), node in held.tree.children.items() if parent == ROOT]
            if held.has_begun and held.node is None and children:
                nodes[row] = max(children)
                trees[row] = Tree.build(held.tree.token_ids[nodes[row]], Draft.empty())
        if not nodes:
            return
        output = target.forward_plainly([*trees.values()])
        self.num_forwards += 1
        try:
            self._compare(trees, output, nodes)
        finally:
            target.discard()

    def _compare(
        self, trees: Mapping[int, Tree], output: Forward, nodes: Mapping[int, int]
    ) -> None:
        """Compare what roots gave alone with what the held step gave at some nodes.

        Args:
            nodes: of the held trees, by row, those that there is something to compare for.
        """
        if not nodes:
            return
        self._has_left_roots |= any(node != ROOT for node in nodes.values())
        alone = dict(zip(trees, of_trees(output.logits, trees.values())[0], strict=True))
        mine = torch.stack([self._held[row].logits[node] for row, node in nodes.items()])
        apart = distance(mine, torch.stack([alone[row] for row in nodes]).to(mine.device))
        if apart <= self._limit:
            return
        self._num_apart += 1
        if self._is_exact or self._num_apart >= _NUM_IN_HALF_PRECISION:
            raise FlawError(
                f"its logits for a draft differ from those for the same token alone by {apart:.2g} "
                f"of their standard deviation (expected at most {self._limit:.2g})",
                keeps_cache=self._is_pure,
            )
        self._held = {}  # look again at the next step

    def _end(self) -> None:
        """Believe the steps that follow, for a time."""
        self._held, self._num_apart = {}, 0
        if not self._has_left_roots:
            return  # nothing was there to be compared: still due
        self._num_left = self._interval
        self._interval *= _FACTOR_OF_OWN_CODE if self._is_own else _FACTOR
        self._on_good()
