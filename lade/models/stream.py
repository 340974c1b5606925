"""Tokens that come one by one, as text: `TextStream`; and the strings that end it, `StopCutter`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens decoded before a new one: tokenizers join and space neighbours.
_CONTEXT = 6
# Characters that would move the cursor or change the terminal: all controls but newline and tab.
_CONTROLS = dict.fromkeys({*range(32), 127, *range(128, 160)} - {9, 10})


def without_controls(text: str) -> str:
    """Return a model's text as a terminal may show it, which obeys control characters."""
    return text.translate(_CONTROLS)


class TextStream:
    """Text of tokens that come one by one; its parts are what decoding all at once gives.

    A character made of several tokens comes with its last one. Of one that was left incomplete
    among bytes that are single tokens, only decoding all at once may make something else. It asks
    no more of a tokenizer than to decode, so that those in Python have it, too.
    """

    def __init__(self, tokenizer: Any, *, skips_special: bool = True) -> None:
        # Cleaning up would take back a space that is long since shown.
        options = {"skip_special_tokens": skips_special, "clean_up_tokenization_spaces": False}
        self._decode: Callable[[list[int]], str] = partial(tokenizer.decode, **options)
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


class StopCutter:
    """Cuts text off at the first of some strings, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._held = ""
        self.is_cut = False

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Return the text that belongs to the answer, whatever comes next."""
        if self.is_cut:
            return ""
        text = self._held + text
        ends = [end for end in map(text.find, self._stops) if end >= 0]
        if ends:
            self.is_cut = True
            return text[: min(ends)]
        starts = range(max(0, len(text) - self._longest), 0 if is_last else len(text))
        begun = (at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops))
        num_sure = next(begun, len(text))
        self._held = text[num_sure:]
        return text[:num_sure]
