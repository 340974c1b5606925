"""The n-gram pool as a drafter."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lade.drafting.drafter import Drafter
from lade.drafting.successors import Successors
from ngram_pool import DEFAULT_NUM_SUCCESSORS, Draft, NGramPool, SampledDraft, SuccessorTable


class PoolDrafter(Drafter):
    """Drafter on an `NGramPool`, which is fed the prompt and then every committed token.

    Args:
        pool: learns from all sequences.
        max_candidates: G, the maximum number of paths in a draft; None for no limit.
        prewarmed: the successors that the target finds likely after single tokens and pairs, as
            `lade.prewarm` found them.
        layers: pools that are only read, whose text drafts come from as well.

    Raises:
        TypeError: a layer is not an `NGramPool`.
        ValueError: a layer is not read-only.
    """

    name = "pool"
    num_successors = DEFAULT_NUM_SUCCESSORS
    learns_ngrams = True
    is_free = True  # also because what pools know comes and goes too fast to measure

    def __init__(
        self,
        pool: NGramPool,
        max_candidates: int | None = None,
        prewarmed: SuccessorTable | None = None,
        layers: Sequence[NGramPool] = (),
    ) -> None:
        if layers:
            # Raises now rather than in a call.
            pool.close_sequence(pool.open_sequence(layers=layers))
        self.pool = pool
        self._max_candidates = max_candidates
        self._max_match = pool.max_match  # of a context's last tokens
        self._prewarmed = prewarmed
        self._layers = tuple(layers)
        self._open_prompts: dict[int, tuple[int, ...]] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Feed the prompt as a sequence of its own.

        If the same prompt is being answered already, as when several samples are asked for, only
        its end is fed again, to tie the new answer to it: more would drown out what follows
        elsewhere.
        """
        prompt = tuple(prompt_ids)
        is_answered = prompt in self._open_prompts.values()
        new = prompt[-self.pool.max_ngram_size :] if is_answered else prompt
        sequence = self.pool.open_sequence(self._prewarmed, self._layers)
        try:
            self.pool.observe(new, sequence)
        except BaseException:  # of an interrupt, too: nobody else knows of the sequence
            self.pool.close_sequence(sequence)
            raise
        self._open_prompts[sequence] = prompt
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Look up the last tokens in all that the pool holds."""
        context = committed[-self._max_match :]
        return self.pool.draft(context, max_draft_tokens, self._max_candidates, sequence)

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> SampledDraft:
        """Draw from what may follow the last tokens, by all that the pool holds.

        Node i depends only on the draws of nodes before i, so that `SampledDraft.first` is
        unbiased.
        """
        context = committed[-self._max_match :]
        return self.pool.sample(context, max_draft_tokens, rng, self._max_candidates, sequence)

    def explore(
        self, sequence: int, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Name tokens to run as further children of the root, for what is harvested there.

        Frequent ones, above all those whose successors are not known.

        Args:
            sequence: handle of the sequence.
            excluded: tokens not to name, as they are run anyway, int32 [num_excluded].
            max_tokens: maximum number of tokens to name, at least 1.

        Returns:
            Token ids, int32 [num_tokens], and how many tokens each is expected to save in the long
            run, float64 [num_tokens], never increasing.
        """
        return self.pool.explore(max_tokens, excluded, sequence)

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

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Feed each n-gram as a sequence of its own: none is part of a text."""
        for ngram in ngrams:
            self.pool.observe(ngram, None)

    def close(self, sequence: int) -> None:
        """Close the sequence; its text stays in the pool."""
        self._open_prompts.pop(sequence, None)
        self.pool.close_sequence(sequence)
