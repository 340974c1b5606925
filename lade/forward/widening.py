"""Views of models in 16 bits that compute in float32, on the models' own weights.

Large weights stay what they are: a linear layer, an embedding or a stack of experts in 16 bits is
replaced by one that widens its weights where it multiplies. All other numbers, such as norms and
biases, are copied in float32.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from lade.compat import Model
from lade.compat.view import HOOKED, HooksOf, viewed, with_eager_experts
from lade.forward.experts import PARTS, STACKS
from lade.forward.packed import (
    PackedConv1D,
    PackedEmbedding,
    PackedLinear,
    PackedStack,
    made_whole,
)

#: Numbers of 16 bits.
NARROW = (torch.bfloat16, torch.float16)
_BLOCK = 32  # numbers that kernels read at once
_MOST_COPIED = 2**26  # numbers that are copied in float32: 256 megabytes


class WidenedModel:
    """A model in 16 bits, and its view that computes in float32.

    Args:
        model: is not changed.
        dtype: of the tensors that hooks of the model get.

    Attributes:
        view: the view.
        is_small: whether few numbers are copied.
    """

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self._dtype, self._num_copied = dtype, 0
        #: Tensors of the view that stand for the model's: their dicts and names.
        self._slots: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        self._stacks: list[tuple[PackedStack, dict[str, Any], str]] = []
        self.view: Model = viewed(with_eager_experts(model), self._changed)
        self.is_small = self._num_copied <= _MOST_COPIED

    def refresh(self) -> None:
        """Take over weights of the model that were replaced or written to."""
        for mine, name, theirs, origin in self._slots:
            held, tensor = mine[name], theirs.get(origin)
            if held is None or tensor is None or held.dtype is tensor.dtype:
                mine[name] = tensor
            elif not torch.equal(held, wide := tensor.detach().float()):
                mine[name] = _like(tensor, wide)
        for stack, theirs, origin in self._stacks:
            stack.parts[0] = theirs[origin]

    def _changed(self, module: nn.Module) -> dict[str, Any] | None:
        """Return what differs in a module of the view; None for nothing."""
        changed: dict[str, Any] = {}
        kept: set[str] = set()
        kind = packed_kind(module) if _is_narrow(module._parameters.get("weight")) else None
        if kind is not None:
            kept = {"weight"}
            changed = {"__class__": kind, "_blocks_type": 0}
        elif _is_stacked(module):
            kept = {*STACKS[:2]}
            changed = self._stacked(module)
        for name in ("_parameters", "_buffers"):
            theirs: dict[str, Any] = vars(module)[name]
            narrow = [each for each in theirs if _is_narrow(theirs[each]) and each not in kept]
            if not narrow and name not in changed:
                continue
            mine = changed.setdefault(name, {**theirs})
            for each in narrow:
                mine[each] = _like(theirs[each], theirs[each].detach().float())
                self._num_copied += theirs[each].numel()
            self._slots += [(mine, each, theirs, each) for each in mine if each in theirs]
        for name in HOOKED:
            if vars(module)[name]:
                changed[name] = HooksOf(module, name, self._dtype)
        return changed or None

    def _stacked(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of experts whose stacks are packed, parameters in their order."""
        theirs, changed, mine = module._parameters, dict[str, Any](), dict[str, Any]()
        for name, weight in theirs.items():
            if name not in STACKS[:2]:
                mine[name] = weight
                continue
            assert weight is not None
            changed[name] = PackedStack([weight], [], weight.shape[2])
            self._stacks.append((changed[name], theirs, name))
            part = PARTS[2 * STACKS.index(name)]
            mine[part] = weight
            self._slots.append((mine, part, theirs, name))
        return {**changed, "_parameters": mine}


def packed_kind(module: nn.Module) -> Any:
    """Return the class that would compute from a module's weight in 16 bits; None for none."""
    weight = module._parameters.get("weight")
    if "forward" in vars(module) or weight is None or weight.dim() != 2:
        return None
    if type(module) in (Conv1D, PackedConv1D):
        return PackedConv1D
    if weight.shape[1] % _BLOCK:
        return None
    if type(module) in (nn.Linear, PackedLinear):
        return PackedLinear
    is_look_up = type(module) in (nn.Embedding, PackedEmbedding)
    return PackedEmbedding if is_look_up or _is_scaled_look_up(module) else None


def _is_stacked(module: nn.Module) -> bool:
    """Return whether a module has stacks of experts in 16 bits, by names that jobs know."""
    stacks = [module._parameters.get(name) for name in STACKS[:2]]
    return all(
        _is_narrow(each) and each.dim() == 3 and each.shape[2] % _BLOCK == 0  # type: ignore[union-attr]
        for each in stacks
    )


def _is_narrow(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.dtype in NARROW


def _like(tensor: Tensor, wide: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(wide, requires_grad=False) if is_parameter else wide


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


class _Roundings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that turn float32 into 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if _is_narrow(made) and any(
            isinstance(each, Tensor) and each.dtype is torch.float32 for each in args
        ):
            self.found.add(str(func))
        return made


@torch.no_grad()
def why_rounded(model: Model, token_ids: list[int]) -> str | None:
    """Return what rounds states to 16 bits in a forward of a widened model; None for nothing.

    Some models turn states into the dtype of a weight.
    """
    bare: dict[str, Any] = {name: {} for name in HOOKED}  # of the user, who may round
    view = viewed(model, lambda module: bare if any(map(vars(module).get, HOOKED)) else None)
    ids = torch.tensor([token_ids], dtype=torch.int64, device="cpu")
    with made_whole(), _Roundings() as roundings:
        view(input_ids=ids, use_cache=False)
    names = ", ".join(sorted(roundings.found))
    return f"its forward rounds states to the dtype of weights ({names})" if names else None
