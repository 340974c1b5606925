"""Prompts of a batch, run without their padding."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lade.attention.packed import PromptRow, with_groups
from lade.compat import Model
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import FixedSlots

_LEAST_PADDING = 0.1  # of all tokens; less is not worth the copies
# What a model may be given for the padded prompts; for anything else they are run as they are.
_KNOWN = {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache"}
_KNOWN |= {"logits_to_keep", "return_dict", "inputs_embeds", "cache_position"}


def without_padding(
    model: Model,
    input_ids: Tensor,
    model_kwargs: Mapping[str, Any],
    is_real: Tensor,
    cache: TreeCache,
) -> dict[str, Any] | None:
    """Return the arguments of a forward over all prompts one after the other, in one row.

    The cache is set up to take their keys and values into the slots that they have with padding;
    what padding has there is zero, and masked as ever.

    Args:
        model: the target.
        input_ids: int64 [rows, num_tokens], padded.
        model_kwargs: what `generate` prepared.
        is_real: bool [rows, num_tokens]: False for padding.
        cache: an empty cache without windows.

    Returns:
        None if there is hardly any padding, or something that only padded prompts can have. Logits
        are those of the last tokens, [1, rows, vocab_size].
    """
    rows, num_tokens = input_ids.shape
    num_real = is_real.sum(1).tolist()
    most = (1 - _LEAST_PADDING) * rows * num_tokens
    if is_real.shape != input_ids.shape or sum(num_real) > most:
        return None
    if not bool(is_real[:, -1].all()):  # `generate` goes on from the last column, whatever it is
        return None
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return None
    prepared = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=num_tokens, is_first_iteration=True, **model_kwargs
    )
    inputs = {name: value for name, value in prepared.items() if value is not None}
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != input_ids.shape:
        return None
    if any(isinstance(value, Tensor) and name not in _KNOWN for name, value in inputs.items()):
        return None
    of_rows, slots = is_real.nonzero(as_tuple=True)
    stops = torch.tensor(num_real).cumsum(0).tolist()
    groups = []
    for row, (stop, num) in enumerate(zip(stops, num_real, strict=True)):
        own = slots[stop - num : stop]
        first, last = int(own[0]), int(own[-1])
        keys = slice(first, last + 1) if last - first == num - 1 else own
        groups.append(PromptRow(row, slice(stop - num, stop), keys))

    def write(
        keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, at: Tensor
    ) -> None:
        keys[of_rows, :, at] = new_keys[0].transpose(0, 1)
        values[of_rows, :, at] = new_values[0].transpose(0, 1)

    cache.fix({None: FixedSlots(slots, num_tokens, write, (rows, num_tokens))})
    # A model that did not hand this mask on as it is would see nothing.
    mask = torch.zeros((1, 1, len(slots), 1), dtype=torch.bool, device=input_ids.device)
    return inputs | {
        "input_ids": input_ids[of_rows, slots][None],
        "position_ids": positions[of_rows, slots][None],
        "attention_mask": with_groups(mask, groups),
        "logits_to_keep": torch.tensor(stops, device=input_ids.device) - 1,
        "return_dict": True,
    }
