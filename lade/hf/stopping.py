"""Where generation stops: decided after every token, row by row, exactly as in `generate`."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from lade.batch import Text
from lade.outputs import Outputs


class StopRule:
    """All stop conditions, evaluated after each token, exactly where `generate` evaluates them.

    Length and EOS are compared as integers; stop strings are searched row by row; other criteria
    get all rows at one length, as in `generate`.
    """

    def __init__(self, criteria: StoppingCriteriaList, num_rows: int) -> None:
        self._lengths: list[MaxLengthCriteria] = []  # whose limit may be changed at any time
        self._reminder: Any = None  # warns once that a text outgrows its model
        self._eos_token_ids: set[int] = set()
        self._of_rows = StoppingCriteriaList()
        self._of_all = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self._lengths.append(criterion)
                if criterion.max_position_embeddings is not None:
                    self._reminder = criterion
            elif type(criterion) is EosTokenCriteria:
                self._eos_token_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is StopStringCriteria:
                self._of_rows.append(criterion)
            else:
                self._of_all.append(criterion)
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.is_lockstep = num_rows > 1 and bool(self._of_all)

    def watch(self, text: Text, outputs: Outputs) -> None:
        """Set the text and outputs that the criteria look at."""
        self._text = text
        self._outputs = outputs

    def __call__(self, rows: list[int]) -> None:
        """Mark the given rows as finished if their last token ends them."""
        text = self._text
        max_length = math.inf
        for each in self._lengths:
            max_length = min(max_length, each.max_length)
        for row in rows:
            token_ids = text.token_ids[row]
            finished = token_ids[-1] in self._eos_token_ids
            if len(token_ids) >= max_length:
                finished = True
            elif self._reminder and len(token_ids) > self._reminder.max_position_embeddings:
                self._reminder(text.prefix(row), None)
                self._reminder = None
            if self._of_rows:
                finished = bool(self._of_rows(text.prefix(row), None)) or finished
            text.is_finished[row] = text.is_finished[row] or finished
        if self._of_all:
            prefixes, scores = text.prefixes(rows), self._outputs.columns("scores")
            done = torch.zeros(len(rows), dtype=torch.bool, device=prefixes.device)
            for criterion in self._of_all:
                done = done | _asked(criterion, prefixes, scores)
            text.adopt(prefixes)
            for row, finished in zip(rows, (done & 1).tolist(), strict=True):
                text.is_finished[row] = text.is_finished[row] or bool(finished)


def _asked(criterion: Any, prefixes: Tensor, scores: Any) -> Tensor:
    """Return what a criterion answers, one value for all rows or one a row, in one dimension.

    As in `generate`, values are bools or integers, of which the lowest bit counts.

    Raises:
        TypeError: they are neither.
        ValueError: they are not that many, in whatever shape.
    """
    name, num_rows, answer = type(criterion).__name__, len(prefixes), criterion(prefixes, scores)
    try:
        values: Tensor = torch.zeros((), dtype=torch.bool, device=prefixes.device) | answer
    except (TypeError, RuntimeError) as error:
        got = f"{answer!r:.100}: {error}"
        raise TypeError(f"expected a bool a row from {name}, got {got}") from error
    if values.numel() not in (1, num_rows):
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        raise ValueError(f"expected one value a row from {name}, got {values.numel()} for {rows}")
    return values.flatten()
