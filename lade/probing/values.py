"""What a model's layers hold besides their structure: weights, plain attributes, adapters in use.

`structure.py` notices other objects in place of these; this file, other values in the same place.
No value of theirs changes how a layer of torch or transformers treats one token beside others, but
a check may have been blind to what was zero then: so a spot check follows. What was computed with
them, such as keys and values, is no more true at all.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lade.attempts import Attempt
from lade.compat import Model, has_adapters
from lade.probing.own_code import PLAIN, state_of_partials
from lade.probing.structure import UNRELATED

_NUM_PLACES = 16  # of each weight; who writes past torch's own count mostly writes to all of it
# Of layers of PEFT: what `set_adapter`, `disable_adapter` and `scale_layer` set.
_SWITCHES: tuple[str, ...] = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
# What `switches_of` and `structure.py` look at.
_OF_TORCH = frozenset({*vars(nn.Module()), "_disable_adapters"})
_PLAIN = frozenset(PLAIN)


class Values(NamedTuple):
    """What differs once values have changed."""

    weights: Hashable  # how often they were written to, and some values of each
    attributes: Hashable  # numbers and texts that modules hold, and how many attributes
    working: Hashable  # what small buffers and other tensors hold, which some forwards set

    @classmethod
    def of(cls, model: Model, attributes: Hashable = None) -> "Values":
        """Return the present values; takes some microseconds for each weight.

        Args:
            attributes: as they were read before, if they were; forwards may change them.

        Torch counts writes to a tensor, but not those through `.data`. So some values of each
        weight are compared, too; a write through `.data` that misses all of them is not seen.
        """
        modules = [*model.modules()]
        weights = _tensors_in(module._parameters for module in modules)
        buffers = _tensors_in(module._buffers for module in modules)
        # Small buffers may be new ones after each forward, of frequencies say.
        weights += [each for each in buffers if each.dim() > 1]
        working = [each for each in buffers if each.dim() <= 1]
        writes = tuple([each._version for each in weights if not each.is_inference()])
        now, tensors = _own_values_in(modules)
        working += tensors
        read = now if attributes is None else attributes
        return cls((writes, _some_values_of(weights)), read, _some_values_of(working))

    def may_be_news(self, known: "Values | None") -> bool:
        """Return whether a check with other values may have been blind to what these do."""
        return known is None or self[:2] != known[:2]


def values_of(model: Model, attributes: Hashable = None) -> Values | None:
    """Return the present values of a model; None where they cannot be read."""
    with Attempt(even_memory=True):  # weights may be of unusual classes
        return Values.of(model, attributes)
    return None


def attributes_of(model: Model) -> Hashable:
    """Return the plain attributes of a model's modules, in the model's order."""
    return _own_values_in([*model.modules()])[0]


def _own_values_in(modules: Sequence[nn.Module]) -> tuple[Hashable, list[Tensor]]:
    """Return the plain attributes, and the tensors that are none of torch's weights and buffers.

    Args:
        modules: of a model, the root first.
    """
    plain: list[Any] = []
    tensors: list[Tensor] = []
    for place, each in enumerate(map(vars, modules)):
        plain.append((len(each) if place else len(each.keys() - UNRELATED),))
        for value in [value for name, value in each.items() if name not in _OF_TORCH]:
            if type(value) in _PLAIN:
                plain.append(value)
            elif isinstance(value, Tensor):
                tensors.append(value)
    return tuple(plain), tensors


def _tensors_in(dicts: Iterable[dict[str, Tensor | None]]) -> list[Tensor]:
    # `parameters` and `buffers` make a name for each, which takes three times as long.
    return [each for tensors in dicts for each in tensors.values() if each is not None]


def _some_values_of(weights: Sequence[Tensor]) -> tuple[bytes, ...]:
    values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        plain = weight.detach()
        # Tensors of other classes can only be read as a whole.
        is_plain = type(plain) is Tensor and plain.layout is torch.strided
        if is_plain and not (plain.is_quantized or plain.is_meta) and plain.numel():
            values.setdefault((plain.device, plain.dtype), []).append(_some_values(plain))
    read = [torch.cat(pieces).view(torch.uint8).cpu() for pieces in values.values()]
    return tuple(piece.numpy().tobytes() for piece in read)


def _some_values(weight: Tensor) -> Tensor:
    if not weight.is_contiguous():
        return weight[(0,) * (weight.dim() - 1)][:_NUM_PLACES]
    # An odd step, so that the values of a matrix come from different columns.
    step = max(1, weight.numel() // _NUM_PLACES - 1 | 1)
    return weight.as_strided((min(_NUM_PLACES, -(-weight.numel() // step)),), (step,))


def switches_of(model: Model) -> Hashable:
    """Return which of a model's adapters are in use, how much of each, and for which rows."""
    if not has_adapters(model):
        return None
    modules = [*model.named_modules()]
    switches: Mapping[tuple[str, str], str] = {
        (name, attribute): repr(vars(module).get(attribute))
        for name, module in modules
        for attribute in _SWITCHES
        if attribute in vars(module)
    }
    hooks = [hook for _, module in modules for hook in module._forward_pre_hooks.values()]
    return tuple(switches.items()), state_of_partials(hooks)
