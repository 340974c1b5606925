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

from lade.batch import Text
from lade.compat import Model, decode_plainly
from lade.hf.call import Call
from lade.hf.streams import Report
from lade.outputs import Outputs
from lade.stats import DecodeStats
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
    """A processor that pads finished rows at once; `generate` does so from the second token on."""

    def __init__(self, is_finished: list[bool], pad_token_id: int) -> None:
        self._is_finished = is_finished
        self._pad_token_id = pad_token_id
        self._is_done = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._is_done:
            return scores
        self._is_done, padded = True, scores.clone()
        padded[self._is_finished] = -torch.inf
        padded[self._is_finished, self._pad_token_id] = 0.0
        return padded


def finish_plainly(
    call: Call,
    text: Text,
    outputs: Outputs,
    report: Report,
    model_kwargs: dict[str, Any],
) -> tuple[Any, DecodeStats]:
    """Continue a text, whose unfinished rows have one length, to the end of the call.

    Args:
        model_kwargs: those of the call, with the cache to go on from.

    Returns:
        What `generate` returns for the whole call, and counts and times of the rest.
    """
    processors, criteria = call.processors, call.criteria
    ids = text.sequences()
    num_new = ids.shape[1] - text.num_prompt
    if any(text.is_finished):
        criteria = StoppingCriteriaList([*criteria, _Ended(list(text.is_finished))])
        if text.pad_token_id is not None:
            padded = _Padded(list(text.is_finished), text.pad_token_id)
            processors = LogitsProcessorList([*processors, padded])
    stream = report.continued()
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
        for name in ("scores", "logits", "hidden_states", "attentions"):
            if output.get(name) is not None and num_new > 0:
                first = outputs.get(name, num_new) or ()
                output[name] = first + _last_of_prompt(name, output[name])
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
    for token_id in ids[0, text.num_prompt : -1].tolist():
        target.forward_plainly([Tree.build(token_id, Draft.empty())])
        target.commit([[0]])
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
