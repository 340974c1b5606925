"""`Prediction`: drafts from a predicted answer, at the position that the real answer has reached.

A pool finds a position by the last tokens alone, which does not work right after an edit. Here the
position is followed. After tokens that were not predicted, the answer probably goes on behind as
many predicted ones. A replacement that was made once is probably made again.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

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


class _Position(NamedTuple):
    """A position in the prediction."""

    next: int  # index of the next token in the prediction
    left: tuple[int, ...] = ()  # new tokens of an edit that come first
    edit: tuple[int, ...] = ()  # old tokens of that edit


_BEGINNING = _Position(0)


@dataclass(slots=True)
class _Row:
    """A text and its position in the prediction."""

    text: list[int]  # its last tokens
    length: int  # of the whole text
    position: _Position | None = _BEGINNING  # None if it is lost
    run: int = _SURE_RUN  # matched tokens before
    #: Last sure position, and the tokens emitted since the text left it.
    anchor: int = 0
    since: list[int] = field(default_factory=list)
    edits: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # new by old tokens


class Prediction(Drafter):
    """Drafter from one predicted text, for one call; every row has its own position in it.

    Args:
        token_ids: the predicted answer, without the prompt.
    """

    name = "prediction"
    is_free = True

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = tuple(token_ids)
        self._positions: dict[int, list[int]] = {}  # behind each token
        for position, token_id in enumerate(self._ids, 1):
            self._positions.setdefault(token_id, []).append(position)
        # How probable a token is, by the run before it; the first guess is as if seen twice.
        wrong = [(1.0 - _FIRST_PROB) * 0.5**level for level in range(_NUM_LEVELS)]
        self._probs = [Mean(1.0 - each, 2.0) for each in wrong]
        self._rows: dict[int, _Row] = {}
        self._num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a text at the beginning of the prediction."""
        self._num_opened += 1
        self._rows[self._num_opened] = _Row([*prompt_ids[-_LONGEST_MATCH:]], len(prompt_ids))
        return self._num_opened

    def close(self, sequence: int) -> None:
        """Forget the text."""
        del self._rows[sequence]

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Return the continuation of the prediction, in one path."""
        row = self._rows[sequence]
        forced = committed[row.length :]  # by a grammar, and not observed
        start, prob, probs = self._start(row), 1.0, list[float]()
        if start is not None:
            start = self._after(row, start, forced)
        if start is None:
            return Draft.empty()
        most = min(max_draft_tokens, _PATH_PER_MATCH * (1 + row.run))
        token_ids = [token_id for token_id, _ in islice(self._ahead(row, start), most)]
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

    def _start(self, row: _Row) -> _Position | None:
        """Return the position of a text; of a lost one, behind as many old tokens as new ones."""
        if row.position is not None or len(row.since) > _LONGEST_EDIT:
            return row.position
        return _Position(row.anchor + len(row.since))

    def _after(self, row: _Row, position: _Position, token_ids: Sequence[int]) -> _Position | None:
        """Return the position behind some tokens, None if others come there."""
        ahead = self._ahead(row, position)
        for token_id in token_ids:
            found = next(ahead, None)
            if found is None or found[0] != token_id:
                return None
            position = found[1]
        return position

    def _ahead(self, row: _Row, position: _Position) -> Iterator[tuple[int, _Position]]:
        """Yield the tokens from a position on, edits applied, each with the position behind it."""
        while True:
            if not position.left:
                position = self._with_edit(row, position.next)
            if position.left:
                token_id, *left = position.left
                position = _Position(position.next, tuple(left), position.edit if left else ())
            elif position.next < len(self._ids):
                token_id, position = self._ids[position.next], _Position(position.next + 1)
            else:
                return
            yield token_id, position

    def _with_edit(self, row: _Row, start: int) -> _Position:
        """Return a position with the longest known edit of the tokens there."""
        for size in range(_LONGEST_EDIT if row.edits else 0, 0, -1):
            old = self._ids[start : start + size]
            if len(old) == size and old in row.edits:
                return _Position(start + size, row.edits[old], old)
        return _Position(start)

    def _follow(self, row: _Row, token_id: int) -> None:
        """Find the position behind the next token of the text."""
        row.text.append(token_id)
        if row.position is None:
            if guess := self._start(row):
                self._prob(0).add(self._after(row, guess, [token_id]) is not None)
            row.since.append(token_id)
            self._find(row)
            return
        behind = self._after(row, row.position, [token_id])
        if row.position.next < len(self._ids):
            self._prob(row.run).add(behind is not None)
        if behind is not None:
            row.position, row.run = behind, row.run + 1
            if row.since:
                row.since.append(token_id)
            if row.run >= _SURE_RUN:
                self._settle(row)
            return
        if not row.since:  # the position was sure
            row.anchor = row.position.next - len(row.position.edit)
            wrong = row.position.edit or self._with_edit(row, row.anchor).edit
            row.edits.pop(wrong, None)
        row.since.append(token_id)
        self._find(row)

    def _settle(self, row: _Row) -> None:
        """Learn a replacement, once the position behind it is sure."""
        assert row.position is not None
        if row.since and not row.position.left:
            new = tuple(row.since[: -row.run])
            old = self._ids[row.anchor : max(0, row.position.next - row.run)]
            if 0 < len(old) <= _LONGEST_EDIT and 0 < len(new) <= _LONGEST_EDIT:
                row.edits[old] = new
        row.since.clear()

    def _find(self, row: _Row) -> None:
        """Find the position by the last tokens: the longest match, of equal ones the nearest."""
        behind = self._positions.get(row.text[-1], [])
        # After an insertion, and after a replacement of equal length.
        expected = row.anchor + 1, row.anchor + len(row.since)
        first = max(0, bisect_left(behind, expected[0]) - _NEAR // 2)
        best, position = (0, 0), None
        for each in behind[first : first + _NEAR]:
            run, far = self._match(row, each), min(abs(each - near) for near in expected)
            if (far < _NEAR or run >= _SURE_RUN) and (run, -far) > best:
                best, position = (run, -far), each
        row.run = best[0]
        row.position = None if position is None else _Position(position)
        if row.run >= _SURE_RUN:
            self._settle(row)

    def _match(self, row: _Row, position: int) -> int:
        """Return how many of the last tokens match the tokens before a position."""
        most = min(position, len(row.text), _LONGEST_MATCH)
        run = 0
        while run < most and self._ids[position - 1 - run] == row.text[-1 - run]:
            run += 1
        return run
