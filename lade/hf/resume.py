"""Finish a text plainly once its drafts can no longer be verified.

Emitted tokens stay; transformers' own loop continues after them, with the same processors, stop
criteria, streamer and random state, and with keys and values that it computes itself.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lade.batch import Text
from lade.compat import Model, decode_plainly
from lade.hf.arguments import OnStep
from lade.hf.call import Call
from lade.hf.streams import PlainStream
from lade.outputs import Outputs
from lade.stats import DecodeStats, Step
from lade.targets.inputs import extended
from lade.targets.paths import ChainTarget
from lade.targets.rollback import find_cache
from lade.tree import Tree
from ngram_pool import Draft


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """A stop criterion for rows that were finished before."""

    def __init__(self, is_finished: list[bool]) -> None:
        self._is_finished = is_finished

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(self._is_finished, device=input_ids.device)


class _Padded(LogitsProcessor):  # type: ignore[misc]
    """A processor that pads finished rows at once; `generate` does so from the second token on.

    Attributes:
        scores: of the first token, as they were; None before it.
    """

    def __init__(self, is_finished: list[bool], pad_token_id: int) -> None:
        self._is_finished = is_finished
        self._pad_token_id = pad_token_id
        self.scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.scores is not None:
            return scores
        self.scores, padded = scores, scores.clone()
        padded[self._is_finished] = -torch.inf
        padded[self._is_finished, self._pad_token_id] = 0.0
        return padded


class _Later(BaseStreamer):  # type: ignore[misc]
    """A streamer that skips the first columns, which the inner streamer has had before."""

    def __init__(self, streamer: BaseStreamer, num_known: int) -> None:
        self._streamer = streamer
        self._num_known = num_known

    def put(self, value: Tensor) -> None:
        if self._num_known > 0:
            self._num_known -= 1
        else:
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


class Told:
    """A record of the tokens reported to `on_step`, so that each is reported once.

    Args:
        text: the text, before any token is emitted.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._num_told = [text.num_prompt] * text.num_rows

    def add(self, step: Step) -> None:
        """Record that a step was reported."""
        self._num_told[step.row] += len(step.token_ids)

    def missing(self, stats: DecodeStats) -> list[Step]:
        """Return the tokens not reported yet as steps without a draft, and count these."""
        steps = []
        for row, token_ids in enumerate(self._text.token_ids):
            left = token_ids[self._num_told[row] : self._text.num_unpadded[row]]
            if left:
                steps.append(Step(left, 0, 0, row))
                stats.count_row_step(steps[-1])
        return steps

    def later(self, on_step: OnStep | None) -> OnStep | None:
        """Wrap `on_step` for tokens after the present text, skipping those already reported."""
        if on_step is None:
            return None
        length = len(self._text.token_ids[0])
        num_known = [num_told - length for num_told in self._num_told]

        def tell(step: Step) -> None:
            num_known[step.row] -= 1
            if num_known[step.row] < 0:
                on_step(step)

        return tell


def finish_plainly(
    call: Call,
    text: Text,
    outputs: Outputs,
    told: Told,
    num_columns: int,
    model_kwargs: dict[str, Any],
) -> tuple[Any, DecodeStats]:
    """Continue a text, whose unfinished rows have one length, to the end of the call.

    Args:
        call: as it began.
        text: the text so far.
        outputs: of the text so far.
        told: the tokens that `on_step` has had.
        num_columns: columns that the streamer has had, including the prompt's.
        model_kwargs: those of the call, with the cache to go on from.

    Returns:
        What `generate` returns for the whole call, and counts and times of the rest.
    """
    processors, criteria = call.processors, call.criteria
    ids = text.sequences()
    num_rows, length = ids.shape
    num_new = length - text.num_prompt
    padded: _Padded | None = None
    if any(text.is_finished):
        criteria = StoppingCriteriaList([*criteria, _Ended(list(text.is_finished))])
        if text.pad_token_id is not None:
            padded = _Padded(list(text.is_finished), text.pad_token_id)
            processors = LogitsProcessorList([*processors, padded])
    later = None if call.streamer is None else _Later(call.streamer, num_columns - length)
    stream = PlainStream(later, told.later(call.arguments.on_step), num_rows, num_new > 0)
    output = decode_plainly(
        call.model,
        ids,
        processors,
        stream.watch(criteria),
        _extended_config(call.options, num_new),
        stream,
        _continued(call.model, model_kwargs, ids[:, text.num_prompt :]),
    )
    if call.returns_dict:
        if padded is not None and output.get("scores") is not None:
            output["scores"] = (padded.scores, *output["scores"][1:])
        for name in ("scores", "logits", "hidden_states", "attentions"):
            if output.get(name) is not None and num_new > 0:
                output[name] = outputs.first_columns(name, num_new) + _last_of_prompt(
                    name, output[name]
                )
    return output, stream.stats


def replayed(call: Call, text: Text) -> dict[str, Any]:
    """Return a call's model inputs with the keys and values of its text, run token by token.

    Where code of the user's own runs in forwards, those of one forward may be others.
    """
    found, ids = find_cache(call.model_kwargs), text.sequences()
    if found is None or ids.shape[1] == text.num_prompt:
        return call.model_kwargs
    name, cache = found
    prompts = ids[:, : text.num_prompt]
    target = ChainTarget(
        call.model, prompts, call.model_kwargs, restores=True, generation_config=call.options
    )
    target.prefill()
    for column in ids[:, text.num_prompt : -1].T.tolist():
        target.forward_plainly([Tree.build(token_id, Draft.empty()) for token_id in column])
        target.commit([[0]] * len(column))
    return {**call.model_kwargs, name: target.hand_over(cache)}


def _extended_config(config: GenerationConfig, num_new: int) -> GenerationConfig:
    """Return the config for a longer prompt; `generate` keeps the length of a mask it drops."""
    if not hasattr(config, "_mask_length"):
        return config
    longer = copy.copy(config)
    longer._mask_length += num_new
    return longer


def _continued(model: Model, model_kwargs: dict[str, Any], new_ids: Tensor) -> dict[str, Any]:
    """Return the model inputs of the prompt, extended by new tokens."""
    num_new = new_ids.shape[1]
    longer = extended(model_kwargs, num_new)
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is not None and num_new:
        of_new = model.get_input_embeddings()(new_ids).to(embeds.dtype)
        longer["inputs_embeds"] = torch.cat([embeds, of_new], dim=1)
    return longer


def _last_of_prompt(name: str, columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cut the first column, which covers the whole prompt, down to its last token."""
    if name in ("scores", "logits") or columns[0] is None:
        return columns
    kept = tuple(
        None if layer is None else layer[:, -1:] if name == "hidden_states" else layer[:, :, -1:]
        for layer in columns[0]
    )
    return (kept, *columns[1:])
