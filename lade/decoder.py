"""The decoding loop: read this first.

One step is plan, launch, choose, walk, observe, commit, finish:

    prompt -> pool -> draft -> tree -> forward -> verify -> commit -> pool ...

`lade.drafting.speculator` drafts and learns, `lade.targets` runs drafts, `lade.sampling` chooses
the target's own tokens, and `lade.hf.generation` turns a call of `generate` into a `Decoder`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter

from lade.batch import Batch, Row
from lade.drafting.speculator import Plan, Speculator
from lade.probing.proof import ProvedTarget, VerificationError
from lade.sampling.choice import Choice
from lade.stats import DecodeStats, Step, add_times
from lade.tree import ROOT, Tree


class Decoder:
    """One generation: all rows of a batch, from prompt to end.

    Args:
        batch: the rows.
        target: the model, set up for the prompts, not yet run; some of its steps are proved.
        speculator: decides what a step runs, and learns from it.
        choice: chooses the target's own tokens.
        stop: called after every token with the rows that emitted it; marks the rows that it ends,
            and passes the token on.
        on_step: called after each commit, the prefill included, with the steps of the rows.
        gives_cache: whether the caller gets the cache, which is then to hold the whole text.
        overlaps: whether learning from a step is deferred until the next forward is on its way. If
            not, as when the host itself computes, it is done at once.
    """

    def __init__(
        self,
        batch: Batch,
        target: ProvedTarget,
        speculator: Speculator,
        choice: Choice,
        stop: Callable[[Sequence[Row]], None],
        on_step: Callable[[Sequence[Step]], None],
        gives_cache: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.stats = DecodeStats(num_prefills=len(batch.rows))
        #: Why the text is incomplete, if it is.
        self.failure: VerificationError | None = None
        self._batch = batch
        self._target = target
        self._speculator = speculator
        self._choice, self._stop = choice, stop
        self._on_step = on_step
        self._gives_cache = gives_cache
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
            if self._gives_cache or batch.emitting:
                batch.cut()
        finally:
            with ExitStack() as stack:  # closes the others even if one raises
                stack.callback(self._speculator.close)
                stack.callback(self._target.close)
                stack.callback(self._choice.close)
        self.stats.num_steps += self._target.num_forwards
        return self.stats

    def _prefill(self) -> None:
        """Run the prompts: a first step without drafts, whose roots are already cached."""
        plan, times = self._speculator.roots(), [perf_counter()]
        logits = self._target.prefill()
        self._choice.look_at(logits, plan)
        if self._overlaps:
            self._speculator.open_all()  # while the device is busy
        self._choice.wait()
        successors = self._speculator.rank(logits, self._choice.ranked)
        times.append(perf_counter())
        emitting = self._batch.emitting
        paths = accepted_paths(plan.trees, emitting, self._choice, self._batch, self._stop)
        times.append(perf_counter())
        if not self._overlaps:  # the first token does not wait for the pool to read the prompt
            self._speculator.open_all()
        steps = self._observed(plan, paths)
        self._end_step(partial(self._speculator.learn, plan, steps, successors, True))
        times.append(perf_counter())
        add_times(self.stats, times, "prefill", "verify", "commit")
        self._on_step(steps)

    def _step(self, emitting: Sequence[Row]) -> None:
        times = [perf_counter()]
        plan = self._speculator.plan(emitting)
        times.append(perf_counter())
        plan, logits = self._target.run(plan)
        of_trees = logits[:, : plan.num_nodes]  # padding follows
        self._choice.look_at(of_trees, plan)
        if self._overlaps:
            successors = self._speculator.rank(of_trees, self._choice.ranked)
            self._finish()
        self._choice.wait()
        times.append(perf_counter())
        paths = accepted_paths(plan.trees, emitting, self._choice, self._batch, self._stop)
        times.append(perf_counter())
        if not self._overlaps:
            successors = self._speculator.rank(of_trees, self._choice.ranked)
        steps = self._observed(plan, paths)
        self._target.commit([*paths.values()])
        self.stats.num_steps += 1
        for step in steps:
            self.stats.count_row_step(step)
        is_untimed = self._target.is_untimed
        self._end_step(partial(self._speculator.learn, plan, steps, successors, False))
        times.append(perf_counter())
        add_times(self.stats, times, "draft", "forward", "verify", "commit")
        sec = times[-1] - times[0]
        self._speculator.record(len(plan.trees), self._target.num_run, sec, is_untimed)
        self._on_step(steps)

    def _observed(self, plan: Plan, paths: Mapping[Row, Sequence[int]]) -> list[Step]:
        """Let the drafter observe what was emitted; return the steps of the rows."""
        steps = []
        for row, path in paths.items():
            if path:
                emitted = row.token_ids[-len(path) :]
                self._speculator.observe(row, emitted)
                # A stopped row may end on a draft token; otherwise its last is the bonus token.
                tree, last = plan.trees[row], len(path) - 1
                ends_on_draft = (path[last], emitted[last]) in tree.children
                steps.append(
                    Step(emitted, len(tree.token_ids) - 1, last + ends_on_draft, row.index)
                )
        return steps

    def _end_step(self, learn: Callable[[], None]) -> None:
        """Drop finished rows, and learn from the step now or during the next forward."""
        leaving = self._batch.drop_finished()
        if leaving:
            self._target.select(self._batch.running)
        if self._overlaps:
            self._learn = learn
        else:
            learn()
        if leaving:
            self._speculator.close(leaving)

    def _finish(self) -> None:
        """Learn from the last step, if that was deferred."""
        learn, self._learn = self._learn, None
        if learn is not None:
            learn()


def accepted_paths(
    trees: Mapping[Row, Tree],
    emitting: Sequence[Row],
    choice: Choice,
    batch: Batch,
    stop: Callable[[Sequence[Row]], None],
) -> dict[Row, list[int]]:
    """Emit the target's choices down each tree, as long as the draft contains them.

    Each round emits one token in every row still walking, then asks which rows are finished. A
    row's last token is the bonus token, which is not in the draft at that node, unless the row was
    stopped before.

    Args:
        trees: trees by row, ascending.
        emitting: the rows that may emit now.
        choice: the choice, which has looked at the step's logits.
        batch: the batch, whose rows grow by the emitted tokens.
        stop: as for `Decoder`.

    Returns:
        For each row the nodes at which tokens were emitted, in order from the root.
    """
    paths: dict[Row, list[int]] = {row: [] for row in trees}
    lengths = {row: len(row.token_ids) for row in trees}
    may_wait = batch.max_lead is not None
    walking = dict.fromkeys(emitting, ROOT)
    while walking:
        asked = [*walking.items()]
        for (row, node), token_id in zip(asked, choice.tokens_at(asked), strict=True):
            row.token_ids.append(token_id)
            paths[row].append(node)
        stop([*walking])
        for row, node in asked:
            # The token that is there now: a criterion may have changed it. ROOT is nobody's child.
            walking[row] = trees[row].children.get((node, row.token_ids[-1]), ROOT)
            must_wait = may_wait and batch.lead_left(row) <= 0
            if walking[row] == ROOT or row.is_finished or must_wait:
                del walking[row]
    # A criterion that sees all rows may have cut one that was ahead.
    return {row: path[: max(0, len(row.token_ids) - lengths[row])] for row, path in paths.items()}
