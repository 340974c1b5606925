"""Pass tokens on to a streamer and to `on_step`."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.batch import Text
from lade.compat import STOPS_FIRST
from lade.hf.arguments import OnStep
from lade.stats import DecodeStats, Step


class Report:
    """Tells a streamer of columns that all rows have reached, and `on_step` of steps."""

    def __init__(self, streamer: BaseStreamer | None, on_step: OnStep | None, text: Text) -> None:
        self.streamer, self._on_step, self._text = streamer, on_step, text
        self._num_put = text.num_prompt  # columns put, or due if there is no streamer
        self._num_told = [text.num_prompt] * text.num_rows

    def add(self, steps: Sequence[Step]) -> None:
        """Tell of steps."""
        self.put()
        for step in steps:
            self._num_told[step.row] += len(step.token_ids)
            if self._on_step is not None:
                self._on_step(step)

    def end(self) -> None:
        """End the streamer."""
        if self.streamer is not None:
            self.streamer.end()

    def continued(self) -> "PlainStream":
        """Return a stream for plain decoding of the same prompts, which tells what is not told."""
        num_prompt = self._text.num_prompt
        num_told = [num - num_prompt for num in self._num_told]
        return PlainStream(
            self.streamer, self._on_step, len(num_told), self._num_put - num_prompt, num_told
        )

    def put(self) -> None:
        """Put every column that is complete, int64 [rows] each, on the CPU."""
        if self.streamer is None:
            return
        text = self._text
        while self._num_put < text.longest:
            column = []
            for row, token_ids in enumerate(text.token_ids):
                if self._num_put < len(token_ids):
                    column.append(token_ids[self._num_put])
                elif (padding := text.padding_of(row)) is not None:
                    column.append(padding)
                else:
                    return
            self.streamer.put(torch.tensor(column))
            self._num_put += 1


def stopping(stop: Callable[[list[int]], None], report: Report) -> Callable[[list[int]], None]:
    """Return what marks finished rows and passes a token on, in the order of `generate`."""
    if report.streamer is None:
        return stop

    def after_token(rows: list[int]) -> None:
        if STOPS_FIRST:
            stop(rows)
        report.put()
        if not STOPS_FIRST:
            stop(rows)

    return after_token


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
        num_put: columns that the streamer has had already.
        num_told: tokens of each row that `on_step` and statistics have had already; None where
            decoding continues no earlier text.
    """

    def __init__(
        self,
        streamer: BaseStreamer | None,
        on_step: OnStep | None,
        num_rows: int,
        num_put: int = 0,
        num_told: Sequence[int] | None = None,
    ) -> None:
        self.stats = DecodeStats(num_prefills=num_rows if num_told is None else 0)
        self._streamer = streamer
        self._on_step = on_step
        self._num_put = num_put
        self._num_told = num_told or [0] * num_rows
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
        if self._streamer is not None and self._num_columns >= self._num_put:
            self._streamer.put(value)
        self.stats.num_steps += self._num_columns > 0
        # Newer versions of transformers call the criteria before putting a token, older ones after.
        done = self._watched.is_finished
        for row, token_id in enumerate(value.tolist()):
            has_ended = self._num_columns and done[self._num_columns - 1][row]
            if has_ended or self._num_columns < self._num_told[row]:
                continue
            step = Step([token_id], 0, 0, row)
            if self._num_columns:
                self.stats.count_row_step(step)
            if self._on_step is not None:
                self._on_step(step)
        self._num_columns += 1
        self._since = perf_counter()

    def end(self) -> None:
        """End the streamer."""
        if self._streamer is not None:
            self._streamer.end()
