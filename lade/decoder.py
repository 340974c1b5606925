"""The decoding loop: read this first.

One step is plan, launch, choose, walk, observe, commit, finish:

    prompt -> pool -> draft -> tree -> forward -> verify -> commit -> pool ...

`lade.drafting.speculator` drafts and learns, `lade.targets` runs drafts, `lade.sampling` chooses
the target's own tokens, and `lade.hf.generation` turns a call of `generate` into a `Decoder`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from lade.batch import Batch
from lade.drafting.speculator import Plan, Speculator
from lade.errors import in_one_line
from lade.probing.proof import FlawError, Proof
from lade.sampling.choice import Choice
from lade.stats import DecodeStats, Step
from lade.targets.base import Target
from lade.tree import ROOT, Tree


class VerificationError(Exception):
    """Drafts cannot be verified any more, because of a `FlawError` or as a forward failed.

    The text so far is valid.
    """


class Decoder:
    """One generation: all rows of a batch, from prompt to end.

    Args:
        batch: the rows.
        target: the model, set up for the prompts, not yet run.
        speculator: decides what a step runs, and learns from it.
        choice: chooses the target's own tokens.
        on_step: called after each commit, the prefill included, with the steps of the rows.
        proof: holds some steps against the model's own forwards of one token.
        overlaps: whether learning from a step is deferred until the next forward is on its way. If
            not, as when the host itself computes, it is done at once.
    """

    def __init__(
        self,
        batch: Batch,
        target: Target,
        speculator: Speculator,
        choice: Choice,
        on_step: Callable[[Sequence[Step]], None],
        proof: Proof,
        overlaps: bool = False,
    ) -> None:
        self.stats = DecodeStats(num_prefills=batch.text.num_rows)
        #: Why the text is incomplete, if it is.
        self.failure: VerificationError | None = None
        self._batch = batch
        self._target = target
        self._speculator = speculator
        self._choice = choice
        self._on_step = on_step
        self._proof = proof
        self._overlaps = overlaps
        self._learn: Callable[[], None] | None = None  # from the last step, until that is done

    def run(self) -> DecodeStats:
        """Decode to the end and return counts and times; the text is in the batch.

        If the target fails on the way, `failure` says why. Unless the generation was complete by
        then, the text is cut to what all rows have, and the random state is the one `generate` has
        at that point, so that plain decoding can resume there.
        """
        batch = self._batch
        try:
            self._prefill()
            while emitting := batch.emitting:
                self._step(emitting)
            self._finish()
        except VerificationError as failure:
            self.failure = failure
            if batch.gives_cache or batch.emitting:
                batch.text.cut()
        finally:
            with ExitStack() as stack:  # closes the others even if one raises
                stack.callback(self._speculator.close_all)
                stack.callback(self._target.close)
                stack.callback(self._choice.close)
        self.stats.num_steps += self._proof.num_forwards
        return self.stats

    def _prefill(self) -> None:
        """Run the prompts: a first step without drafts, whose roots are already cached."""
        plan = self._speculator.roots()
        with self.stats.timed("prefill"):
            with self._verifying():
                logits = self._target.prefill(is_plain=self._proof.plain_prompts)
            self._choice.look_at(logits, plan.trees)
        if self._overlaps:
            self._speculator.open_all()  # while the device is busy
        with self.stats.timed("prefill"):
            self._choice.wait()
            successors = self._speculator.rank(logits, self._choice.ranked)
        with self.stats.timed("verify"):
            paths = accepted_paths(plan.trees, self._choice, self._batch)
        with self.stats.timed("commit"):
            if not self._overlaps:  # nobody who reads along waits for what is learned of prompts
                self._speculator.open_all()
            steps = self._observed(plan, paths)
            self._end_step(partial(self._speculator.learn, plan, steps, successors, True))
        self._on_step(steps)

    def _step(self, emitting: Sequence[int]) -> None:
        before = self.stats.sec
        with self.stats.timed("draft"):
            plan = self._speculator.plan(emitting)
            with self._verifying():
                plan, inputs = self._proof.begin(plan)
            num_pending = self._target.num_pending
        with self.stats.timed("forward"):
            with self._verifying():
                plan, whole = self._proof.forward(plan, inputs)
            num_nodes = sum(len(tree.token_ids) for tree in plan.trees.values())
            logits = whole[:, :num_nodes]  # a window and padding follow
            num_run = logits.shape[1] / len(plan.trees) - 1
            if len(plan.trees) == 1:  # with its padding
                num_run = self._target.width_of(plan.num_tokens) - 1.0 + num_pending
            self._choice.look_at(logits, plan.trees)
            if self._overlaps:
                successors = self._speculator.rank(logits, self._choice.ranked)
                self._finish()
            self._choice.wait()
        with self.stats.timed("verify"):
            paths = accepted_paths(plan.trees, self._choice, self._batch)
        with self.stats.timed("commit"):
            if not self._overlaps:
                successors = self._speculator.rank(logits, self._choice.ranked)
            num_beside = self._speculator.advance_window(plan, whole)
            steps = self._observed(plan, paths)
            with self._verifying():
                self._target.commit([self._proof.path(paths[row]) for row in self._batch.rows])
            self.stats.num_steps += 1
            self.stats.num_lookahead_tokens += num_beside
            for step in steps:
                self.stats.count_row_step(step)
            extra_sec = math.inf if self._proof.is_busy else self._target.extra_sec
            self._end_step(partial(self._speculator.learn, plan, steps, successors, False))
        self._speculator.record(len(plan.trees), num_run, self.stats.sec - before, extra_sec)
        self._on_step(steps)

    def _observed(self, plan: Plan, paths: Mapping[int, Sequence[int]]) -> list[Step]:
        """Let the drafter observe what was emitted; return the steps of the rows."""
        steps, text = [], self._batch.text
        for row, path in paths.items():
            stop = text.num_unpadded[row]
            if path:
                emitted = text.token_ids[row][stop - len(path) : stop]
                self._speculator.observe(row, emitted)
                # A stopped row may end on a draft token; otherwise its last is the bonus token.
                tree, last = plan.trees[row], len(path) - 1
                ends_on_draft = (path[last], emitted[last]) in tree.children
                steps.append(Step(emitted, len(tree) - 1, last + ends_on_draft, row))
        return steps

    def _end_step(self, learn: Callable[[], None]) -> None:
        """Drop finished rows, and learn from the step now or during the next forward."""
        places, leaving = self._batch.drop_finished()
        if leaving:
            with self._verifying():
                self._target.select(places)
        self._learn = learn
        if not self._overlaps:
            self._finish()
        if leaving:
            self._speculator.close(leaving)

    def _finish(self) -> None:
        """Learn from the last step, unless that is done already."""
        learn, self._learn = self._learn, None
        if learn is not None:
            learn()

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        """Convert errors of the target to `VerificationError`, which does not fail the call."""
        try:
            yield
        except Exception as failure:  # the target is the user's model
            is_flaw = isinstance(failure, FlawError)
            raise VerificationError(str(failure) if is_flaw else in_one_line(failure)) from failure


def accepted_paths(trees: Mapping[int, Tree], choice: Choice, batch: Batch) -> dict[int, list[int]]:
    """Emit the target's choices down each tree, as long as the draft contains them.

    Each round emits one token in every row still walking, then asks which rows are finished. A
    row's last token is the bonus token, which is not in the draft at that node, unless the row was
    stopped before.

    Args:
        trees: trees by row, ascending.
        choice: the choice, which has looked at the step's logits.
        batch: the batch, whose text grows by the emitted tokens.

    Returns:
        For each row the nodes at which tokens were emitted, in order from the root.
    """
    paths: dict[int, list[int]] = {row: [] for row in trees}
    walking = {row: ROOT for row in trees if batch.may_emit(row)}
    while walking:
        asked, next_nodes = [*walking.items()], {}
        for (row, node), token_id in zip(asked, choice.tokens_at(asked), strict=True):
            batch.text.append(row, token_id)
            paths[row].append(node)
            child = trees[row].children.get((node, token_id))
            if child is not None:
                next_nodes[row] = child
        batch.stop([*walking])
        walking = {}
        for row, node in next_nodes.items():
            if batch.may_emit(row):
                walking[row] = node
    return paths
