"""Pass tokens on to a streamer and to `on_step`."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.batch import Text
from lade.stats import DecodeStats, Step


class ColumnStream:
    """A feed of columns of tokens to a streamer, each once all rows have reached it."""

    def __init__(self, streamer: BaseStreamer | None, text: Text) -> None:
        self._streamer = streamer
        self._text = text
        self._next = text.num_prompt

    def put_complete(self) -> None:
        """Pass on every complete column, int64 [rows] each, on the CPU."""
        text = self._text
        while self._next < text.longest:
            column = []
            for row, token_ids in enumerate(text.token_ids):
                if self._next < len(token_ids):
                    column.append(token_ids[self._next])
                elif (padding := text.padding_of(row)) is not None:
                    column.append(padding)
                else:
                    return
            if self._streamer is not None:
                self._streamer.put(torch.tensor(column))
            self._next += 1

    @property
    def num_put(self) -> int:
        """Columns passed on, or due if there is no streamer, including the prompt's."""
        return self._next

    def end(self) -> None:
        """End the streamer."""
        if self._streamer is not None:
            self._streamer.end()


class _Watched(StoppingCriteriaList):  # type: ignore[misc]
    """Stop criteria that record which rows were finished after each token."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.is_finished: list[list[bool]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done: Tensor = super().__call__(input_ids, scores, **kwargs)
        before = self.is_finished[-1] if self.is_finished else [False] * len(done)
        self.is_finished.append([a or b for a, b in zip(before, done.tolist(), strict=True)])
        return done


class PlainStream(BaseStreamer):  # type: ignore[misc]
    """A streamer for plain decoding that feeds streamer, `on_step` and statistics as lade does.

    Args:
        streamer: gets every column.
        on_step: called for every token.
        num_rows: of the batch.
        is_resumed: whether decoding continues an earlier text.
    """

    def __init__(
        self,
        streamer: BaseStreamer | None,
        on_step: Callable[[Step], None] | None,
        num_rows: int,
        is_resumed: bool = False,
    ) -> None:
        self.stats = DecodeStats(num_prefills=0 if is_resumed else num_rows)
        self._is_resumed = is_resumed
        self._streamer = streamer
        self._on_step = on_step
        self._watched = _Watched(StoppingCriteriaList())
        self._num_columns = 0
        self._since = perf_counter()

    def watch(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Return the same criteria, watched, so that tokens after a row's end are not reported."""
        self._watched = _Watched(criteria)
        return self._watched

    def put(self, value: Tensor) -> None:
        """Take the next token of every row, int64 [rows]."""
        now = perf_counter()
        stage = "forward_sec" if self._num_columns else "prefill_sec"
        setattr(self.stats, stage, getattr(self.stats, stage) + now - self._since)
        if self._streamer is not None:
            self._streamer.put(value)
        self.stats.num_steps += self._num_columns > 0
        # Newer versions of transformers call the criteria before putting a token, older ones after.
        done = self._watched.is_finished
        before = done[self._num_columns - 1] if self._num_columns else [False] * len(value)
        for row, token_id in enumerate(value.tolist()):
            if before[row]:
                continue
            step = Step([token_id], 0, 0, row)
            if self._num_columns or self._is_resumed:
                self.stats.count_row_step(step)
            if self._on_step is not None:
                self._on_step(step)
        self._num_columns += 1
        self._since = perf_counter()

    def end(self) -> None:
        """End the streamer."""
        if self._streamer is not None:
            self._streamer.end()
