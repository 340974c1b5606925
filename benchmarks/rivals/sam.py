"""SAM-Decoding: the longest suffix that occurred before, by a suffix automaton.

Next file: `goose.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rivals.growing import IndexingDrafter
from benchmarks.rivals.recycling import RecyclingDrafter
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import chain
from lade.drafting.successors import Successors
from ngram_pool import Draft

_MAX_TOKENS = 40  # of a draft
_TOKENS_PER_MATCH = 4  # a draft has one token, and this many per matched one
_MIN_MATCH = 5  # shorter matches leave the draft to the other drafter, if any

_START = 0  # the state of the empty sequence
_NONE = -1  # the link of `_START`


class Match(NamedTuple):
    """The longest suffix of a context that occurred before."""

    length: int
    next_position: int  # after its earliest occurrence in the text


class SuffixAutomaton:
    """The smallest automaton of all substrings of a text; grows in amortised O(1) per token.

    A state stands for substrings that end at the same positions, and its link for the longest of
    their suffixes that also ends elsewhere. So the link of the whole text is its longest suffix
    that occurred before.

    Source: Blumer et al., The Smallest Automaton Recognizing the Subwords of a Text (1985).
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._last = _START  # the state of the whole text
        # By state:
        self._moves: list[dict[int, int]] = [{}]  # token id -> state
        self._links = [_NONE]
        self._lengths = [0]  # of its longest substring
        self._ends = [0]  # the position after its earliest occurrence

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens of the text."""
        for token_id in token_ids:
            self._append(token_id)

    def match(self, context: Sequence[int]) -> Match:
        """Return the longest suffix of a context that occurred in the text before its end."""
        state = max(self._links[self._last], _START)
        length = self._lengths[state]
        for token_id in context[len(self.token_ids) :]:
            while state != _START and token_id not in self._moves[state]:
                state = self._links[state]
                length = self._lengths[state]
            if token_id in self._moves[state]:
                state = self._moves[state][token_id]
                length += 1
        return Match(length, self._ends[state])

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        position = len(self.token_ids)
        new = self._new_state({}, position, position)
        state = self._last
        while state != _NONE and token_id not in self._moves[state]:
            self._moves[state][token_id] = new
            state = self._links[state]
        self._links[new] = _START if state == _NONE else self._suffix_state(state, token_id)
        self._last = new

    def _suffix_state(self, state: int, token_id: int) -> int:
        """Return the state of `state`'s longest substring followed by a token."""
        target = self._moves[state][token_id]
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        # `target` also stands for longer substrings, which do not end here: split it.
        clone = self._new_state(dict(self._moves[target]), length, self._ends[target])
        self._links[clone] = self._links[target]
        self._links[target] = clone
        while state != _NONE and self._moves[state].get(token_id) == target:
            self._moves[state][token_id] = clone
            state = self._links[state]
        return clone

    def _new_state(self, moves: dict[int, int], length: int, end: int) -> int:
        self._moves.append(moves)
        self._links.append(_START)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._moves) - 1


class SamDrafter(IndexingDrafter[SuffixAutomaton]):
    """Drafter that copies what followed the earliest occurrence of the longest repeated suffix.

    After a match of m tokens in prompt and answer, it copies 1 + 4 m tokens, 40 at most, as a
    single candidate. There is no automaton of a corpus, which the original can have besides.

    Source: Hu et al., SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666).
    """

    def __init__(self) -> None:
        super().__init__(SuffixAutomaton)

    def match(self, sequence: int, committed: Sequence[int]) -> Match:
        """Return the longest suffix that occurred before."""
        return self._open[sequence].match(committed)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Copy tokens, the longer the match the more; none without a match."""
        length, start = self.match(sequence, committed)
        num_tokens = (
            min(1 + _TOKENS_PER_MATCH * length, _MAX_TOKENS, max_draft_tokens) if length else 0
        )
        return chain(self._open[sequence].token_ids[start : start + num_tokens])


class SamRecyclingDrafter(Drafter):
    """Drafter that copies after a match of 5 tokens or more, else drafts as Token Recycling does.

    Source: those of `SamDrafter` (its combination SAM-Decoding[T]) and of `RecyclingDrafter`.
    """

    num_successors = RecyclingDrafter.num_successors

    def __init__(self) -> None:
        self._copying = SamDrafter()
        self._recycling = RecyclingDrafter()

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Read a prompt; the successors learned from earlier ones stay."""
        return self._copying.open(prompt_ids)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Draft with one of the two."""
        long = self._copying.match(sequence, committed).length >= _MIN_MATCH
        drafter = self._copying if long else self._recycling
        return drafter.draft(sequence, committed, max_draft_tokens)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Replace the successors of the tokens that were run."""
        self._recycling.harvest(sequence, committed, token_ids, parents, successors)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Read the committed tokens."""
        self._copying.observe(sequence, token_ids)

    def close(self, sequence: int) -> None:
        """Forget the automaton."""
        self._copying.close(sequence)
