"""The work after each token: its scores, stop conditions, streamers and `on_step`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from lade.batch import Batch, Row
from lade.compat import STOPS_FIRST
from lade.engine.engine import aside
from lade.errors import LadeError
from lade.hf.call import Call, OnStep
from lade.sampling.choice import OnChoice
from lade.stats import Step


class Outputs:
    """Scores and logits of a single row, as `generate` returns them."""

    def __init__(self, wanted: Sequence[str]) -> None:
        """`wanted`: any of "scores" and "logits"."""
        # By kind, an entry for each emitted token.
        self._entries: dict[str, list[Any]] = {name: [] for name in wanted}

    @property
    def on_choice(self) -> OnChoice | None:
        """Callback for every emitted token; None if neither scores nor logits are wanted."""
        return self.add_choice if self._entries else None

    def add_choice(self, logits: Tensor, scores: Tensor) -> None:
        """Keep the logits and scores of one emitted token, float32 [vocab_size] each."""
        for name, values in (("logits", logits), ("scores", scores)):
            if name in self._entries:
                self._entries[name].append(values[None].clone())

    def get(self, name: str, num_tokens: int | None = None) -> tuple[Any, ...] | None:
        """Return one entry for each of the first emitted tokens; None if `name` is not wanted."""
        return tuple(self._entries[name][:num_tokens]) if name in self._entries else None


class Report:
    """Gives a streamer the columns that all rows have reached, and `on_step` the steps.

    Attributes:
        num_put: columns given to the streamer, prompts included.
        num_reported: tokens of each row given to `on_step`, prompts included.
    """

    def __init__(self, streamer: BaseStreamer | None, on_step: OnStep | None, batch: Batch) -> None:
        self.streamer, self.on_step, self._batch = streamer, on_step, batch
        self.num_put = batch.num_prompt
        self.num_reported = [batch.num_prompt] * len(batch.rows)

    def add(self, steps: Sequence[Step]) -> None:
        """Report steps."""
        if self.streamer is not None:
            self.put()
        for step in steps:
            self.num_reported[step.row] += len(step.token_ids)
            if self.on_step is not None:
                with aside():
                    self.on_step(step)

    def end(self) -> None:
        """End the streamer."""
        if self.streamer is not None:
            with aside():
                self.streamer.end()

    def put(self) -> None:
        """Put every column that is complete, int64 [rows] each, on the CPU."""
        assert self.streamer is not None
        while (column := self._batch.column(self.num_put)) is not None:
            with aside():
                self.streamer.put(torch.tensor(column, dtype=torch.int64, device="cpu"))
            self.num_put += 1


class StopRule:
    """All stop conditions, evaluated after each token, exactly where `generate` evaluates them.

    Tokens are streamed there, too, in `generate`'s order.

    Length and EOS are compared as integers, and stop strings are looked for row by row. Other
    criteria are asked about whole columns, once all rows of a batch have them. A row that such a
    criterion ends may have run ahead; it is cut.

    Args:
        call: whose criteria are asked.
        outputs: of the call, which the criteria look at.
        batch: of the call.
        report: puts columns.
    """

    def __init__(self, call: Call, outputs: Outputs, batch: Batch, report: Report) -> None:
        self._outputs, self._batch, self._columns = outputs, batch, call.input_ids
        self._report = report
        self._sees_rows, device = call.stops_see_rows, call.input_ids.device
        self._unfinished = torch.ones(call.num_rows, dtype=torch.int64, device=device)
        self._lengths: list[MaxLengthCriteria] = []  # whose limit may be changed at any time
        self._eos_token_ids: set[int] = set()
        self._others = list[Any]()
        for criterion in call.criteria:
            if type(criterion) is MaxLengthCriteria:
                self._lengths.append(criterion)
            elif type(criterion) is EosTokenCriteria:
                self._eos_token_ids.update(criterion.eos_token_id.tolist())
            else:
                self._others.append(criterion)

    def __call__(self, rows: Sequence[Row]) -> None:
        """Mark the given rows as finished if their last token ends them, and stream it."""
        streams = self._report.streamer is not None
        if streams and not STOPS_FIRST:
            self._report.put()
        max_length = math.inf
        for each in self._lengths:
            max_length = min(max_length, each.max_length)
        for row in rows:
            token_ids = row.token_ids
            finished = token_ids[-1] in self._eos_token_ids
            if len(token_ids) >= max_length:
                finished = True
            for criterion in () if self._sees_rows else self._others:
                scores = self._outputs.get("scores")
                prefix = row.prefix()
                answer = torch.zeros((), dtype=torch.bool, device=prefix.device)
                # As in `generate`, the answer may be an integer, whose lowest bit counts.
                finished = bool((answer | criterion(prefix, scores)) & 1) or finished
            row.is_finished = row.is_finished or finished
        while (
            self._sees_rows and (column := self._batch.column(self._columns.shape[1])) is not None
        ):
            self._ask_about(column)
        if streams and STOPS_FIRST:
            self._report.put()
        for row in rows if self._others and not self._sees_rows else ():
            row.token_ids[-1] = int(row.known[-1])  # which a criterion may have changed

    def _ask_about(self, column: Sequence[int]) -> None:
        """Ask the criteria about a column as `generate` does, and end rows behind it."""
        batch, answer = self._batch, torch.zeros_like(self._unfinished, dtype=torch.bool)
        last = torch.tensor(column, dtype=torch.int64, device=answer.device)
        self._columns = torch.cat([self._columns, last[:, None].to(self._columns.dtype)], dim=1)
        columns = self._columns.clone()
        for criterion in self._others:
            answer = answer | criterion(columns, None)
        if not torch.equal(columns, self._columns):
            raise LadeError("expected stop criteria that leave the tokens of a batch as they are")
        self._unfinished = self._unfinished & ~answer
        goes_on = self._unfinished
        if batch.pad_token_id is None:
            goes_on = goes_on.max()
        for row, is_on in zip(batch.rows, goes_on.expand(len(column)).tolist(), strict=True):
            if not is_on:
                row.cut(self._columns.shape[1], None)
                row.is_finished = True
