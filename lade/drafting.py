"""Who proposes tokens: the `Drafter` protocol, and the n-gram pool as one.

Next file: `tree.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ngram_pool import Draft, NGramPool


class Drafter(Protocol):
    """Proposes how sequences go on. It can change the speed of decoding, never the text.

    One object serves any number of sequences; each begins with `open` and ends with `close`.
    """

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""

    def draft(self, sequence: int, committed: Sequence[int], max_nodes: int) -> Draft:
        """Propose at most `max_nodes` nodes after `committed`, prompt included; best first."""

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens that a step committed."""

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


class PoolDrafter:
    """Drafts from an `NGramPool`, which is fed the prompt first and every committed token after."""

    def __init__(self, pool: NGramPool, max_candidates: int | None = None) -> None:
        self.pool = pool
        self._max_candidates = max_candidates
        self._open_prompts: dict[int, tuple[int, ...]] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Feed the prompt as a sequence of its own.

        Of a prompt that is being answered already, as where several samples are asked for, only
        the end is fed again, to tie the new answer to it: more would drown what follows elsewhere.
        """
        prompt = tuple(prompt_ids)
        new = prompt[-self.pool.max_ngram_size :] if self._is_open(prompt) else prompt
        sequence = self.pool.open_sequence()
        try:
            self.pool.observe(new, sequence)
        except BaseException:
            self.pool.close_sequence(sequence)
            raise
        self._open_prompts[sequence] = prompt
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_nodes: int) -> Draft:
        """Look the last tokens up in all text the pool holds."""
        context = committed[-self.pool.max_match :]
        return self.pool.draft(context, max_nodes, self._max_candidates)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Feed committed tokens."""
        self.pool.observe(token_ids, sequence)

    def close(self, sequence: int) -> None:
        """Let the sequence's handle go; its text stays."""
        self._open_prompts.pop(sequence, None)
        self.pool.close_sequence(sequence)

    def _is_open(self, prompt: tuple[int, ...]) -> bool:
        return prompt in self._open_prompts.values()


def chain(token_ids: Sequence[int], prob: float = 1.0) -> Draft:
    """Return the draft of one path, each node as likely as the others."""
    num_nodes = len(token_ids)
    return Draft(
        np.array(token_ids, np.int32).reshape(num_nodes),
        np.arange(-1, num_nodes - 1, dtype=np.int32),
        np.arange(1, num_nodes + 1, dtype=np.int32),
        np.full(num_nodes, prob),
    )
