"""`Prediction`: drafts from a predicted answer, at the position that the real answer has reached.

A pool finds a position by the last tokens alone, which does not work right after an edit. Here the
position is followed. After tokens that were not predicted, the answer probably goes on behind as
many predicted ones. A replacement that was made once is probably made again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lade.budget.asking import Mean
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import chain
from ngram_pool import Draft

# Expected acceptance of a next token right after the position was lost. The error halves after one
# matched token, and again after 2, 3 to 4, 5 to 8, 9 to 16, and more. Each call soon measures it.
_FIRST_PROB, _NUM_LEVELS = 0.2, 7
# Tokens of a path, and further tokens for each matched token before it: a wide step at a wrong
# position is lost.
_PATH_PER_MATCH = 4
_SURE_RUN = 3  # matched tokens after which a position is sure, and the ones before are an edit
_LONGEST_MATCH = 16
# Distance to the last sure position within which shorter matches count; positions compared for
# a token.
_NEAR = 64
_LEAST_PROB = 0.05  # lowest probability of a path that is drafted further
# Most old and new tokens of an edit; after longer ones, no replacement of equal length is guessed.
_LONGEST_EDIT = 8

_Ids = NDArray[np.int64]


@dataclass(slots=True)
class _Row:
    """A text and its position in the prediction."""

    text: list[int]  # its last tokens
    length: int  # of the whole text
    ids: _Ids  # the prediction; behind the position, with the replacements that were made before it
    position: int | None = 0  # index of the next token; None if it is lost
    run: int = _SURE_RUN  # matched tokens before
    #: Last sure position, and the tokens emitted since the text left it.
    anchor: int = 0
    since: list[int] = field(default_factory=list)


class Prediction(Drafter):
    """Drafter from one predicted text, for one call; every row has its own position in it.

    Args:
        token_ids: the predicted answer, without the prompt.
    """

    name = "prediction"
    is_free = True

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.array(token_ids, np.int64)
        # How probable a token is, by the run before it; the first guess is as if seen twice.
        wrong = [(1.0 - _FIRST_PROB) * 0.5**level for level in range(_NUM_LEVELS)]
        self._probs = [Mean(1.0 - each, 2.0) for each in wrong]
        self._rows: dict[int, _Row] = {}
        self._num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a text at the beginning of the prediction."""
        self._num_opened += 1
        self._rows[self._num_opened] = _Row(
            [*prompt_ids[-_LONGEST_MATCH:]], len(prompt_ids), self._ids
        )
        return self._num_opened

    def close(self, sequence: int) -> None:
        """Forget the text."""
        del self._rows[sequence]

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Return the continuation of the prediction, in one path."""
        row = self._rows[sequence]
        start, forced = self._start(row), committed[row.length :]  # by a grammar, and not observed
        if start is None or row.ids[start : start + len(forced)].tolist() != [*forced]:
            return Draft.empty()
        start, prob, probs = start + len(forced), 1.0, list[float]()
        most = min(max_draft_tokens, _PATH_PER_MATCH * (1 + row.run))
        token_ids = row.ids[start : start + most].tolist()
        for depth in range(len(token_ids)):
            prob *= self._prob(row.run + len(forced) + depth).value
            probs.append(prob)
        kept = [each for each in probs if each >= _LEAST_PROB]
        return chain(token_ids[: len(kept)], kept)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Follow the text."""
        row = self._rows[sequence]
        row.length += len(token_ids)
        for token_id in token_ids:
            self._follow(row, token_id)
        del row.text[:-_LONGEST_MATCH]

    def _prob(self, run: int) -> Mean:
        """Return the probability of a next token after a number of matched tokens."""
        level = run if run < 3 else min(1 + (run - 1).bit_length(), len(self._probs) - 1)
        return self._probs[level]

    # --- positions -------------------------------------------------------------------------------

    def _start(self, row: _Row) -> int | None:
        """Return the position of a text; of a lost one, behind as many old tokens as new ones."""
        if row.position is not None or len(row.since) > _LONGEST_EDIT:
            return row.position
        return row.anchor + len(row.since)

    def _follow(self, row: _Row, token_id: int) -> None:
        """Find the position behind the next token of the text."""
        row.text.append(token_id)
        start = self._start(row)
        is_right = start is not None and row.ids[start : start + 1].tolist() == [token_id]
        if row.position is None:
            if start is not None:
                self._prob(0).add(is_right)
        else:
            if row.position < len(row.ids):
                self._prob(row.run).add(is_right)
            if is_right:
                row.position, row.run = row.position + 1, row.run + 1
                if row.since:
                    row.since.append(token_id)
                if row.run >= _SURE_RUN:
                    self._settle(row)
                return
            if not row.since:  # the position was sure
                row.anchor = row.position
        row.since.append(token_id)
        self._find(row)

    def _settle(self, row: _Row) -> None:
        """Make a replacement in the rest of the prediction, once the position behind it is sure."""
        assert row.position is not None
        old, new = row.ids[row.anchor : max(0, row.position - row.run)], row.since[: -row.run]
        if 0 < len(old) <= _LONGEST_EDIT and 0 < len(new) <= _LONGEST_EDIT:
            rest = _replaced(row.ids[row.position :], old, np.array(new, np.int64))
            row.ids = np.concatenate([row.ids[: row.position], rest])
        row.since.clear()

    def _find(self, row: _Row) -> None:
        """Find the position by the last tokens: the longest match, of equal ones the nearest."""
        behind = np.flatnonzero(row.ids == row.text[-1]) + 1
        # After an insertion, and after a replacement of equal length.
        expected = row.anchor + 1, row.anchor + len(row.since)
        first = max(0, int(np.searchsorted(behind, expected[0])) - _NEAR // 2)
        best, position = (0, 0), None
        for each in behind[first : first + _NEAR].tolist():
            run, far = _match(row, each), min(abs(each - near) for near in expected)
            if (far < _NEAR or run >= _SURE_RUN) and (run, -far) > best:
                best, position = (run, -far), each
        row.run, row.position = best[0], position
        if row.run >= _SURE_RUN:
            self._settle(row)


def _match(row: _Row, position: int) -> int:
    """Return how many of the last tokens match the tokens before a position."""
    most = min(position, len(row.text), _LONGEST_MATCH)
    run = 0
    while run < most and row.ids[position - 1 - run] == row.text[-1 - run]:
        run += 1
    return run


def _replaced(ids: _Ids, old: _Ids, new: _Ids) -> _Ids:
    """Return tokens with new ones in place of the old ones, wherever these stand."""
    parts, end = list[_Ids](), 0
    for start in np.flatnonzero(ids == old[0]).tolist():
        if start >= end and np.array_equal(ids[start : start + len(old)], old):
            parts += [ids[end:start], new]
            end = start + len(old)
    return np.concatenate([*parts, ids[end:]])
