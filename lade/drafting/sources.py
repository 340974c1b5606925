"""The sources of a call's drafts, its pool first, each guarded against errors.

`speculator.py` joins their drafts. User drafters and grammars run only here, so none of them can
fail a call or change a text.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lade.budget.budget import Calibration
from lade.budget.seconds import Seconds
from lade.config import check_integer
from lade.drafting.drafter import Drafter, DraftingCall, ForcedTokens
from lade.drafting.drafts import checked
from lade.drafting.successors import Successors, compile_kernels
from lade.errors import DrafterWarning, LadeError, in_one_line
from lade.machine.generators import put_back, random_states
from lade.stats import SourceStats
from ngram_pool import DEFAULT_NUM_SUCCESSORS, Draft, NGramPool, SampledDraft
from ngram_pool._kernels import MAX_TOKEN_ID

# Of the drafts of pools and drafters, in earlier calls, too.
_COSTS = WeakKeyDictionary[Any, Seconds]()


class PoolDrafter(Drafter):
    """Drafter on an `NGramPool`, which is fed the prompt and then every committed token.

    Args:
        pool: learns from all sequences.
        max_candidates: G, the maximum number of paths in a draft; None for no limit.
        layers: read-only pools, such as tables of `lade.prewarm`, from which drafts come as well.
    """

    name = "pool"
    num_successors = DEFAULT_NUM_SUCCESSORS

    def __init__(
        self,
        pool: NGramPool,
        max_candidates: int | None = None,
        layers: Sequence[NGramPool] = (),
    ) -> None:
        self.pool = pool
        self._max_candidates = max_candidates
        self._max_match = pool.max_match  # of a context's last tokens
        self._layers = tuple(layers)
        self._open_prompts: dict[int, tuple[int, ...]] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Feed the prompt as a new sequence.

        If the same prompt is being answered already (several samples), only its end is fed again,
        to connect the new answer with it: more copies would outweigh all other text.
        """
        prompt = tuple(prompt_ids)
        is_answered = prompt in self._open_prompts.values()
        new = prompt[-self.pool.max_ngram_size :] if is_answered else prompt
        sequence = self.pool.open_sequence(self._layers)
        try:
            self.pool.observe(new, sequence)
        except BaseException:  # also an interrupt: no other code knows the sequence
            self.pool.close_sequence(sequence)
            raise
        self._open_prompts[sequence] = prompt
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Look up the last tokens in all text of the pool."""
        context = committed[-self._max_match :]
        return self.pool.draft(context, max_draft_tokens, self._max_candidates, sequence)

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> SampledDraft:
        """Draw continuations of the last tokens, by the pool's probabilities.

        Node i depends only on the draws of nodes before i, so that `SampledDraft.first` is
        unbiased.
        """
        context = committed[-self._max_match :]
        return self.pool.sample(context, max_draft_tokens, rng, self._max_candidates, sequence)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Feed the successors of the nodes."""
        previous = committed[-2] if len(committed) > 1 else -1
        self.pool.harvest_tree(previous, token_ids, parents, *successors)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Feed committed tokens."""
        self.pool.observe(token_ids, sequence, is_answer=True)

    def close(self, sequence: int) -> None:
        """Close the sequence; its text stays in the pool."""
        self._open_prompts.pop(sequence, None)
        self.pool.close_sequence(sequence)


class Kind(IntEnum):
    """The kinds of sources, in the order in which they are asked.

    With rejection sampling, pools draw after the budget has chosen a number, and models at once.
    """

    FREE = 0  # a prediction, or another drafter that takes hardly any time
    POOL = 1
    OTHER = 2
    MODEL = 3  # or another drafter that is made for each call


class Source:
    """A drafter or a grammar in one call, with its statistics and costs.

    The first exception becomes a warning, and the drafter is not asked again. After each answer,
    torch's global random state, from which text is drawn, is restored on the CPU and on the
    target's device. That takes 5 µs.

    All threads share that state, so restoring it also undoes the draws of other threads. Therefore
    it is not restored for lade's drafters, which draw nothing from it. Their drafts are not checked
    either, as a check takes half as long as drafting.

    Args:
        drafter: a drafter or a pool, from which the drafter of the call is made, or a logits
            processor that knows a grammar.
        name: name in statistics and in the warning.
        call: the call.
        is_strict: whether exceptions are raised, for authors of drafters.

    Raises:
        LadeError: the drafter cannot draft for this call.
    """

    def __init__(
        self,
        drafter: Drafter | NGramPool | ForcedTokens,
        name: str,
        call: DraftingCall,
        is_strict: bool,
    ) -> None:
        self._is_strict = is_strict
        self._device = call.device or torch.device("cpu")
        self._asks(drafter)
        self.has_failed = False
        self.name = name
        self.stats = SourceStats()
        self.calibration = Calibration()
        self.costs = Seconds()
        self.kind, self.num_successors = Kind.OTHER, 0
        #: Whether it is asked only if it pays, even if it is the only source.
        self.is_measured = False
        if not isinstance(drafter, ForcedTokens):
            self.ask(self._make, None, call, may_refuse=True)

    def _asks(self, drafter: object) -> None:
        self.drafter: Any = drafter
        # Whether its class is lade's, and not a user's subclass.
        self._is_own = type(drafter).__module__.startswith("lade.")

    def ask(
        self,
        what: str | Callable[..., Any],
        instead: Any,
        *args: Any,
        even_if_failed: bool = False,
        may_refuse: bool = False,
    ) -> Any:
        """Call a method of the drafter; return `instead` if it fails or has failed before.

        Args:
            what: name of the method (looking it up may raise, too), or a function that calls it.
            instead: result after a failure.
            args: arguments of the method.
            even_if_failed: whether to call it after a failure; the warning is not repeated.
            may_refuse: whether a `LadeError` ends the call.
        """
        if self.has_failed and not even_if_failed:
            return instead
        states = None if self._is_own else random_states(self._device)
        if not self._is_own:  # it may change lists that others read
            args = tuple([*each] if isinstance(each, list) else each for each in args)
        try:
            return (getattr(self.drafter, what) if isinstance(what, str) else what)(*args)
        except Exception as failure:  # the drafter may be the user's
            if self._is_strict or (may_refuse and isinstance(failure, LadeError)):
                raise
            if not self.has_failed:
                self.has_failed = True
                warnings.warn(
                    f"lade goes on without drafts of {self.name!r}, which failed "
                    f"({in_one_line(failure)}); Config(strict_drafter=True) raises it",
                    DrafterWarning,
                    stacklevel=2,
                )
            return instead
        finally:
            if states is not None:
                put_back(self._device, states)

    def _make(self, call: DraftingCall) -> None:
        """Make the drafter of the call, and read its attributes."""
        given = self.drafter
        with suppress(TypeError):  # no weak reference to it, or no hash: costs are of this call
            self.costs = _COSTS.setdefault(given, self.costs)
        if isinstance(given, NGramPool):
            pools = (NGramPool(), (given,)) if given.is_read_only else (given, ())
            made: Any = PoolDrafter(pools[0], call.max_candidates, layers=pools[1])
        else:
            made = given.for_call(call)
        if not isinstance(made, Drafter):
            raise TypeError(f"expected for_call to return a lade.Drafter, got {made!r}")
        self._asks(made)
        if isinstance(made, PoolDrafter):
            self.kind = Kind.POOL
        elif type(given).for_call is not Drafter.for_call:
            self.kind = Kind.MODEL
        elif made.is_free:
            self.kind = Kind.FREE
        wanted = made.num_successors
        check_integer("num_successors", wanted, 0)
        if wanted:
            compile_kernels()
        self.is_measured = getattr(made, "is_measured", False)
        self.num_successors = int(wanted)

    def open(self, handles: dict["Source", Any], context: Sequence[int]) -> None:
        """Begin a sequence, and add its handle; called by `ask`, as the next two are."""
        handles[self] = self.drafter.open(context)

    def draft(
        self,
        handle: Any,
        committed: Sequence[int],
        allowance: int,
        rng: np.random.Generator | None = None,
    ) -> Draft:
        """Return a valid draft; with `rng`, a pool draws it at random."""
        if rng is None:
            draft: Draft = self.drafter.draft(handle, committed, allowance)
        else:
            draft = self.drafter.sample(handle, committed, allowance, rng)
        return draft if self._is_own else checked(draft, allowance)

    def forced(self, row: int, committed: Sequence[int], most: int) -> list[int]:
        """Return the tokens that a grammar forces, also tokens outside of the vocabulary."""
        forced = islice(self.drafter.forced_tokens(row, committed, most), most)
        return [min(max(-1, index(token_id)), MAX_TOKEN_ID) for token_id in forced]
