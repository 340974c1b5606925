"""Who proposes tokens: the `Drafter` protocol, the n-gram pool as one, and what a row gets.

Next file: `tree.py`.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lade.errors import DrafterWarning
from lade.grammar import Foresight
from lade.harvest import Successors
from lade.tree import Tree
from ngram_pool import DEFAULT_NUM_SUCCESSORS, Draft, NGramPool, SampledDraft, SuccessorTable

_T = TypeVar("_T")


class Drafter(Protocol):
    """Proposes how sequences go on. It can change the speed of decoding, never the text.

    One object serves any number of sequences; each begins with `open` and ends with `close`.
    """

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""

    def draft(self, sequence: int, committed: Sequence[int], max_nodes: int) -> Draft:
        """Propose at most `max_nodes` nodes after `committed`, prompt included; best first.

        Where a grammar forces the next tokens, `committed` ends with those, observed or not.
        """

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens that a step committed."""

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """Can also draw its drafts at random and tell the distribution of each token."""

    def sample(
        self, sequence: int, committed: Sequence[int], max_nodes: int, rng: np.random.Generator
    ) -> SampledDraft:
        """Draw at most `max_nodes` nodes after `committed`, in an order that keeps `first` fair."""


@runtime_checkable
class HarvestingDrafter(Drafter, Protocol):
    """Also learns what the target found likely behind every node it ran, accepted or not."""

    @property
    def num_successors(self) -> int:
        """How many of the target's likeliest tokens to be told of at each node; 0 for none."""

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Learn of nodes that were run; called before what they led to is observed.

        Or, where a device is waited for, after that, while it is at the next forward.

        Args:
            sequence: whose.
            committed: the text up to and including the first node; not to be kept.
            token_ids: of the nodes [num_nodes], the first of which is committed: the root of a
                tree, or the first of several successive tokens of a prompt.
            parents: of the nodes [num_nodes], -1 for the first; parents[i] < i.
            successors: [num_nodes, num_successors].
        """


@runtime_checkable
class NgramDrafter(Drafter, Protocol):
    """Also learns n-grams that are no text: what the target would write behind such tokens."""

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Learn n-grams [num_ngrams, ngram_size] that a lookahead window has come to.

        The first token of each is what was assumed there; the others are the target's likeliest,
        each from one step later than the one before it.
        """


class NoDrafter:
    """Drafts nothing."""

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        return 0

    def draft(self, sequence: int, committed: Sequence[int], max_nodes: int) -> Draft:
        """Propose nothing."""
        return Draft.empty()

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def close(self, sequence: int) -> None:
        """End a sequence."""


class _Harvest(NamedTuple):
    """What `NGramPool.harvest` takes."""

    contexts: NDArray[np.int64]  # [n, 2]
    token_ids: NDArray[np.int32]  # [n, num_successors]
    probs: NDArray[np.float32]


class PoolDrafter:
    """Drafts from an `NGramPool`, which is fed the prompt first and every committed token after.

    Args:
        pool: learns from all sequences.
        max_candidates: G, the greatest number of paths of a draft; None for no limit.
        prior: what the target finds likely behind single tokens and pairs, as `lade.prewarm` found.
    """

    num_successors = DEFAULT_NUM_SUCCESSORS

    def __init__(
        self,
        pool: NGramPool,
        max_candidates: int | None = None,
        prior: SuccessorTable | None = None,
    ) -> None:
        self.pool = pool
        self._max_candidates = max_candidates
        self._prior = prior
        self._open_prompts: dict[int, tuple[int, ...]] = {}
        self._harvests: dict[int, list[_Harvest]] = {}  # by sequence, those not in the pool yet
        self._num_answered: dict[int, int] = {}  # by sequence, tokens observed behind its prompt

    @property
    def has_prior(self) -> bool:
        """Whether a table is known that was made before."""
        return self._prior is not None

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Feed the prompt as a sequence of its own.

        Of a prompt that is being answered already, as where several samples are asked for, only
        the end is fed again, to tie the new answer to it: more would drown what follows elsewhere.
        """
        prompt = tuple(prompt_ids)
        new = prompt[-self.pool.max_ngram_size :] if self._is_open(prompt) else prompt
        sequence = self.pool.open_sequence(self._prior)
        try:
            self.pool.observe(new, sequence)
        except BaseException:
            self.pool.close_sequence(sequence)
            raise
        self._open_prompts[sequence] = prompt
        self._harvests[sequence] = []
        self._num_answered[sequence] = 0
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_nodes: int) -> Draft:
        """Look the last tokens up in all that the pool holds."""
        context = committed[-self.pool.max_match :]
        return self.pool.draft(context, max_nodes, self._max_candidates, sequence)

    def sample(
        self, sequence: int, committed: Sequence[int], max_nodes: int, rng: np.random.Generator
    ) -> SampledDraft:
        """Draw from what may follow the last tokens by all that the pool holds."""
        context = committed[-self.pool.max_match :]
        return self.pool.sample(context, max_nodes, rng, self._max_candidates, sequence)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Keep what the target found likely behind the nodes, until the step is observed.

        Before, the pool would learn to trust a table that knows the very answer. Told after that,
        it is fed at once.
        """
        last = np.array(token_ids)
        previous = last[parents]
        previous[0] = committed[-2] if len(committed) > 1 else -1
        pairs = np.stack([previous, last], axis=1)
        singles = pairs.copy()
        singles[:, 0] = -1
        # The likeliest nodes stand first in a tree; of equal contexts the one put last stays.
        contexts = np.concatenate([pairs, singles])[::-1]
        ids, probs = (np.concatenate([part, part])[::-1] for part in successors)
        harvest = _Harvest(contexts, ids, probs)
        num_answered = len(committed) - len(self._open_prompts[sequence])
        if 0 <= num_answered < self._num_answered[sequence]:
            self.pool.harvest(*harvest)
        else:
            self._harvests[sequence].append(harvest)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Feed committed tokens, and what was harvested where they were chosen."""
        self.pool.observe(token_ids, sequence, is_answer=True)
        self._num_answered[sequence] += len(token_ids)
        for harvest in self._harvests[sequence]:
            self.pool.harvest(*harvest)
        self._harvests[sequence].clear()

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Feed each n-gram as a sequence of its own: none is part of a text."""
        for ngram in ngrams:
            own = self.pool.open_sequence()
            try:
                self.pool.observe(ngram, own)
            finally:
                self.pool.close_sequence(own)

    def close(self, sequence: int) -> None:
        """Let the sequence's handle go; its text stays."""
        self._open_prompts.pop(sequence, None)
        self._harvests.pop(sequence, None)
        self._num_answered.pop(sequence, None)
        self.pool.close_sequence(sequence)

    def _is_open(self, prompt: tuple[int, ...]) -> bool:
        return prompt in self._open_prompts.values()


def num_successors_of(drafter: Drafter) -> int:
    """Return how many of the target's likeliest tokens a drafter wants to know at each node."""
    return drafter.num_successors if isinstance(drafter, HarvestingDrafter) else 0


def has_table(drafter: Drafter) -> bool:
    """Tell whether a drafter has a table that was made before.

    Then it learns nothing from the ends of prompts: that took more time (0.7 % of an answer) than
    it saved.
    """
    return isinstance(drafter, PoolDrafter) and drafter.has_prior


def chain(token_ids: Sequence[int], prob: float = 1.0) -> Draft:
    """Return the draft of one path, each node as likely as the others."""
    num_nodes = len(token_ids)
    return Draft(
        np.array(token_ids, np.int32).reshape(num_nodes),
        np.arange(-1, num_nodes - 1, dtype=np.int32),
        np.arange(1, num_nodes + 1, dtype=np.int32),
        np.full(num_nodes, prob),
    )


def after(token_ids: Sequence[int], draft: Draft) -> Draft:
    """Return a draft that begins with a chain, all of whose tokens must come, and goes on so."""
    first = chain(token_ids)
    whole = Draft(
        np.concatenate([first.token_ids, draft.token_ids]),
        np.concatenate([first.parents, draft.parents + len(first)]),
        np.concatenate([first.depths, draft.depths + len(first)]),
        np.concatenate([first.probs, draft.probs]),
    )
    if not isinstance(draft, SampledDraft):
        return whole
    # A token that was not drawn has a support of its own.
    support_size = max(1, draft.support_token_ids.shape[1])
    ids = np.zeros((len(whole), support_size), np.int32)
    probs = np.zeros(ids.shape)
    ids[: len(first), 0], probs[: len(first), 0] = first.token_ids, 1.0
    ids[len(first) :], probs[len(first) :] = draft.support_token_ids, draft.support_probs
    return SampledDraft(whole.token_ids, whole.parents, whole.depths, whole.probs, ids, probs)


def narrowed(draft: Draft, max_candidates: int) -> Draft:
    """Return the first nodes of a draft that make no more paths than so many."""
    kept: dict[int, int] = {-1: -1}  # node -> node of the new draft
    leaves: set[int] = set()
    for node, parent in enumerate(draft.parents.tolist()):
        extends = parent in leaves
        if parent in kept and (extends or len(leaves) < max_candidates):
            kept[node] = len(kept) - 1
            leaves = (leaves - {parent}) | {node}
    if len(kept) == len(draft) + 1:
        return draft
    nodes = [*kept][1:]
    parents = [kept[parent] for parent in draft.parents[nodes].tolist()]
    return Draft(
        draft.token_ids[nodes],
        np.array(parents, np.int32).reshape(len(nodes)),
        draft.depths[nodes],
        draft.probs[nodes],
    )


def checked(draft: object, max_nodes: int) -> Draft:
    """Return the draft of a drafter, its depths counted anew, or raise where it is none.

    Args:
        draft: what a drafter returned.
        max_nodes: nodes beyond so many are left out.

    Raises:
        TypeError: it is no `Draft`, or its arrays are not of numbers.
        ValueError: the arrays do not fit each other, parents do not stand before their children,
            a probability is none, or what was drawn is not in its support.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"expected a Draft, got {type(draft).__name__}")
    token_ids: NDArray[Any] = np.asarray(draft.token_ids)
    parents: NDArray[Any] = np.asarray(draft.parents)
    probs: NDArray[Any] = np.asarray(draft.probs)
    for name, array, kind in (
        ("token_ids", token_ids, np.integer),
        ("parents", parents, np.integer),
        ("probs", probs, np.floating),
    ):
        if array.ndim != 1 or len(array) != len(token_ids):
            raise ValueError(
                f"expected {name} of shape [{len(token_ids)}], got {list(array.shape)}"
            )
        if len(array) and not np.issubdtype(array.dtype, kind):
            raise TypeError(f"expected {name} of {kind.__name__}, got {array.dtype}")
    num_nodes = min(len(token_ids), max_nodes)
    parents, probs = parents[:num_nodes].astype(np.int32), probs[:num_nodes].astype(np.float64)
    if num_nodes and not ((parents >= -1) & (parents < np.arange(num_nodes))).all():
        raise ValueError(f"expected parents[i] from -1 to i - 1, got {parents.tolist()}")
    if not ((probs >= 0) & (probs <= 1)).all():  # False for NaN
        raise ValueError("expected probs from 0 to 1")
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    # Ids beyond any vocabulary are cut off later; here they only have to fit.
    ids = np.clip(token_ids[:num_nodes], -1, np.iinfo(np.int32).max).astype(np.int32)
    whole = Draft(ids, parents, np.array(depths, np.int32), probs)
    if not isinstance(draft, SampledDraft):
        return whole
    support_ids = np.asarray(draft.support_token_ids)[:num_nodes]
    support_probs = np.asarray(draft.support_probs)[:num_nodes]
    if support_ids.ndim != 2 or support_ids.shape != support_probs.shape:
        raise ValueError("expected support_token_ids and support_probs of one shape [num_nodes, n]")
    if len(support_ids) != num_nodes:
        raise ValueError(f"expected a support of each of {num_nodes} nodes, got {len(support_ids)}")
    if not ((support_probs >= 0) & (support_probs <= 1)).all():
        raise ValueError("expected support_probs from 0 to 1")
    if not ((support_ids == ids[:, None]) & (support_probs > 0)).any(axis=1).all():
        raise ValueError("expected every token to be in the support that it was drawn from")
    return SampledDraft(
        *(whole.token_ids, whole.parents, whole.depths, whole.probs),
        support_ids.astype(np.int32),
        support_probs.astype(np.float64),
    )


class _Proposal(NamedTuple):
    """What a row was proposed last, and how it came about."""

    draft: Draft
    forced: list[int]  # tokens at its beginning that a grammar leaves no choice about
    room: int  # the greatest depth that the target can run


class Proposer:
    """Gathers the drafts of every row of a batch, in two turns.

    `propose` asks for all there is, so that a budget can decide how much of it to verify; `draw`
    returns so much of it, drawn anew where drafts are to be drawn at random. How many nodes are
    drawn must not depend on the tokens drawn, or the text would no longer have the distribution it
    should.

    A drafter can never fail the call that it drafts for: what it raises, and a draft that is none,
    is told in a warning, and from then on it is not asked any more.

    Args:
        drafter: fed by the caller through `open` and `observe`.
        vocab_size: no token id of a draft may reach it.
        max_candidates: paths of a draft that the target can verify at once; None for any number.
        foresight: of the grammar that constrains the text, if there is one.
        rngs: one for each row, to draw drafts with; None to take the likeliest.
        is_strict: let what the drafter raises through, for those who write one.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        max_candidates: int | None = None,
        foresight: Foresight | None = None,
        rngs: Sequence[np.random.Generator] | None = None,
        is_strict: bool = False,
    ) -> None:
        self._drafter = drafter
        self._is_strict = is_strict
        self._has_failed = False
        self._vocab_size = vocab_size
        self._max_candidates = max_candidates
        self._foresight = foresight
        # Asked once: to look for the methods of a protocol takes 30 µs.
        self._sampling = drafter if isinstance(drafter, SamplingDrafter) else None
        self._harvesting = drafter if isinstance(drafter, HarvestingDrafter) else None
        self._learning = drafter if isinstance(drafter, NgramDrafter) else None
        self._num_successors = self._asked(lambda: num_successors_of(drafter), 0)
        self._rngs = rngs if self._sampling is not None else None
        self._sequences: dict[int, int] = {}  # row -> the drafter's handle
        self._proposals: dict[int, _Proposal] = {}  # of each row

    @property
    def num_successors(self) -> int:
        """How many of the target's likeliest tokens the drafter wants to be told of."""
        return 0 if self._has_failed else self._num_successors

    def open(self, row: int, context: Sequence[int]) -> None:
        """Begin a row with its prompt."""

        def begin() -> None:
            self._sequences[row] = self._drafter.open(context)

        self._asked(begin, None)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Let the drafter learn what was emitted."""
        self._asked(lambda: self._drafter.observe(self._sequences[row], token_ids), None)

    def harvest(self, row: int, context: Sequence[int], tree: Tree, successors: Successors) -> None:
        """Let the drafter learn what the target found likely behind the nodes of a row's tree."""
        parents = [-1, *(tree.draft.parents + 1).tolist()]
        self._harvest(row, context, tree.token_ids, parents, successors)

    def harvest_prompt(self, row: int, context: Sequence[int], successors: Successors) -> None:
        """Let the drafter learn what follows the last tokens of a prompt but the very last one."""
        num = successors.num_nodes
        tokens = context[-1 - num : -1]
        committed = context[: len(context) - num]
        self._harvest(row, committed, tokens, range(-1, num - 1), successors)

    def _harvest(
        self,
        row: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        def tell() -> None:
            assert self._harvesting is not None
            sequence = self._sequences[row]
            self._harvesting.harvest(sequence, committed, token_ids, parents, successors)

        self._asked(tell, None)

    def observe_ngrams(self, row: int, ngrams: NDArray[np.int32]) -> None:
        """Let the drafter learn n-grams [num_ngrams, ngram_size] of a row's lookahead window."""

        def tell() -> None:
            assert self._learning is not None
            self._learning.observe_ngrams(self._sequences[row], ngrams)

        self._asked(tell, None)

    def close(self, row: int) -> None:
        """End a row."""
        sequence = self._sequences.pop(row, None)
        if sequence is not None:
            self._asked(lambda: self._drafter.close(sequence), None, even_if_failed=True)

    def close_all(self) -> None:
        """End all rows that are open."""
        with ExitStack() as stack:  # one that raises does not keep the others open
            for row in [*self._sequences]:
                stack.callback(self.close, row)

    def _asked(self, ask: Callable[[], _T], instead: _T, *, even_if_failed: bool = False) -> _T:
        """Return what the drafter answers, or something else where it fails or has failed."""
        if self._has_failed and not even_if_failed:
            return instead
        try:
            return ask()
        except Exception as failure:
            if self._is_strict:
                raise
            if not self._has_failed:
                self._has_failed = True
                what = (str(failure).splitlines() or [""])[0][:200]
                warnings.warn(
                    f"lade goes on without drafts: {type(self._drafter).__name__} failed "
                    f"({type(failure).__name__}: {what}); Config(strict_drafter=True) raises it",
                    DrafterWarning,
                    stacklevel=2,
                )
            return instead

    def propose(
        self, row: int, committed: Sequence[int], context: Sequence[int], room: int, max_nodes: int
    ) -> Draft:
        """Return what could follow, likeliest first.

        Args:
            committed: the row, padding included, as logits processors see it.
            context: the row as the drafter sees it.
            room: the greatest depth that the target can run.
            max_nodes: the greatest number of nodes.
        """
        forced: list[int] = []
        draft = Draft.empty()
        most = min(room, max_nodes)
        if most > 0 and self._foresight is not None:
            forced = self._foresight.forced_tokens(row, committed, most)
        left = max_nodes - len(forced)
        if most > 0 and left > 0:
            context = [*context, *forced] if forced else context
            draft = self._asked(partial(self._drafted, row, context, left), draft)
            if self._max_candidates is not None:
                draft = narrowed(draft, self._max_candidates)
        draft = self._possible(after(forced, draft) if forced else draft, room)
        self._proposals[row] = _Proposal(draft, forced, room)
        return draft

    def draw(self, row: int, context: Sequence[int], num_nodes: int) -> Draft:
        """Return so many nodes of what was proposed, or drawn in their place."""
        proposed, forced, room = self._proposals[row]
        proposed = proposed.first(num_nodes)
        num_drawn = len(proposed) - len(forced)
        if self._rngs is None or num_drawn < 1:
            return proposed
        context = [*context, *forced] if forced else context
        drawn = partial(self._drawn, row, context, num_drawn, self._rngs[row])
        sampled = self._asked(drawn, Draft.empty())
        return self._possible(after(forced, sampled) if forced else sampled, room)

    def _drafted(self, row: int, context: Sequence[int], max_nodes: int) -> Draft:
        drafted = self._drafter.draft(self._sequences[row], context, max_nodes)
        return checked(drafted, max_nodes)

    def _drawn(
        self, row: int, context: Sequence[int], max_nodes: int, rng: np.random.Generator
    ) -> Draft:
        assert self._sampling is not None
        drawn = self._sampling.sample(self._sequences[row], context, max_nodes, rng)
        return checked(drawn, max_nodes)

    def _possible(self, draft: Draft, room: int) -> Draft:
        """Cut a draft before the first node that the target cannot run.

        That is one beyond the longest text, or, from a pool that learned from another model's text,
        a token that this model does not have. Of a node that was drawn, what it could have become
        decides, not what it became.
        """
        if isinstance(draft, SampledDraft):
            outside = (draft.support_token_ids >= self._vocab_size) & (draft.support_probs > 0)
            impossible = np.flatnonzero((draft.depths > room) | outside.any(axis=1))
        else:
            unknown = (draft.token_ids < 0) | (draft.token_ids >= self._vocab_size)
            if len(draft) <= room and not unknown.any():
                return draft
            impossible = np.flatnonzero((draft.depths > room) | unknown)
        return draft.first(int(impossible[0])) if len(impossible) else draft
