"""`pack`: a model whose weights stay in 16 bits, and that computes in float32."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lade.compat import Model
from lade.compat.attempts import Attempt
from lade.errors import UnsupportedModelError
from lade.forward.packed import PackedEmbedding, PackedLinear, made_whole
from lade.probing.state import check_tokens

_NARROW = (torch.bfloat16, torch.float16)
_BLOCK = 32  # numbers that kernels read at once


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
            reason = _why_rounded(model)
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
        kinds = [_kind_of(each) if name == "weight" else None for each, name in of_weight]
        dtype = _narrowest(matrix) if None not in kinds else None
        if dtype is None and matrix.dtype not in _NARROW:
            continue
        made = nn.Parameter(matrix.to(dtype or torch.float32), matrix.requires_grad)
        for (each, its_name), kind in zip(of_weight, kinds, strict=True):
            each._parameters[its_name] = made
            if dtype is not None and kind is not None:
                each.__class__ = kind
                vars(each).update(_blocks_type=0, half_head=0)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in _NARROW:
                module._buffers[name] = buffer.float()


class _Roundings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that turn float32 into 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_narrow = isinstance(made, Tensor) and made.dtype in _NARROW
        if is_narrow and any(isinstance(x, Tensor) and x.dtype is torch.float32 for x in args):
            self.found.add(str(func))
        return made


def _why_rounded(model: Model) -> str | None:
    """Return what rounds states to 16 bits in a forward of a packed model; None for nothing.

    Some models turn states into the dtype of a weight.
    """
    ids = torch.tensor([check_tokens(model)[:4]], dtype=torch.int64, device="cpu")
    with made_whole(), _Roundings() as roundings:
        model(input_ids=ids, use_cache=False)
    names = ", ".join(sorted(roundings.found))
    return f"its forward rounds states to the dtype of weights ({names})" if names else None


def why_not_packed(model: Model) -> str | None:
    """Return what of a model's weights `pack` refuses; None for nothing."""
    known = (torch.float32, *_NARROW)
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


def _kind_of(module: nn.Module) -> Any:
    """Return the class that computes what a module does from weights of 16 bits; None for none."""
    if "forward" in vars(module):
        return None
    if type(module) in (nn.Linear, PackedLinear):
        return PackedLinear
    is_look_up = type(module) in (nn.Embedding, PackedEmbedding)
    return PackedEmbedding if is_look_up or _is_scaled_look_up(module) else None


def _is_scaled_look_up(module: nn.Module) -> bool:
    """Return whether a module multiplies rows of its weight by one number, of made-up weights."""
    scale = module._buffers.get("embed_scale")
    if not isinstance(module, nn.Embedding) or scale is None or scale.numel() != 1:
        return False
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn((7, 3), dtype=torch.float32, device="cpu", generator=noise)
    number = torch.full_like(scale, 1.7, dtype=torch.float32)
    apart = copy(module)
    apart.__dict__ = {
        **vars(module),
        "_parameters": {"weight": nn.Parameter(weight, False)},
        "_buffers": {"embed_scale": number},
    }
    ids = torch.tensor([[5, 0, 3]], dtype=torch.int64, device="cpu")
    return torch.equal(type(module).forward(apart, ids), weight[ids] * number)


def _narrowest(weight: Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that holds a matrix exactly and that kernels read, or None."""
    if weight.dim() != 2 or weight.shape[1] % _BLOCK:
        return None
    if weight.dtype in _NARROW:
        return weight.dtype
    exact = (each for each in _NARROW if torch.equal(weight.to(each).to(weight.dtype), weight))
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
