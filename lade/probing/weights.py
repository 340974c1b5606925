"""Whether the weights of a model were written to, so that what was computed is no more true.

`structure.py` notices other weights in place of these; this file, other values in the same place.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from lade.compat import Model, has_adapters

_NUM_PLACES = 16  # of each weight; who writes past torch's own count mostly writes to all of it
# Of layers of PEFT: what `set_adapter`, `disable_adapter` and `scale_layer` set.
_SWITCHES: tuple[str, ...] = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def stamp_of(model: Model) -> Hashable:
    """Return what differs once weights have been written to; takes some microseconds for each.

    Torch counts writes to a tensor, but not those through `.data`. So some values of each weight
    are compared, too; a write through `.data` that misses all of them is not seen.
    """
    weights = [*model.parameters(), *model.buffers()]
    values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        plain = weight.detach()
        # Tensors of other classes can only be read as a whole.
        is_plain = type(plain) is Tensor and plain.layout == torch.strided
        if is_plain and not (plain.is_quantized or plain.is_meta) and plain.numel():
            values.setdefault((plain.device, plain.dtype), []).append(_some_values(plain))
    read = [torch.cat(pieces).view(torch.uint8).cpu() for pieces in values.values()]
    # Some models replace small buffers, of frequencies say, in every forward.
    counted = [*model.parameters(), *(each for each in model.buffers() if each.dim() > 1)]
    writes = tuple(each._version for each in counted if not each.is_inference())
    return writes, tuple(piece.numpy().tobytes() for piece in read)


def _some_values(weight: Tensor) -> Tensor:
    if not weight.is_contiguous():
        return weight[(0,) * (weight.dim() - 1)][:_NUM_PLACES]
    # An odd step, so that the values of a matrix come from different columns.
    step = max(1, weight.numel() // _NUM_PLACES - 1 | 1)
    return weight.as_strided((min(_NUM_PLACES, -(-weight.numel() // step)),), (step,))


def switches_of(model: Model) -> Hashable:
    """Return which of a model's adapters are in use, and how much of each."""
    if not has_adapters(model):
        return None
    return tuple(
        (name, repr(vars(module).get(attribute)))
        for name, module in model.named_modules()
        for attribute in _SWITCHES
        if attribute in vars(module)
    )
