"""`PieceStream`: an answer as pieces of text as they come, its thinking told from the rest."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lade.models.stream import TextStream

# What models put around their thinking: Qwen, DeepSeek and most others; Magistral; Gemma.
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))
# Tokens at the end of a prompt that may hold a mark.
_END_OF_PROMPT = 16


class Piece(NamedTuple):
    """A part of an answer; all parts in order are the answer."""

    text: str
    is_drafted: bool  # whether its tokens were drafted and accepted, all of them
    is_thinking: bool


def split(pieces: Sequence[Piece], num_characters: int) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces before and after some number of characters."""
    before: list[Piece] = []
    for i, piece in enumerate(pieces):
        if len(piece.text) > num_characters:
            if num_characters:
                before.append(piece._replace(text=piece.text[:num_characters]))
            return before, [piece._replace(text=piece.text[num_characters:]), *pieces[i + 1 :]]
        before.append(piece)
        num_characters -= len(piece.text)
    return before, []


class PieceStream:
    """Pieces of an answer's tokens as they come; marks around thinking are left out.

    Thinking begins where prompt or answer begin it with a mark, and ends with the other one.

    Args:
        prompt_ids: of the prompt, which may end with a mark.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._stream = TextStream(tokenizer)
        # Special tokens are no text, but for those that marks are made of.
        self._marking = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and any(token.content in mark for pair in _MARKS for mark in pair)
        }
        end_of_prompt = tokenizer.decode(list(prompt_ids[-_END_OF_PROMPT:])).rstrip()
        # The mark that ends the thinking which goes on; None where none does.
        self._closing = next(
            (close for opening, close in _MARKS if end_of_prompt.endswith(opening.rstrip())), None
        )
        self._has_begun = self._closing is not None
        self._held: list[Piece] = []  # thinking or not, as it will turn out
        self._is_character_drafted = True  # all tokens so far of one that is incomplete

    def put(self, token_id: int, is_drafted: bool) -> list[Piece]:
        """Take a token; return the pieces that are new."""
        self._is_character_drafted &= is_drafted
        if token_id in self._marking:
            self._hold(self._stream.end() + self._marking[token_id])
        else:
            self._hold(self._stream.put(token_id))
        return self._released(is_end=False)

    def end(self, is_cut: bool = False) -> list[Piece]:
        """Return the rest; of an answer that was cut, without a character that is incomplete."""
        self._hold(self._stream.end(is_cut))
        return self._released(is_end=True)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(Piece(text, self._is_character_drafted, False))
            self._is_character_drafted = True

    def _released(self, is_end: bool) -> list[Piece]:
        """Take out what no later token can change the meaning of; marks are not shown."""
        held = "".join(piece.text for piece in self._held)
        begin = held.lstrip()
        if not self._has_begun:
            for opening, close in _MARKS:
                if begin.startswith(opening):
                    self._closing, self._has_begun = close, True
                    blanks = self._take(len(held) - len(begin), is_thinking=True)
                    self._take(len(opening), is_thinking=True)
                    return blanks + self._released(is_end)
            if not is_end and any(opening.startswith(begin) for opening, _ in _MARKS):
                return []
            self._has_begun = True
        if (closing := self._closing) is None:
            return self._take(len(held), is_thinking=False)
        thought, found, _ = held.partition(closing)
        if not found:
            # Characters at the end that may be the begin of the mark wait.
            lengths = range(min(len(held), len(closing) - 1), 0, -1)
            num_kept = next((n for n in lengths if held.endswith(closing[:n])), 0)
            return self._take(len(held) - num_kept * (not is_end), is_thinking=True)
        self._closing = None
        pieces = self._take(len(thought), is_thinking=True)
        self._take(len(closing), is_thinking=True)
        return pieces + self._released(is_end)

    def _take(self, num_characters: int, is_thinking: bool) -> list[Piece]:
        taken, self._held = split(self._held, num_characters)
        return [piece._replace(is_thinking=is_thinking) for piece in taken]
