"""Standard decoding by the loop of transformers, if drafts cannot be verified, or no longer.

A text that has begun runs again from its prompt, so that no key or value of a step with a draft is
left. Emitted tokens stay: they are forced, and neither processors, stop criteria, streamers nor
callbacks see them a second time.
"""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.batch import Batch
from lade.compat import decode_standard
from lade.engine.engine import aside
from lade.hf.call import Call
from lade.hf.stopping import Outputs, Report
from lade.machine.generators import put_back, random_states
from lade.probing.selfcheck import forced
from lade.sampling.processors import CheckedProcessors
from lade.stats import DecodeStats, Step


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


class _NewTokenCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stop criteria that see only new tokens; the ends of earlier ones are known.

    Attributes:
        is_finished: which rows were finished after each token.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: Batch) -> None:
        super().__init__(criteria)
        self._num_known = batch.longest
        self._ends = [row.num_unpadded if row.is_finished else None for row in batch.rows]
        self.is_finished: list[list[bool]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        num_tokens = input_ids.shape[1]
        if num_tokens <= self._num_known:
            known = [end is not None and end <= num_tokens for end in self._ends]
            done = torch.tensor(known, dtype=torch.bool, device=input_ids.device)
        else:
            done = super().__call__(input_ids, scores, **kwargs)
        before = self.is_finished[-1] if self.is_finished else [False] * len(done)
        self.is_finished.append([a or b for a, b in zip(before, done.tolist(), strict=True)])
        return done


class _Stream(BaseStreamer):  # type: ignore[misc]
    """Passes new tokens on to the streamer of a report, and counts them as lade does."""

    def __init__(self, report: Report, watched: _NewTokenCriteria, num_prompt: int) -> None:
        self.stats = DecodeStats()
        self._report, self._watched = report, watched
        self._num_prompt = self._length = num_prompt
        self._since = perf_counter()

    def put(self, value: Tensor) -> None:
        """Take the next token of every row, int64 [rows]."""
        now, num_new = perf_counter(), self._length - self._num_prompt
        stage = "forward_sec" if num_new else "prefill_sec"
        setattr(self.stats, stage, getattr(self.stats, stage) + now - self._since)
        self.stats.num_steps += num_new > 0
        with aside():
            self._report_token(value, num_new)
        self._length += 1
        self._since = perf_counter()

    def _report_token(self, value: Tensor, num_new: int) -> None:
        report = self._report
        if report.streamer is not None and self._length >= report.num_put:
            report.streamer.put(value)
        # Newer versions of transformers call the criteria before putting a token, older ones after.
        has_ended = self._watched.is_finished[num_new - 1] if num_new else [False] * len(value)
        for row, token_id in enumerate(value.tolist()):
            if has_ended[row] or self._length < report.num_reported[row]:
                continue
            step = Step([token_id], 0, 0, row)
            if num_new:
                self.stats.count_row_step(step)
            if report.on_step is not None:
                report.on_step(step)

    def end(self) -> None:
        """End the streamer."""
        self._report.end()


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
    watched = _NewTokenCriteria(call.criteria, batch)
    stream = _Stream(report, watched, batch.num_prompt)
    output = decode_standard(
        call.model,
        call.input_ids,
        logits_processor=processors,
        stopping_criteria=watched,
        generation_config=call.options,
        streamer=stream,
        **call.model_kwargs,
    )
    for name in ("scores", "logits"):
        if call.returns_dict and output.get(name) is not None:
            output[name] = (outputs.get(name, num_known) or ()) + output[name][num_known:]
    return output, stream.stats
