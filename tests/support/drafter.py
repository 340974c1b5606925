"""A drafter that knows the answer and errs on purpose, so that drafts are accepted and rejected.

Next file: `run.py`.
"""

from collections.abc import Sequence

import numpy as np

from lade.drafting.drafter import Drafter
from ngram_pool import Draft
from tests.support.tiny import VOCAB_SIZE

RIGHT = 0.7  # probability that a draft token is the answer's


class AnswerDrafter(Drafter):
    """Drafter along known answers, each token right by chance; some drafts branch."""

    def __init__(self, answers: Sequence[Sequence[int]], seed: int) -> None:
        """Take the sequences, prompts included, in the order in which they are opened."""
        self._answers = answers
        self._rng = np.random.default_rng(seed)
        self._num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Take the next answer for this prompt."""
        self._num_opened += 1
        return self._num_opened - 1

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose one path; in a draft that branches, each of its nodes has a sibling.

        After a wrong token, the path goes on as if it were right.
        """
        branches = self._rng.random() < 0.3
        nodes: list[tuple[int, int, int]] = []  # token, parent, depth
        parent = -1
        for depth, right in enumerate(self._answers[sequence][len(committed) :], 1):
            token_id = right if self._rng.random() < RIGHT else self._other_than(right)
            siblings = [token_id]
            if branches:
                siblings.insert(int(self._rng.integers(2)), self._other_than(token_id))
            if len(nodes) + len(siblings) > max_draft_tokens:
                break
            nodes += [(sibling, parent, depth) for sibling in siblings]
            parent = len(nodes) - len(siblings) + siblings.index(token_id)
        token_ids, parents, depths = np.array(nodes, np.int32).reshape(-1, 3).T.copy()
        return Draft(token_ids, parents, depths, np.linspace(0.9, 0.1, len(nodes)))

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn nothing: the answers are known."""

    def close(self, sequence: int) -> None:
        """Do nothing: there is nothing to free."""

    def _other_than(self, token_id: int) -> int:
        return (token_id + 1 + int(self._rng.integers(VOCAB_SIZE - 1))) % VOCAB_SIZE
