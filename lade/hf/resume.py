"""Finish a text plainly once its drafts can no longer be verified.

transformers' own loop runs the call again from its prompt, so that no key or value of a step with
a draft is left. What was emitted stays: it is forced, and neither processors, nor stop criteria,
nor who reads along sees it a second time.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from lade.batch import Text
from lade.captures import put_back, random_states
from lade.compat import decode_plainly
from lade.hf.call import Call
from lade.hf.streams import Report
from lade.outputs import Outputs
from lade.probing.selfcheck import forced
from lade.stats import DecodeStats


class _Again(LogitsProcessor):  # type: ignore[misc]
    """Forces the tokens that were emitted, and has the call's processors choose those after them.

    The random state is then as it was after the last of them.
    """

    def __init__(self, processors: LogitsProcessorList, ids: Tensor) -> None:
        self._processors, self._ids = processors, ids
        self._states = random_states(ids.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place, num_known = input_ids.shape[1], self._ids.shape[1]
        if place < num_known:
            return forced(self._ids, 0, input_ids, scores)
        if place == num_known:
            put_back(self._ids.device, self._states)
        chosen: Tensor = self._processors(input_ids, scores)
        return chosen


class _EndsAgain(StoppingCriteriaList):  # type: ignore[misc]
    """Stop criteria that are asked of new tokens alone: where rows have ended is known."""

    def __init__(self, criteria: StoppingCriteriaList, text: Text) -> None:
        super().__init__(criteria)
        self._num_known = text.longest
        rows = zip(text.is_finished, text.num_unpadded, strict=True)
        self._ends = [num if is_finished else None for is_finished, num in rows]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        num_tokens, device = input_ids.shape[1], input_ids.device
        known = torch.tensor([end is not None and end <= num_tokens for end in self._ends])
        if num_tokens <= self._num_known:
            return known.to(device)
        asked: Tensor = super().__call__(input_ids, scores, **kwargs)
        return asked


def finish_plainly(
    call: Call, text: Text, outputs: Outputs, report: Report
) -> tuple[Any, DecodeStats]:
    """Continue a text, whose unfinished rows have one length, to the end of the call.

    Returns:
        What `generate` returns for the whole call, and counts and times of what was run for it.
    """
    ids, stream = text.sequences(), report.continued()
    output = decode_plainly(
        call.model,
        call.input_ids,
        LogitsProcessorList([_Again(call.processors, ids)]),
        stream.watch(_EndsAgain(call.criteria, text)),
        call.options,
        stream,
        call.model_kwargs,
    )
    num_known = ids.shape[1] - text.num_prompt
    for name in ("scores", "logits"):
        if call.returns_dict and output.get(name) is not None:
            output[name] = (outputs.get(name, num_known) or ()) + output[name][num_known:]
    return output, stream.stats
