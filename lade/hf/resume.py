"""Going on plainly with a text whose drafts cannot be verified any more.

What was emitted stays; transformers' own loop goes on behind it, with the same processors, stop
criteria, streamer and random state, and with keys and values that it computes itself.
"""

import copy
from collections.abc import Callable
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
from lade.hf.streams import PlainStream
from lade.outputs import Outputs
from lade.stats import DecodeStats, Step
from lade.targets.inputs import extended

OnStep = Callable[[Step], None]


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Knows rows that were finished before."""

    def __init__(self, is_finished: list[bool]) -> None:
        self._is_finished = is_finished

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(self._is_finished, device=input_ids.device)


class _Padded(LogitsProcessor):  # type: ignore[misc]
    """Leaves rows that were finished before nothing but padding; `generate` does so later."""

    def __init__(self, is_finished: list[bool], pad_token_id: int) -> None:
        self._is_finished = is_finished
        self._pad_token_id = pad_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, is_finished in enumerate(self._is_finished):
            if is_finished:
                scores[row] = -torch.inf
                scores[row, self._pad_token_id] = 0.0
        return scores


class _Later(BaseStreamer):  # type: ignore[misc]
    """Passes columns on to a streamer, but for the first few, which it had before."""

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
    """What `on_step` was told of each row of a text: it is told of every token once.

    Args:
        text: before any token was emitted.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._num_told = [text.num_prompt] * text.num_rows

    def add(self, step: Step) -> None:
        """Note that a step was told of."""
        self._num_told[step.row] += len(step.token_ids)

    def missing(self, stats: DecodeStats) -> list[Step]:
        """Return what the text has that was not told, counted as steps without a draft."""
        steps = []
        for row, token_ids in enumerate(self._text.token_ids):
            left = token_ids[self._num_told[row] : self._text.num_unpadded[row]]
            if left:
                steps.append(Step(left, 0, 0, row))
                stats.count_row_step(steps[-1])
        return steps

    def later(self, on_step: OnStep | None) -> OnStep | None:
        """Return what passes on tokens behind the text, but for those that were told before."""
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
    model: Model,
    text: Text,
    outputs: Outputs,
    told: Told,
    num_columns: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    on_step: OnStep | None,
    model_kwargs: dict[str, Any],
) -> tuple[Any, DecodeStats]:
    """Go on behind the text, whose unfinished rows are of one length, to the end of the call.

    Args:
        model: the target.
        text: what there is.
        outputs: of that text.
        told: what `on_step` knows of it.
        num_columns: tokens of each row that the streamer had.
        processors, criteria, config: of the call.
        streamer, on_step: told of what comes.
        model_kwargs: what `generate` prepared for the prompt, its cache as it was then.

    Returns:
        What `generate` returns, of the whole call, and the counts and times of the rest.
    """
    ids = text.sequences()
    num_rows, length = ids.shape
    num_new = length - text.num_prompt
    if any(text.is_finished):
        criteria = StoppingCriteriaList([*criteria, _Ended(list(text.is_finished))])
        if text.pad_token_id is not None:
            padded = _Padded(list(text.is_finished), text.pad_token_id)
            processors = LogitsProcessorList([*processors, padded])
    later = None if streamer is None else _Later(streamer, num_columns - length)
    stream = PlainStream(later, told.later(on_step), num_rows, num_new > 0)
    output = decode_plainly(
        model,
        ids,
        processors,
        stream.watch(criteria),
        _extended_config(config, num_new),
        stream,
        _continued(model, model_kwargs, ids[:, text.num_prompt :]),
    )
    if config.return_dict_in_generate:
        for name in ("scores", "logits", "hidden_states", "attentions"):
            if output.get(name) is not None and num_new > 0:
                output[name] = outputs.first_columns(name, num_new) + _last_of_prompt(
                    name, output[name]
                )
    return output, stream.stats


def _extended_config(config: GenerationConfig, num_new: int) -> GenerationConfig:
    """Return the config for a longer prompt: `generate` notes how long a mask was that it drops."""
    if not hasattr(config, "_mask_length"):
        return config
    longer = copy.copy(config)
    longer._mask_length += num_new
    return longer


def _continued(model: Model, model_kwargs: dict[str, Any], new_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of the prompt as they are with these tokens behind it."""
    num_new = new_ids.shape[1]
    longer = extended(model_kwargs, num_new)
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is not None and num_new:
        of_new = model.get_input_embeddings()(new_ids).to(embeds.dtype)
        longer["inputs_embeds"] = torch.cat([embeds, of_new], dim=1)
    return longer


def _last_of_prompt(name: str, columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return columns whose first is of a step, where it was of all that a prompt has."""
    if name in ("scores", "logits") or columns[0] is None:
        return columns
    kept = tuple(
        None if layer is None else layer[:, -1:] if name == "hidden_states" else layer[:, :, -1:]
        for layer in columns[0]
    )
    return (kept, *columns[1:])
