"""A target around a target: proofs compare lade's logits with the model's, one token a forward.

The self-check (`selfcheck.py`) holds for the model as it was then, and `state.py` sees most later
changes. But the hidden state of a user's hook or class cannot be seen. So before the first draft of
a call, a token runs alone by the model's own forward, and is emitted as usual. Then the target goes
back over this token and the one before, and runs both again in front of their tree. Their logits
must be the same as before, up to rounding, or no token of the tree is emitted. The proof is
repeated after `DISTANCE` steps.

The model's own forward of one token takes as long as two or three compiled ones (`lade.forward`).
So if no user code takes part in forwards, the distance to the next proof is shared by all calls of
the model and begins with the self-check; of calls that run side by side, one proves for all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from lade.batch import Row
from lade.compat import Model
from lade.compat.closeness import EXACT, distance, limit_of
from lade.drafting.drafts import after, chain
from lade.drafting.speculator import Plan
from lade.errors import in_one_line
from lade.targets.base import Target
from lade.tree import ROOT, Tree, starts

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Tokens that run again in front of a tree. The second is neither the first nor the last of the
# forward; alone, it was both.
NUM_BEFORE = 2
# Steps with a draft from one proof to the next: one takes about as long as two of them.
DISTANCE = 112
# Steps that other calls wait for the call that is to prove next, before another one proves.
_MOST_LATE = 16
# In half precision, logits of the same text differ by chance, and by more than rounding if a
# near-tie decides between experts: only this many failures in a row count.
_MOST_WRONG = 3


class VerificationError(Exception):
    """Drafts can no longer be verified; the text so far is valid.

    Attributes:
        is_flaw: whether a step with drafts had other logits than forwards of one token. Otherwise a
            forward failed, and its error is the cause.
    """

    is_flaw = False


class _FlawError(VerificationError):
    is_flaw = True


@dataclass(slots=True, eq=False)
class Distances:
    """The distance to the next proof, in steps with a draft, shared by calls."""

    num_left: int = 0  # of the call that is closest to it
    num_proofs: int = 0
    prover: "ProvedTarget | None" = None  # the call that proves next
    flaw: str | None = None  # what a proof found, for all calls that run by the same plan


def _verifying(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Convert errors of the target to `VerificationError`, which does not fail the call."""

    @wraps(method)
    def converted(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except VerificationError:
            raise
        except Exception as failure:  # the target is the user's model
            raise VerificationError(in_one_line(failure)) from failure

    return converted


class ProvedTarget:
    """A target some of whose steps are proved, and all of whose errors are `VerificationError`s.

    Args:
        target: the model, set up for the prompts, not yet run.
        distances: of the call, or of all calls of the model; None to prove nothing. Nothing is
            proved if several processes run the model together, which would all have to prove at the
            same step.
        may_repeat_prompts: whether the last tokens of prompts can run again: prompts are tokens
            alone, and later tokens see them.
        is_plain: whether user code takes part: prompts, and steps without drafts before the first
            proof, run exactly as in `generate`.
        is_around: whether it is all called around forwards, so that lade's forwards of single
            tokens are as good as the model's.

    Attributes:
        num_forwards: forwards that ran only for proofs.
        num_run: tokens per row that the last forward ran besides the root, padding included.
    """

    def __init__(
        self,
        model: Model,
        target: Target,
        distances: Distances | None,
        may_repeat_prompts: bool,
        is_plain: bool,
        is_around: bool,
    ) -> None:
        self._target, self._distances = target, distances
        self._may_repeat_prompts = may_repeat_prompts
        self._is_plain, self._is_around = is_plain, is_around
        self._model = model
        self._num_wrong = 0
        self._num_left, self._num_proofs = DISTANCE, 0
        if distances is not None:
            self._num_left, self._num_proofs = distances.num_left, distances.num_proofs
        # By row and index in it, the logits of recent tokens that ran alone.
        self._alone: dict[tuple[Row, int], Tensor] = {}
        self._is_alone = False  # whether the present forward runs roots by the model's own forward
        self._num_before = 0  # tokens that the present forward runs again before each tree
        self.num_forwards, self.num_run = 0, 0.0

    @property
    def is_untimed(self) -> bool:
        """Whether the last forward took more time than others of its size."""
        return self._is_alone or self._num_before > 0 or self._target.is_untimed

    @_verifying
    def prefill(self) -> Tensor:
        """Run the prompts; return logits of their last tokens, [1, num_rows, vocab_size]."""
        return self._target.prefill(is_plain=self._is_plain)

    @_verifying
    def run(self, plan: Plan) -> tuple[Plan, Tensor]:
        """Run a step; return the plan as it ran, and the logits of its nodes.

        If a proof is due, or fails, the plan may lose its drafts.
        """
        plan, num_pending = self._begin(plan), self._target.num_pending
        plan, logits = self._forward(plan)
        self.num_run = plan.num_nodes / len(plan.trees) - 1
        if len(plan.trees) == 1:  # with its padding
            self.num_run = self._target.width_of(plan.num_tokens) - 1.0 + num_pending
        return plan, logits

    @_verifying
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of the last plan on each row's accepted path, root first."""
        num = self._num_before
        if num:
            paths = [[*range(num), *(num + node for node in path)] for path in paths]
        self._target.commit(paths)

    @_verifying
    def select(self, rows: Sequence[Row]) -> None:
        """Continue with some rows only."""
        self._target.select([row.index for row in rows])

    def close(self) -> None:
        """End the generation; called once, also after an error."""
        if self._distances is not None and self._distances.prover is self:
            self._distances.prover = None
        self._target.close()

    def _is_due(self) -> bool:
        """Return whether this call must prove its next draft."""
        distances = self._distances
        if distances is None:
            return False
        if distances.flaw is not None:
            raise _FlawError(distances.flaw)
        if self._num_proofs != distances.num_proofs:  # another call has proved
            self._num_proofs, self._num_left, self._alone = distances.num_proofs, DISTANCE, {}
        if self._num_left > 0:
            return False
        if distances.prover is None or self._num_left <= -_MOST_LATE:
            distances.prover = self
        return distances.prover is self

    def _begin(self, plan: Plan) -> Plan:
        """Return the plan to run, perhaps without drafts, and decide how its trees run."""
        target = self._target
        self._num_before, self._is_alone, self._trees = 0, False, plan.trees
        is_due = self._is_due()
        # Between a token alone and the proof, steps without drafts run alone, too.
        may_wait = plan.num_tokens == 1 and not self._alone and not self._is_plain
        if not is_due or may_wait:
            return plan
        is_ready = plan.num_tokens > 1 and self._is_ready(plan)
        if is_ready and target.go_back(NUM_BEFORE):
            self._num_before = NUM_BEFORE
            self._trees = {
                row: _behind(row.token_ids[-1 - NUM_BEFORE : -1], tree)
                for row, tree in plan.trees.items()
            }
            return plan
        plan = plan.without_drafts()
        self._is_alone, self._trees = not target.num_pending, plan.trees  # else these run first
        return plan

    def _forward(self, plan: Plan) -> tuple[Plan, Tensor]:
        """Run a step; return the plan as it ran, without drafts if that failed, and logits."""
        if self._is_alone:
            return plan, self._run_alone(plan)
        target = self._target
        logits = target.forward(target.inputs([*self._trees.values()]))
        if plan.num_tokens > 1 and self._is_spoiled(plan, logits):
            plan = self._taken_back(plan)
            return plan, target.forward(target.inputs([*plan.trees.values()]))
        if self._num_before:
            error, limit = self._error(logits), limit_of(self._model)
            if error > limit:
                return self._fail(plan, error, limit)
            distances = self._distances
            assert distances is not None
            distances.num_proofs += 1
            distances.num_left, distances.prover = DISTANCE, None
            self._num_left, self._num_proofs = DISTANCE, distances.num_proofs
            self._num_wrong, self._alone = 0, {}
            logits = _without(logits, self._trees, self._num_before)
        if plan.num_tokens > 1 and self._distances is not None:
            self._num_left -= 1
            # Steps of calls that run side by side are counted once.
            self._distances.num_left = min(self._distances.num_left, self._num_left)
        return plan, logits

    def _is_ready(self, plan: Plan) -> bool:
        """Return whether the tokens before the trees ran alone, and may run again."""
        for row, tree in plan.trees.items():
            num_tokens, first = len(row.token_ids), row.num_prompt - self._may_repeat_prompts
            if num_tokens - 1 - NUM_BEFORE < max(first, 0):
                return False  # a prompt's inputs may be more than tokens
            if len(tree) > 1 and (row, num_tokens - 2) not in self._alone:
                return False
        return any(row in plan.trees for row, _ in self._alone)

    def _run_alone(self, plan: Plan) -> Tensor:
        """Run roots by the model's own forward, and keep their logits for a proof."""
        roots, target = [*plan.trees.values()], self._target
        if self._is_around and target.verification == "tree":
            logits = target.forward(target.inputs(roots))
        else:
            logits = target.forward_roots(roots)
        before = {(row, len(row.token_ids) - 2) for row in plan.trees}
        self._alone = {at: self._alone[at] for at in before & self._alone.keys()}
        for column, row in enumerate(plan.trees):
            # A copy: later forwards may write to the same memory.
            self._alone[row, len(row.token_ids) - 1] = logits[0, column].clone()
        return logits

    def _error(self, logits: Tensor) -> float:
        """Return the distance of the logits before the trees from the logits of tokens alone."""
        mine, alone = [], []
        for row, start in starts(self._trees).items():
            first = len(row.token_ids) - 1 - self._num_before
            for node in range(self._num_before):
                if (row, first + node) in self._alone:
                    mine.append(logits[0, start + node])
                    alone.append(self._alone[row, first + node])
        return distance(torch.stack(mine), torch.stack(alone).to(logits.device))

    def _is_spoiled(self, plan: Plan, logits: Tensor) -> bool:
        """Return whether a root has NaN logits, as when a draft token has NaN keys or values.

        Even masked, a NaN spreads in most attentions to all tokens of the forward. Only looked for
        on a CPU: the answer is not worth waiting for a device.
        """
        if not logits.is_cpu:
            return False
        begins = starts(self._trees) if self._num_before else plan.starts
        roots = [logits[0, start + self._num_before, 0] for start in begins.values()]
        return any(map(math.isnan, roots))

    def _fail(self, plan: Plan, error: float, limit: float) -> tuple[Plan, Tensor]:
        """Take a step back, and run the roots alone; raise if the difference is no chance."""
        self._num_wrong += 1
        if limit < EXACT or self._num_wrong >= _MOST_WRONG:
            assert self._distances is not None
            self._distances.flaw = (
                f"its logits for a draft differ from those for the same token alone by {error:.2g} "
                f"of their standard deviation (expected at most {limit:.2g})"
            )
            raise _FlawError(self._distances.flaw)
        plan, self._is_alone = self._taken_back(plan), True
        return plan, self._run_alone(plan)

    def _taken_back(self, plan: Plan) -> Plan:
        """Discard the last forward except the tokens before its trees; return the plan's roots."""
        target, num_before = self._target, self._num_before
        target.discard()
        self._num_before = 0
        if num_before:
            before = [row.token_ids[-1 - num_before : -1] for row in plan.trees]
            target.forward(target.inputs([Tree.build(ids[0], chain(ids[1:])) for ids in before]))
            target.commit([[*range(num_before)]] * len(before))
        self.num_forwards += 1 + (num_before > 0)
        return plan.without_drafts()


def _behind(token_ids: Sequence[int], tree: Tree) -> Tree:
    """Return a tree that begins with tokens before its root."""
    return Tree.build(token_ids[0], after([*token_ids[1:], tree.token_ids[ROOT]], tree.draft))


def _without(logits: Tensor, trees: Mapping[Row, Tree], num: int) -> Tensor:
    """Return a forward's logits without the first `num` tokens of each tree."""
    if len(trees) == 1:
        return logits[:, num:]
    columns = [  # one after the other
        column
        for row, start in starts(trees).items()
        for column in range(start + num, start + len(trees[row]))
    ]
    return logits[:, columns]
