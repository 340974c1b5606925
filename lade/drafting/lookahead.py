"""The Jacobi window of lookahead decoding: n-grams that the target produces beside the text.

    place       0     1     2     3     4     5     6
    iteration 0 root  a1    a2    a3    a4                 W = 5 columns, N = 4: cell (j, i) lies at
    iteration 1       b1    b2    b3    b4    b5           place i + j, after the root
    iteration 2             c2    c3    c4    c5    c6

A cell sees the first iteration up to its own column and its own column from there on, and nothing
of the draft: c4 sees root a1 a2 b3. The target's likeliest tokens after the cells of the newest
iteration form the next one, and each column with the token after it is an n-gram: root b1 c2 d3, a1
b2 c3 d4, …. Then the oldest iteration is dropped, and all cells move one place closer to the
root. All this follows from the text and a fixed seed, so processes that run a model together have
the same windows. Only verification shows whether the target really goes on like that.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML
2024, section 3.
"""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lade.config import Lookahead
from lade.tree import SideNodes


class Window:
    """The window of a text, from step to step.

    It begins with random tokens only, wide enough that W columns are left when N-2 steps have added
    the other iterations. Every step moves it on by one place, however many tokens were committed,
    as the authors' code does by default. If it moved on by all of them, the last columns of every
    iteration would be random again, and their n-grams would not be the target's: over 12 answers of
    64 tokens of SmolLM2-135M-Instruct, mean accepted tokens were 1.97 instead of 2.07 (W = 7,
    N = 5, at most 8 draft tokens; 1.62 without a window).

    Args:
        context: the prompt; the first tokens are drawn from it, or from the vocabulary if it
            is empty.
        vocab_size: exclusive upper bound of the token ids in the window.
        seed: of the window's own generator, so that runs repeat, processes agree, and the random
            state used for sampling is left alone.
    """

    def __init__(
        self, lookahead: Lookahead, context: Sequence[int], vocab_size: int, seed: int
    ) -> None:
        self._ngram_size = lookahead.ngram_size
        #: Places from the root to the last cell, the same in every step.
        self.depth = lookahead.window_size + lookahead.ngram_size - 3
        known = [token_id for token_id in context if token_id < vocab_size]
        first = random.Random(seed).choices(known or range(vocab_size), k=self.depth)
        self._iterations = [first]  # oldest first; the oldest has no cell in the root's column

    @property
    def num_cells(self) -> int:
        """Cells that the next step runs; (N-1)·W - 1 once all iterations are there."""
        return sum(map(len, self._iterations))

    @property
    def newest(self) -> list[int]:
        """Indices of the cells after which the target's tokens form the next iteration."""
        # While the window fills, every step drops the first column instead of an iteration.
        num_columns = len(self._iterations[0]) + (not self._is_filling)
        return [*range(self.num_cells - num_columns, self.num_cells)]

    @property
    def _is_filling(self) -> bool:
        return len(self._iterations) < self._ngram_size - 1

    def cells(self) -> SideNodes:
        """Lay the window out as nodes after the root."""
        sizes = [*map(len, self._iterations)]
        iterations = np.repeat(np.arange(len(sizes)), sizes)
        columns = np.concatenate([np.arange(size) for size in sizes])
        columns[: sizes[0]] += 1
        before = (iterations == 0) & (columns < columns[:, None])
        above = (columns == columns[:, None]) & (iterations <= iterations[:, None])
        token_ids = [token_id for iteration in self._iterations for token_id in iteration]
        return SideNodes(token_ids, (iterations + columns).tolist(), before | above)

    def advance(self, root_token_id: int, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Add the next iteration, move on by one place and return the complete n-grams.

        Args:
            root_token_id: token of the root in the step that was run.
            token_ids: the target's likeliest tokens after the cells of `newest`.

        Returns:
            The complete n-grams, int32 [W, N]; [0, N] in the first steps.
        """
        if self._is_filling:
            self._iterations = [*(old[1:] for old in self._iterations), [*token_ids]]
            return np.empty((0, self._ngram_size), np.int32)
        oldest, *others = self._iterations
        columns = [[root_token_id, *oldest], *others, token_ids]
        self._iterations = [others[0][1:], *others[1:], [*token_ids]]
        return np.array(columns, np.int32).T
