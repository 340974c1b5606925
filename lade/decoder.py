"""The decoding loop: read this first. One step is draft, tree, forward, verify, commit.

    prompt -> pool -> draft -> tree -> forward -> verify -> commit -> pool ...

Nothing here knows of generation options; `hf.py` translates those.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from lade.batch import Text
from lade.budget.budget import Budget
from lade.budget.trust import Outcome
from lade.closeness import distance
from lade.config import Lookahead
from lade.drafting.drafts import chain
from lade.drafting.lookahead import Window, likeliest_tokens
from lade.drafting.proposer import Proposer
from lade.drafting.ranks import Ranks
from lade.drafting.successors import PromptHarvester, SentSuccessors, rank, with_probs
from lade.outputs import Outputs
from lade.probing.watch import Watch
from lade.sampling.choice import Choice
from lade.stats import DecodeStats, Step
from lade.targets.base import Alone, Forward, Target
from lade.targets.ties import TieError
from lade.tree import ROOT, Tree
from lade.verify import accepted_paths
from ngram_pool import Draft


@dataclass(frozen=True, slots=True)
class Rules:
    """How the rows of a batch go together, and how far they go.

    Attributes:
        max_length: no draft reaches beyond so many tokens in all, prompt included; beyond them, and
            to end there is for `stop` to say, steps go on without a draft.
        stop: told after every token which rows emitted it; marks rows of the text as finished.
        is_joint: all rows emit together, because something must see them all at one length.
        keeps_finished: a finished row goes on, with padding or whatever it has, until the last one
            is finished, because the caller wants what `generate` would have computed there.
        fills_cache: in the end the cache holds all rows at full length, padding too.
    """

    max_length: int
    stop: Callable[[list[int]], None]
    is_joint: bool = False
    keeps_finished: bool = False
    fills_cache: bool = False


class VerificationError(Exception):
    """Drafts cannot be verified any more; the text so far stands.

    Attributes:
        is_doubt: whether forwards were not what the check of the model found them to be. Else one
            failed.
    """

    def __init__(self, reason: str, is_doubt: bool = False) -> None:
        super().__init__(reason)
        self.is_doubt = is_doubt


@dataclass(frozen=True, slots=True)
class Watching:
    """When to hold a committed token against a forward over it alone, and what they may differ by.

    Attributes:
        watch: counts steps, also those of earlier calls.
        limit: of the distance of logits.
        is_exact: whether text is promised to be that of plain decoding.
    """

    watch: Watch
    limit: float
    is_exact: bool


class Decoder:
    """One generation: all rows of a batch, from prompt to end.

    Args:
        text: the prompts; grows.
        contexts: for each row the prompt as the drafter is to see it, without padding; grows.
        target: a model set up for the prompts, not yet run.
        proposer: proposes; is fed each context first and every emitted token after, no padding.
        choice: the target's own tokens.
        budget: how many nodes to verify.
        rules: see there.
        on_step: told of every step after its commit, the prefill included, row by row.
        outputs: gathers what the caller wants besides the text.
        ranks: the processes that run the target together, if there are several.
        lookahead: of the windows to run beside the drafts; the target must verify trees.
        prompt_harvester: looks at the prefill of the target's model, for the drafter.
        watching: holds a token against plain decoding now and then; None for never.
        overlaps: whether what the next draft does not wait for is done while the device is at the
            next forward. Without it all is done at once, as where the host computes itself.
    """

    def __init__(
        self,
        text: Text,
        contexts: list[list[int]],
        target: Target,
        proposer: Proposer,
        choice: Choice,
        budget: Budget,
        rules: Rules,
        on_step: Callable[[Sequence[Step]], None],
        outputs: Outputs,
        ranks: Ranks | None = None,
        lookahead: Lookahead | None = None,
        prompt_harvester: PromptHarvester | None = None,
        watching: Watching | None = None,
        overlaps: bool = False,
    ) -> None:
        self.stats = DecodeStats(num_prefills=text.num_rows)
        #: Why the text is not complete, if it is not.
        self.failure: VerificationError | None = None
        self._text = text
        self._contexts = contexts
        self._target = target
        self._proposer = proposer
        self._choice = choice
        self._budget = budget
        self._rules = rules
        self._on_step = on_step
        self._outputs = outputs
        self._ranks = ranks
        self._prompt_harvester = prompt_harvester
        self._watching = watching
        self._rows = list(range(text.num_rows))  # those in the target's batch
        self._is_filling = False  # all is said, and the cache is filled up
        self._overlaps = overlaps
        self._put_off: list[Callable[[], None]] = []  # of the step before
        # Rows begin with tokens of their own: samples of one prompt would see the same otherwise.
        self._windows = {
            row: Window(lookahead, contexts[row], target.vocab_size, seed=row)
            for row in self._rows
            if lookahead is not None
        }

    def run(self) -> DecodeStats:
        """Decode to the end and return the counts and times; the text is in `text`.

        Where the target fails on the way, `failure` says why. Unless all was said by then, the text
        holds what all rows have, and the random state is that of `generate` there, for it to go on.
        """
        try:
            self._prefill()
            self._steps()
            if self._rules.fills_cache:
                self._is_filling = True
                with self._verifying():
                    self._target.rejoin()
                self._rows = list(range(self._text.num_rows))
                self._steps()
            self._do_put_off()
        except VerificationError as failure:
            self.failure = failure
            self._do_put_off()  # what was emitted before is told all the same
            if self._rules.fills_cache or not all(self._text.is_finished):
                self._text.cut()
        finally:
            with ExitStack() as stack:  # one that raises does not keep the others open
                stack.callback(self._proposer.close_all)
                stack.callback(self._target.close)
                stack.callback(self._choice.close)
        return self.stats

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        """Call the target, whose failure does not fail the generation."""
        try:
            yield
        except Exception as failure:
            what = (str(failure).splitlines() or [""])[0][:200]
            raise VerificationError(f"{type(failure).__name__}: {what}") from failure

    def _steps(self) -> None:
        while emitting := [row for row in self._rows if self._may_emit(row)]:
            self._step(emitting)

    # --- the two kinds of forward -----------------------------------------------------------

    def _prefill(self) -> None:
        """Run the prompts: a first step without a draft, whose roots are cached already."""
        # Only a drafter looks at these roots. A prompt of embeddings has none.
        roots = {row: [0, *self._contexts[row]][-1] for row in self._rows}
        trees = {row: Tree.build(roots[row], Draft.empty()) for row in self._rows}
        with self.stats.timed("prefill"):
            harvester = self._prompt_harvester
            with self._verifying(), harvester.watching() if harvester else nullcontext() as view:
                output = self._target.prefill(view)
            self._choice.look_at(output.logits[:, -1:], trees)
        for row in self._rows:  # while the device is at it
            self._proposer.open(row, self._contexts[row])
        with self.stats.timed("prefill"):
            self._choice.wait()
            self._outputs.add_prefill(output)
            self._harvest_prompts(output.logits[:, -1:])
        self._harvest(output.logits[:, -1:], trees)
        steps, _ = self._verify(trees)
        with self.stats.timed("commit"):
            self._leave()
        self._on_step(steps)

    def _step(self, emitting: Sequence[int]) -> None:
        with self.stats.timed("draft"):
            proposed = self._proposals(emitting)
            windows = self._open_windows(emitting)
            num_nodes = self._num_nodes(proposed, windows)
            drafts = {row: self._draw(row, draft, num_nodes) for row, draft in proposed.items()}
            if self._ranks is not None:
                drafts = self._ranks.agree(drafts)
            trees = {
                row: Tree.build(self._text.token_ids[row][-1], drafts.get(row, Draft.empty()))
                for row in self._rows
            }
            # With the windows' cells behind the drafts, where only the target sees them.
            whole = [
                tree.beside(windows[row].cells()) if row in windows else tree
                for row, tree in trees.items()
            ]
            with self._verifying():
                inputs = self._target.inputs(whole)
            num_pending = self._target.num_pending
        with self.stats.timed("forward") as forward:
            try:
                with self._verifying():
                    output = self._target.forward(inputs)
            except VerificationError as failure:
                if not isinstance(failure.__cause__, TieError):
                    raise
                # The roots alone, now and from now on.
                trees = {row: tree.without_draft() for row, tree in trees.items()}
                whole, windows = [*trees.values()], {}
                with self._verifying():
                    self._target.discard()
                    output = self._target.forward(self._target.inputs(whole))
            logits = output.logits[:, : max(map(len, trees.values()))]
            if not self._is_filling:  # padding needs no choice
                self._choice.look_at(logits, trees)
            successors = self._ranked(logits) if self._overlaps else None
            self._do_put_off()
            if not self._is_filling:
                self._choice.wait()
        self._look_ahead(output.logits, trees, windows)
        self._harvest(logits, trees, successors)
        steps, paths = self._verify(trees)
        with self.stats.timed("commit"):
            self._commit(output, paths)
            self.stats.num_steps += 1
            for step in steps:
                self.stats.count_row_step(step)
            width = self._target.width_of(max(map(len, whole)))
            num_rows = len(trees)  # more than are left now, where one has finished
            # While the cache is filled nobody waits for the device.
            is_timed = self._target.is_typical and not (self._is_filling and self._overlaps)
            sec = forward.sec if is_timed else None
            num_run = width - 1 + num_pending
            self._later(partial(self._learn_costs, steps, proposed, num_rows, num_run, sec))
        self._later(partial(self._on_step, steps))

    # --- what the next draft does not wait for ------------------------------------------------

    def _later(self, work: Callable[[], None]) -> None:
        """Do something while the device is at the next forward, or now where the host does all."""
        if self._overlaps:
            self._put_off.append(work)
        else:
            work()

    def _do_put_off(self) -> None:
        put_off, self._put_off = self._put_off, []
        for work in put_off:
            work()

    # --- draft ------------------------------------------------------------------------------

    def _may_emit(self, row: int) -> bool:
        text, rules = self._text, self._rules
        if rules.is_joint:
            return not all(text.is_finished)
        if text.is_finished[row]:
            goes_on = rules.keeps_finished or self._is_filling
            return goes_on and len(text.token_ids[row]) < text.longest
        return self._choice.max_lead is None or self._lead(row) < self._choice.max_lead

    def _lead(self, row: int) -> int:
        """Return how many tokens a row is ahead of the shortest."""
        return len(self._text.token_ids[row]) - min(
            len(self._text.token_ids[other]) for other in self._rows
        )

    def _must_choose(self, row: int) -> bool:
        return self._rules.keeps_finished or self._text.padding_of(row) is None

    def _proposals(self, emitting: Sequence[int]) -> dict[int, Draft]:
        """Ask for all there is to propose for the rows that emit."""
        text, max_nodes = self._text, self._budget.max_nodes
        working = [row for row in emitting if text.padding_of(row) is None]
        proposed = {
            row: self._proposer.propose(
                row, text.token_ids[row], self._contexts[row], self._room(row), max_nodes
            )
            for row in working
        }
        if len(working) < len(emitting):
            # Padding that is known to come keeps step with the others and asks for no node more.
            deepest = max(
                (len(draft) and int(draft.depths.max()) for draft in proposed.values()),
                default=max_nodes,
            )
            for row in emitting:
                if (padding := text.padding_of(row)) is not None:
                    length = max(0, min(self._room(row), deepest))
                    proposed[row] = chain([padding] * length)
        return proposed

    def _num_nodes(self, proposed: Mapping[int, Draft], windows: Mapping[int, Window]) -> int:
        """Ask the budget how many nodes of each row to verify; padding has no say."""
        if self._target.must_catch_up:
            return 0
        probs = [
            draft.probs.tolist()
            for row, draft in proposed.items()
            if self._text.padding_of(row) is None
        ]
        if not probs:
            return self._budget.max_nodes
        num_cells = max((window.num_cells for window in windows.values()), default=0)
        num_nodes = self._budget.num_nodes(probs, self._target.num_pending + num_cells)
        # What a forward of that size runs anyway may as well be nodes.
        return self._target.width_of(1 + num_nodes + num_cells) - 1 - num_cells

    def _open_windows(self, emitting: Sequence[int]) -> dict[int, Window]:
        """Return the lookahead windows to run: those that end no later than the text may.

        Where a window would have to be cut, what it found could hardly be used any more.
        """
        return {
            row: self._windows[row]
            for row in emitting
            if row in self._windows
            and not self._text.is_finished[row]
            and self._windows[row].depth <= self._places(row)
        }

    def _room(self, row: int) -> int:
        """Return how deep a row's draft may be."""
        room = self._places(row)
        if self._choice.max_lead is not None:
            room = min(room, self._choice.max_lead - self._lead(row) - 1)
        return room

    def _places(self, row: int) -> int:
        """Return how many places the text has behind a row; the bonus token needs one more."""
        text = self._text
        limit = self._rules.max_length
        if text.is_finished[row] and not self._rules.is_joint:
            limit = min(limit, text.longest)
        return limit - len(text.token_ids[row]) - 1

    def _draw(self, row: int, proposed: Draft, num_nodes: int) -> Draft:
        if self._text.padding_of(row) is not None:
            return proposed.first(num_nodes)
        return self._proposer.draw(row, self._contexts[row], num_nodes)

    # --- verify and commit ------------------------------------------------------------------

    def _verify(self, trees: Mapping[int, Tree]) -> tuple[list[Step], dict[int, list[int]]]:
        """Emit the accepted paths and bonus tokens, and feed them to the drafter."""
        text = self._text
        starts = {row: text.num_unpadded[row] for row in trees}
        working = [row for row in trees if not text.is_finished[row]]
        with self.stats.timed("verify"):
            paths = accepted_paths(
                trees,
                self._choice,
                text,
                self._may_emit,
                self._must_choose,
                self._rules.stop,
                self._rules.is_joint,
            )
        with self.stats.timed("commit"):
            steps = []
            for row, start in starts.items():
                emitted = text.token_ids[row][start : text.num_unpadded[row]]
                self._contexts[row] += emitted
                if emitted:
                    self._proposer.observe(row, emitted)
                if emitted and row in working:
                    steps.append(_step_of(row, trees[row], paths[row], emitted))
        return steps, paths

    def _ranked(self, logits: Tensor) -> SentSuccessors | None:
        """Let the device find what the target finds likely behind every node."""
        num_successors = self._proposer.num_successors
        if num_successors == 0 or self._is_filling:
            return None
        known = logits[..., : self._target.vocab_size]
        # Ranks of wider logits may name tokens that the model has no embeddings for.
        is_whole = known.shape == logits.shape
        ranked = (self._choice.ranked if is_whole else None) or rank(known, num_successors)
        return with_probs(ranked, known)

    def _harvest(
        self,
        logits: Tensor,
        trees: Mapping[int, Tree],
        successors: SentSuccessors | None = None,
    ) -> None:
        """Tell the drafter what the target finds likely behind every node of rows that go on."""
        with self.stats.timed("commit"):
            successors = successors or self._ranked(logits)
            if successors is None:
                return
            lengths = {
                row: len(self._contexts[row])
                for row in trees
                if self._contexts[row] and not self._text.is_finished[row]
            }
            self._later(partial(self._feed_harvest, successors, trees, lengths))

    def _feed_harvest(
        self, successors: SentSuccessors, trees: Mapping[int, Tree], lengths: Mapping[int, int]
    ) -> None:
        """Feed it; `lengths` are those that the contexts of rows had then."""
        of_rows = successors.get()
        for index, (row, tree) in enumerate(trees.items()):
            if row in lengths and row in self._rows:  # one that has finished since may be closed
                context = self._contexts[row]
                if len(context) > lengths[row]:
                    context = context[: lengths[row]]
                self._proposer.harvest(row, context, tree, of_rows.of_row(index, len(tree)))

    def _harvest_prompts(self, logits: Tensor) -> None:
        """Tell the drafter what the target finds likely behind the last tokens of the prompts."""
        harvester = self._prompt_harvester
        of_rows = harvester.successors(logits) if harvester is not None else None
        if of_rows is None:
            return
        for row, context in enumerate(self._contexts):
            prompt = self._text.token_ids[row]
            shared = 0  # the end of both, before anything that is masked
            for token_id, seen in zip(reversed(prompt), reversed(context), strict=False):
                if token_id != seen or shared > of_rows.num_nodes:
                    break
                shared += 1
            if shared > 1:
                self._proposer.harvest_prompt(row, context, of_rows.last(row, shared - 1))

    def _look_ahead(
        self, logits: Tensor, trees: Mapping[int, Tree], windows: Mapping[int, Window]
    ) -> None:
        """Move the windows on, and tell the drafter what n-grams they came to."""
        if not windows:
            return
        with self.stats.timed("commit"):
            places = [
                (index, len(tree) + cell)
                for index, (row, tree) in enumerate(trees.items())
                if row in windows
                for cell in windows[row].newest
            ]
            found = iter(likeliest_tokens(logits, places, self._target.vocab_size))
            for row in trees:
                if row in windows:
                    window = windows[row]
                    self.stats.num_lookahead_tokens += window.num_cells
                    newest = [*islice(found, len(window.newest))]
                    ngrams = window.advance(trees[row].token_ids[ROOT], newest)
                    self._proposer.observe_ngrams(row, ngrams)

    def _commit(self, output: Forward, paths: Mapping[int, list[int]]) -> None:
        """Keep the accepted paths, in the cache and in what the caller gets."""
        of_rows = [paths[row] for row in self._rows]
        with self._verifying():
            self._outputs.add_step(output, self._rows, self._target.num_cached, of_rows)
            if self._must_look(output.logits.shape[1]):
                alone = self._target.commit_and_look(of_rows)
            else:
                alone = None
                self._target.commit(of_rows)
        if alone is not None:
            self._hold_against(alone, output.logits)
        self._leave()

    def _must_look(self, width: int) -> bool:
        """Tell whether to hold this step's drafts against plain decoding."""
        watching = self._watching
        return (
            watching is not None and width > 1 and not self._is_filling and watching.watch.is_due()
        )

    def _hold_against(self, alone: Alone, logits: Tensor) -> None:
        """Hold committed tokens against forwards over them alone.

        Raises:
            VerificationError: they are too far apart.
        """
        assert self._watching is not None
        nodes = torch.tensor(alone.nodes, device=logits.device)
        mine = logits[torch.arange(len(nodes), device=logits.device), nodes]
        apart = distance(mine, alone.logits.to(mine.device))
        watching = self._watching
        if watching.watch.is_wrong(apart, watching.limit, watching.is_exact):
            raise VerificationError(
                f"its logits for a draft differ from those for the same token alone by {apart:.2g} "
                f"of their standard deviation (expected at most {watching.limit:.2g})",
                is_doubt=True,
            )

    def _leave(self) -> None:
        """Let finished rows go, so that the others have the machine to themselves."""
        if self._rules.keeps_finished or self._is_filling:
            return
        staying = [row for row in self._rows if not self._text.is_finished[row]]
        if not staying or len(staying) == len(self._rows):
            return
        with self._verifying():
            self._target.select([self._rows.index(row) for row in staying])
        for row in set(self._rows) - set(staying):
            self._proposer.close(row)
        self._rows = staying

    def _learn_costs(
        self,
        steps: Sequence[Step],
        proposed: Mapping[int, Draft],
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
    ) -> None:
        """Tell the budget what the step cost, and what became of all that was proposed."""
        text = self._text
        self._budget.record(
            num_rows=num_rows,
            num_nodes=num_nodes,
            forward_sec=forward_sec,
            outcomes=[Outcome(step.row, proposed[step.row], step.token_ids) for step in steps],
            num_emitted={
                row: text.num_emitted(row)
                for row in self._rows
                if self._may_emit(row) and text.padding_of(row) is None
            },
        )


def _step_of(row: int, tree: Tree, path: Sequence[int], emitted: list[int]) -> Step:
    # A row that was stopped may end on a draft token; otherwise its last one is the bonus token.
    last = len(emitted) - 1
    ends_on_draft = (path[last], emitted[last]) in tree.children
    is_corrected = not ends_on_draft and path[last] - 1 in tree.draft.parents
    return Step(emitted, len(tree) - 1, last + ends_on_draft, row, is_corrected)
