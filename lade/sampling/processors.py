"""Logits processors, classified by what their results depend on."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from lade.batch import Row

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

# These look only at the scores.
_PREFIX_INDEPENDENT = (
    hf.TemperatureLogitsWarper,
    hf.TopHLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
# These sort all scores of a row, which takes a device far longer than their other work.
_SORTING = (hf.TopPLogitsWarper, hf.TypicalLogitsWarper)
# These may also look at the row's own prefix; they keep no state between calls.
_ROW_BY_ROW = (
    *_PREFIX_INDEPENDENT,
    hf.ExponentialDecayLengthPenalty,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.WatermarkLogitsProcessor,
)


class CheckedProcessors(LogitsProcessorList):  # type: ignore[misc]
    """Processors; each must return scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Process scores, float32 [n, vocab_size].

        Raises:
            TypeError: a processor returns something else.
        """
        for processor in self:
            processed: Any = LogitsProcessorList([processor])(input_ids, scores, **kwargs)
            if not isinstance(processed, Tensor):
                name, got = type(processor).__name__, type(processed).__name__
                raise TypeError(f"expected {name} to return scores, a tensor, got {got}")
            scores = processed
        return scores


class Processors:
    """The logits processors of one call.

    Attributes:
        takes_rows: whether all of them are known to work row by row. An unknown processor may keep
            state, count its calls or draw random numbers, and must be called as in `generate`.
        need_prefix: whether any processor may look at more than the scores.
        sort: whether any processor sorts the scores of a row.
        of_row: the processors of each row.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], num_rows: int) -> None:
        kinds = [type(processor) for processor in processors]
        self.sort = any(kind in _SORTING for kind in kinds)
        self.need_prefix = any(kind not in _PREFIX_INDEPENDENT for kind in kinds)
        self.takes_rows = all(kind in _ROW_BY_ROW for kind in kinds)
        self._all = CheckedProcessors(processors)
        self.of_row = [self._all] * num_rows
        if num_rows > 1 and self.need_prefix:
            self.of_row = [
                CheckedProcessors([_for_row(processor, row) for processor in processors])
                for row in range(num_rows)
            ]

    def __len__(self) -> int:
        return len(self._all)

    def __call__(self, rows: Sequence[Row], scores: Tensor) -> Tensor:
        """Process the scores of the rows' next tokens.

        Args:
            rows: each at most once.
            scores: float32 [len(rows), vocab_size]; may be changed in place.
        """
        if not self.need_prefix:
            return self.without_prefix(scores)
        parts = [
            self.of_row[row.index](row.prefix(), scores[i : i + 1]) for i, row in enumerate(rows)
        ]
        processed = torch.cat(parts) if len(parts) > 1 else parts[0]
        if len(processed) != len(rows):
            got = f"{len(processed)} from {[type(each).__name__ for each in self._all]}"
            raise ValueError(f"expected processed scores of {len(rows)} rows, got {got}")
        return processed

    def without_prefix(self, scores: Tensor) -> Tensor:
        """Process scores [n, vocab_size] of any nodes, with processors that need no prefix."""
        assert not self.need_prefix
        no_prefix = torch.empty((scores.shape[0], 0), dtype=torch.int64, device=scores.device)
        processed: Tensor = self._all(no_prefix, scores)
        return processed


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor for a single row of a batch."""
    if type(processor) is not hf.RepetitionPenaltyLogitsProcessor:
        return processor
    mine: Any = copy.copy(processor)
    if isinstance(mine.prompt_ignore_length, Tensor):
        mine.prompt_ignore_length = mine.prompt_ignore_length[row : row + 1]
    return mine  # type: ignore[no-any-return]


# These give the same result for the same prefix, without side effects.
_REPEATABLE = tuple(kind for kind in _ROW_BY_ROW if kind is not hf.WatermarkLogitsProcessor)


def repeatable(processors: Sequence[LogitsProcessor], num_rows: int) -> Processors:
    """Return copies of a call's processors that may run after tokens that are never emitted.

    Processors that keep state, draw random numbers or are user code are left out.
    """
    copies = [_fresh(each) for each in processors if type(each) in _REPEATABLE]
    return Processors(copies, num_rows)


def _fresh(processor: LogitsProcessor) -> LogitsProcessor:
    """Return a copy that has not seen a vocabulary yet."""
    mine: Any = copy.copy(processor)
    if hasattr(mine, "prepared_bias_variables"):
        mine.prepared_bias_variables = False
    return mine  # type: ignore[no-any-return]
