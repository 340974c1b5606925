"""`pack`: a model whose weights stay in 16 bits, and that computes in float32."""

from typing import Any

import torch
from torch import Tensor, nn

from lade.compat import Model
from lade.compat.attempts import Attempt
from lade.errors import UnsupportedModelError
from lade.forward.widening import NARROW, packed_kind, why_rounded
from lade.probing.state import check_tokens


@torch.no_grad()
def pack(model: Model) -> Model:
    """Keep a model's weights in 16 bits, and let it compute in float32; return the model.

    Weights of linear layers and embeddings stay in 16 bits, or are stored so if 16 bits hold them
    exactly, as in a float32 model that was loaded from a checkpoint of 16 bits. All other numbers
    become float32. So the text is that of `model.float()`, in about half the memory. Parameters
    keep their names, shapes and ties, so the model can be saved and take adapters.

    Args:
        model: a causal LM of transformers on a CPU; it is changed in place.

    Raises:
        UnsupportedModelError: the model is not on a CPU, is quantized, has stacks of experts, which
            would stay in float32, or rounds to the dtype of a weight; it is as it was.
    """
    reason = why_not_packed(model)
    before = [(module, vars(module).copy(), type(module)) for module in model.modules()]
    if reason is None:
        _pack(model)
        with Attempt() as attempt:  # the model's code runs
            reason = why_rounded(model, check_tokens(model)[:4])
        reason = reason or attempt.failure
    if reason is not None:
        for module, attributes, kind in before:
            module.__class__, module.__dict__ = kind, attributes
        raise UnsupportedModelError(f"{type(model).__name__} cannot be packed: {reason}")
    return model


def _pack(model: Model) -> None:
    """Give modules of a model other classes and parameters, in dicts of their own."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        vars(module).update(_parameters=module._parameters.copy(), _buffers=module._buffers.copy())
        for name, weight in module._parameters.items():
            if weight is not None:
                users.setdefault(id(weight), []).append((module, name))
    for of_weight in users.values():
        module, name = of_weight[0]
        matrix: Any = module._parameters[name]
        kinds = [packed_kind(each) if name == "weight" else None for each, name in of_weight]
        dtype = _narrowest(matrix) if None not in kinds else None
        if dtype is None and matrix.dtype not in NARROW:
            continue
        made = nn.Parameter(matrix.to(dtype or torch.float32), matrix.requires_grad)
        for (each, its_name), kind in zip(of_weight, kinds, strict=True):
            each._parameters[its_name] = made
            if dtype is not None and kind is not None:
                each.__class__ = kind
                vars(each).update(_blocks_type=0)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in NARROW:
                module._buffers[name] = buffer.float()


def why_not_packed(model: Model) -> str | None:
    """Return what of a model's weights `pack` refuses; None for nothing."""
    known = (torch.float32, *NARROW)
    for name, module in model.named_modules():
        for weight in module._parameters.values():
            if weight is None:
                continue
            if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in known:
                return f"{name or 'it'} has weights of {type(weight).__name__} in {weight.dtype}"
            if weight.device.type not in ("cpu", "meta"):
                return f"{name or 'it'} has weights on {weight.device}"
            if weight.dim() > 2 and not isinstance(module, nn.Conv1d):
                return f"{name} has a stack of {len(weight)} matrices, which would stay in float32"
    return None


def _narrowest(matrix: Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that holds a matrix exactly, or None."""
    if matrix.dtype in NARROW:
        return matrix.dtype
    exact = (each for each in NARROW if torch.equal(matrix.to(each).to(matrix.dtype), matrix))
    return next(exact, None)


def make_buffers(model: Model, whole: Model) -> None:
    """Give a model that was loaded in 16 bits the buffers that it would have in float32.

    Buffers that no checkpoint has, such as factors of embeddings, are made in the dtype of loading.

    Args:
        model: the model.
        whole: the same in float32, without memory.
    """
    for name, module in whole.named_modules():
        made = {
            each: torch.full_like(buffer, torch.nan, device="cpu")
            for each, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        }
        if not made:
            continue
        module._buffers.update(made)
        whole._init_weights(module)
        mine = model.get_submodule(name)
        for each in made.keys() & mine._buffers.keys() & mine._non_persistent_buffers_set:
            if not bool(module._buffers[each].isnan().any()):  # else nobody has made it
                mine._buffers[each] = module._buffers[each]
