"""`PieceStream`: an answer as pieces of text as they come, its thinking apart from the rest."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lade.models.stream import TextStream

# The tokens around a model's thinking: Qwen, DeepSeek and most others; Magistral; Gemma.
_OPENING, _CLOSING = {"<think>", "[THINK]", "<|channel>"}, {"</think>", "[/THINK]", "<channel|>"}
# Tokens at the end of a prompt that may open the thinking, or open and close it.
_END_OF_PROMPT = 4


class Piece(NamedTuple):
    """A part of an answer; all parts in order are the answer."""

    text: str
    is_drafted: bool  # whether all its tokens were drafted and accepted
    is_thinking: bool


class PieceStream:
    """Pieces of an answer's tokens as they come; the tokens around thinking are left out.

    Args:
        prompt_ids: of the prompt, which may end within the thinking.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._stream = TextStream(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        # By token: whether the text after it is thinking.
        self._marks = {
            token_id: token.content in _OPENING
            for token_id, token in added
            if token.content in _OPENING | _CLOSING
        }
        self._is_thinking = False
        for token_id in prompt_ids[-_END_OF_PROMPT:]:
            self._is_thinking = self._marks.get(token_id, self._is_thinking)
        self._is_character_drafted = True  # so far, of an incomplete character

    def put(self, token_id: int, is_drafted: bool) -> list[Piece]:
        """Take a token; return the pieces that are new."""
        if token_id in self._marks:
            rest, self._is_thinking = self.end(), self._marks[token_id]
            return rest
        self._is_character_drafted &= is_drafted
        return self._made(self._stream.put(token_id))

    def end(self, is_cut: bool = False) -> list[Piece]:
        """Return the rest; of an answer that was cut, without a character that is incomplete."""
        return self._made(self._stream.end(is_cut))

    def _made(self, text: str) -> list[Piece]:
        if not text:
            return []
        is_drafted, self._is_character_drafted = self._is_character_drafted, True
        return [Piece(text, is_drafted, self._is_thinking)]
