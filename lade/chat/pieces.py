"""An answer as pieces of text, each as soon as its characters are known.

`TextStream` turns tokens into text; `PieceStream` tells thinking from the answer as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens decoded before a new one: tokenizers join and space neighbours.
_CONTEXT = 6
# What models put around their thinking: Qwen, DeepSeek and most others; Magistral; Gemma.
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))
# What response templates of transformers call it.
_THINKING_FIELDS = ("reasoning_content", "thinking")
# Tokens at the end of a prompt that may hold a mark.
_END_OF_PROMPT = 16
# Characters that would move the cursor or change the terminal: all controls but newline and tab.
_CONTROLS = dict.fromkeys({*range(32), 127, *range(128, 160)} - {9, 10})


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


def without_controls(text: str) -> str:
    """Return a model's text as a terminal may show it, which obeys control characters."""
    return text.translate(_CONTROLS)


class TextStream:
    """Text of tokens that come one by one; its parts are what decoding all at once gives.

    A character made of several tokens comes with its last one. Of one that was left incomplete
    among bytes that are single tokens, only decoding all at once may make something else.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._num_done = 0

    def put(self, token_id: int) -> str:
        """Take a token; return the text that is new, empty if it is still unknown."""
        self._token_ids.append(token_id)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        self._num_done = len(self._token_ids)
        return text

    def end(self, is_cut: bool = False) -> str:
        """Return the rest, and begin anew.

        Args:
            is_cut: whether more tokens were to come, so that an incomplete character is dropped.
        """
        rest = self._new_text()
        if is_cut:
            rest = rest.rstrip(_INCOMPLETE)
        self._token_ids, self._num_done = [], 0
        return rest

    def _new_text(self) -> str:
        start = max(0, self._num_done - _CONTEXT)
        before = self._decode(self._token_ids[start : self._num_done])
        return self._decode(self._token_ids[start:])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # Cleaning up would take back a space that is long since shown.
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class PieceStream:
    """Pieces of an answer's tokens as they come; marks around thinking are left out.

    Thinking begins where prompt or answer begin it with a mark, and ends with the other one.

    Args:
        prompt_ids: of the prompt, which may end with a mark.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._marks = _marks_of(tokenizer)
        # Special tokens are no text, but for those that marks are made of.
        self._marking = {
            token_id: token
            for token_id, token in _special_tokens_of(tokenizer).items()
            if any(token in mark for pair in self._marks for mark in pair)
        }
        end_of_prompt = tokenizer.decode(list(prompt_ids[-_END_OF_PROMPT:])).rstrip()
        # The mark that ends the thinking which goes on; None where none does.
        self._closing = next(
            (close for opening, close in self._marks if end_of_prompt.endswith(opening.rstrip())),
            None,
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
        return [*self._released(is_end=False)]

    def end(self, is_cut: bool = False) -> list[Piece]:
        """Return the rest; of an answer that was cut, without a character that is incomplete."""
        self._hold(self._stream.end(is_cut))
        return [*self._released(is_end=True)]

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(Piece(text, self._is_character_drafted, False))
            self._is_character_drafted = True

    def _released(self, is_end: bool) -> Iterator[Piece]:
        """Take out what no later token can change the meaning of."""
        if not self._has_begun:
            yield from self._begin(is_end)
        if not self._has_begun:
            return
        if self._closing is not None:
            held = self._held_text()
            at = held.find(self._closing)
            if at < 0:
                num_kept = 0 if is_end else _overlap(held, self._closing)
                yield from self._take(len(held) - num_kept, is_thinking=True)
                return
            yield from self._take(at, is_thinking=True)
            self._take(len(self._closing), is_thinking=True)  # which is not shown
            self._closing = None
        yield from self._take(len(self._held_text()), is_thinking=False)

    def _begin(self, is_end: bool) -> Iterator[Piece]:
        """Find out whether the answer begins with thinking."""
        held = self._held_text()
        begin = held.lstrip()
        for opening, close in self._marks:
            if begin.startswith(opening):
                yield from self._take(len(held) - len(begin), is_thinking=True)
                self._take(len(opening), is_thinking=True)  # which is not shown
                self._closing, self._has_begun = close, True
                return
        may_come = any(opening.startswith(begin) for opening, _ in self._marks)
        self._has_begun = is_end or not may_come

    def _held_text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _take(self, num_characters: int, is_thinking: bool) -> list[Piece]:
        taken, self._held = split(self._held, num_characters)
        return [piece._replace(is_thinking=is_thinking) for piece in taken]


def _special_tokens_of(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that decoding leaves out, by id."""
    added = {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def _marks_of(tokenizer: Any) -> list[tuple[str, str]]:
    """Return the marks around thinking, those that the tokenizer's own template names first."""
    marks = [*_MARKS]
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields", {}) if isinstance(template, Mapping) else {}
    for name in _THINKING_FIELDS:
        field = fields.get(name, {})
        pair = field.get("open"), field.get("close")
        if all(isinstance(mark, str) and mark for mark in pair):
            marks.insert(0, pair)
    return marks


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the begin of a mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
