"""Prompts of a batch, run without their padding, and equal ones once."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lade.attention.packed import PromptRow, with_groups
from lade.compat import CACHE, Model
from lade.targets.inputs import LOGITS_KEPT, chooses_logits
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import FixedSlots

_LEAST_SAVED = 0.1  # of all tokens; less is not worth the copies
# What a model may be given for the padded prompts; for anything else they are run as they are.
_KNOWN = {"input_ids", "position_ids", "attention_mask", CACHE, "use_cache"}
_KNOWN |= {LOGITS_KEPT, "return_dict", "inputs_embeds", "cache_position"}


class PackedPrompts(NamedTuple):
    """A forward over all different prompts of a batch, one after the other in one row."""

    inputs: dict[str, Any]
    prompts: list[int]  # for each row, which of the different prompts it has

    def logits(self, output: Tensor) -> Tensor:
        """Return those of each row's last token, [rows, 1, vocab_size], of [1, prompts, …]."""
        return output[0, self.prompts, None]


def packed_prompts(
    model: Model,
    input_ids: Tensor,
    model_kwargs: Mapping[str, Any],
    is_real: Tensor,
    cache: TreeCache,
) -> PackedPrompts | None:
    """Return a forward over all prompts without padding, and over equal ones once.

    The cache is set up to take their keys and values into the slots that they have with padding;
    what padding has there is zero, and masked as ever.

    Args:
        input_ids: int64 [rows, num_tokens], padded.
        is_real: bool [rows, num_tokens]: False for padding.
        cache: an empty cache without windows.

    Returns:
        None if that saves hardly anything, or there is something that only padded prompts can have.
    """
    rows, num_tokens = input_ids.shape
    if is_real.shape != input_ids.shape:
        return None
    if not bool(is_real[:, -1].all()):  # `generate` goes on from the last column, whatever it is
        return None
    if not chooses_logits(model):
        return None
    prepared = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=num_tokens, is_first_iteration=True, **model_kwargs
    )
    inputs = {name: value for name, value in prepared.items() if value is not None}
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape[1:] != (num_tokens,):
        return None
    positions = positions.expand(rows, -1)
    simple = bool | int | float | str
    if any(name not in _KNOWN and not isinstance(value, simple) for name, value in inputs.items()):
        return None  # such as images, or what an encoder made of them
    slots = [row.nonzero()[:, 0] for row in is_real]
    texts = [
        (*input_ids[row, own].tolist(), *positions[row, own].tolist())
        for row, own in enumerate(slots)
    ]
    different = [row for row, text in enumerate(texts) if texts.index(text) == row]
    prompts = [different.index(texts.index(text)) for text in texts]
    stops = [*accumulate(len(slots[row]) for row in different)]
    if stops[-1] > (1 - _LEAST_SAVED) * rows * num_tokens:
        return None
    starts = [0, *stops[:-1]]
    groups = [
        PromptRow(row, slice(start, stop), _interval(slots[row]))
        for row, start, stop in zip(different, starts, stops, strict=True)
    ]
    of_rows = torch.cat([torch.full_like(own, row) for row, own in enumerate(slots)])
    at = torch.cat(slots)
    source = torch.cat([torch.arange(starts[prompt], stops[prompt]) for prompt in prompts])
    source = source.to(at.device)

    def write(
        keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, _: Tensor
    ) -> None:
        keys[of_rows, :, at] = new_keys[0].transpose(0, 1)[source]
        values[of_rows, :, at] = new_values[0].transpose(0, 1)[source]

    cache.fix({None: FixedSlots(at, num_tokens, write, (rows, num_tokens))})

    def packed(padded: Tensor) -> Tensor:
        return torch.cat([padded[row, slots[row]] for row in different])[None]

    # A model that did not hand this mask on as it is would see nothing.
    mask = torch.zeros((1, 1, stops[-1], 1), dtype=torch.bool, device=input_ids.device)
    inputs |= {
        "input_ids": packed(input_ids),
        "position_ids": packed(positions),
        "attention_mask": with_groups(mask, groups),
        LOGITS_KEPT: torch.tensor(stops, device=input_ids.device) - 1,
        "return_dict": True,
    }
    return PackedPrompts(inputs, prompts)


def _interval(slots: Tensor) -> slice | Tensor:
    """Return ascending slots as a slice if there are no holes between them."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first == len(slots) - 1 else slots
