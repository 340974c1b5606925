"""Standard decoding by the loop of transformers, if drafts cannot be verified, or no longer.

A text that has begun runs again from its prompt, so that no key or value of a step with a draft is
left. Emitted tokens stay: they are forced, and neither processors, stop criteria, streamers nor
callbacks see them a second time.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from lade.batch import Batch
from lade.compat import STOPS_FIRST, decode_standard
from lade.engine.engine import aside
from lade.hf.call import Call
from lade.hf.stopping import Outputs, Report
from lade.machine.generators import put_back, random_states
from lade.probing.selfcheck import forced
from lade.sampling.processors import CheckedProcessors
from lade.stats import DecodeStats, Step, add_times


class _ReplayProcessor(LogitsProcessor):  # type: ignore[misc]
    """Forces the emitted tokens, and lets the call's processors handle later ones.

    After the last forced token, it restores the random state of that time.
    """

    def __init__(self, processors: LogitsProcessorList, ids: Tensor) -> None:
        self._processors, self._ids = processors, ids
        self._states = random_states(ids.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        num_tokens, num_known = input_ids.shape[1], self._ids.shape[1]
        if num_tokens < num_known:
            return forced(self._ids, 0, input_ids, scores)
        if num_tokens == num_known:
            put_back(self._ids.device, self._states)
        chosen: Tensor = self._processors(input_ids, scores)
        return chosen


class _NewTokens(StoppingCriteriaList):  # type: ignore[misc]
    """Stop criteria that see only new tokens, and report them; the ends of earlier ones are known.

    Attributes:
        stats: counts and times of the new tokens.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: Batch, report: Report) -> None:
        super().__init__(criteria)
        self.stats = DecodeStats()
        self._num_prompt, self._num_known = batch.num_prompt, batch.longest
        self._ends = [row.num_unpadded if row.is_finished else None for row in batch.rows]
        self._has_ended = [False] * len(batch.rows)
        self._report, self._since = report, perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        num_tokens, num_before = input_ids.shape[1], input_ids.shape[1] - 1
        column: list[int] = input_ids[:, -1].tolist()  # a criterion may change it
        done: Tensor
        if all(self._has_ended):  # on some devices, `generate` runs one token more
            done = super().__call__(input_ids, scores, **kwargs)
            return done
        is_step = num_before > self._num_prompt
        add_times(self.stats, [self._since, perf_counter()], "forward" if is_step else "prefill")
        self.stats.num_steps += is_step
        if not STOPS_FIRST:
            self._tell(column, num_before)
        if num_tokens <= self._num_known:
            known = [end is not None and end <= num_tokens for end in self._ends]
            done = torch.tensor(known, dtype=torch.bool, device=input_ids.device)
        else:
            done = super().__call__(input_ids, scores, **kwargs)
        if STOPS_FIRST:
            self._tell(column, num_before)
        self._has_ended = [a or b for a, b in zip(self._has_ended, done.tolist(), strict=True)]
        self._since = perf_counter()
        return done

    def _tell(self, column: Sequence[int], num_before: int) -> None:
        """Report the next token of every row to the streamer and `on_step`."""
        report = self._report
        with aside():
            if report.streamer is not None and num_before >= report.num_put:
                report.streamer.put(torch.tensor(column, dtype=torch.int64, device="cpu"))
            for row, token_id in enumerate(column):
                if self._has_ended[row] or num_before < report.num_reported[row]:
                    continue
                step = Step([token_id], 0, 0, row)
                if num_before > self._num_prompt:
                    self.stats.count_row_step(step)
                if report.on_step is not None:
                    report.on_step(step)


def finish_standard(
    call: Call, batch: Batch, outputs: Outputs, report: Report
) -> tuple[Any, DecodeStats]:
    """Decode a batch, whose unfinished rows have one length, to the end of the call.

    Returns:
        The output of `generate` for the whole call, and counts and times of this decoding.
    """
    num_known, processors = batch.longest - batch.num_prompt, CheckedProcessors(call.processors)
    if num_known:
        processors = CheckedProcessors([_ReplayProcessor(processors, batch.sequences())])
    watched = _NewTokens(call.criteria, batch, report)
    output = decode_standard(
        call.model,
        call.input_ids,
        logits_processor=processors,
        stopping_criteria=watched,
        generation_config=call.options,
        **call.model_kwargs,
    )
    report.end()
    for name in ("scores", "logits"):
        if call.returns_dict and output.get(name) is not None:
            output[name] = (outputs.get(name, num_known) or ()) + output[name][num_known:]
    return output, watched.stats
