"""The effect of quantized layers on a token, which a check of a dozen tokens may miss.

Each layer runs alone, on inputs that provoke the effect. No package is known by name: unknown
formats are judged by their outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lade.compat import Model, dtype_of
from lade.compat.attempts import Attempt
from lade.compat.closeness import EXACT, distance, limit_of
from lade.forward.packed import PackedLinear

# Beyond any threshold for outliers (LLM.int8() has 6), and far enough that other tokens lose all
# precision where the largest activation sets the scale; products stay in the range of float16.
_LARGE = 100.0
# Half a step of an int8 grid, two steps of bfloat16. Over this distance, a smooth layer is linear,
# up to less than the limit of a check.
_SMALL = 2.0**-8
# Share of outputs that may change by chance. Another scale changes nearly all of them, also in
# bfloat16, whose own rounding hides some.
_BY_CHANCE = 0.25


@torch.no_grad()
def why_not_exact(model: Model) -> str | None:
    """Return why no method is exact, whatever a short check finds; None leaves it to the check.

    Two properties of linear layers decide. First, a token's outputs must not depend on the other
    tokens of a forward; the check may miss this if the same token has the largest activation with
    and without a draft. Second, in precisions that promise the text of `generate`, outputs must
    follow small changes of the inputs: layers that quantize activations turn some last bits into
    whole steps, but so rarely that a check of a small model may see none.
    """
    limit = limit_of(model)
    for module in model.modules():
        if _is_special(module):
            reason = _why_not_exact(model, module, limit)
            if reason is not None:
                return reason
    return None


def _is_special(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that is more than a product with its weight."""
    if not isinstance(getattr(module, "in_features", None), int):
        return False
    if any(hasattr(child, "in_features") for child in module.children()):  # as adapters have
        return False
    if type(module) is PackedLinear and "forward" not in vars(module):
        return False  # one of lade: it sums each row alone, in float32
    return _is_quantized(module) or type(module).forward is not nn.Linear.forward


def _is_quantized(module: nn.Module) -> bool:
    """Return whether a layer has a weight of another class, or a forward set on the instance."""
    weight: Any = getattr(module, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):
        return True
    # Hooks of accelerate replace the forward, too, and keep the original.
    forward = vars(module).get("_old_forward", module.forward)
    is_float = weight.is_floating_point() and weight.itemsize > 1
    return not is_float or getattr(forward, "__func__", None) is not type(module).forward


def _why_not_exact(model: Model, module: Any, limit: float) -> str | None:
    """Return why one layer lets no method be exact, or None."""
    angles = torch.arange(module.in_features, dtype=torch.float64, device=_device_of(model, module))
    first, second = (1.7 * angles).sin(), (2.3 * angles).cos()
    near = torch.stack([first, first + _SMALL * second, first - _SMALL * second])
    large = torch.stack([first, _LARGE * second, -_LARGE * second])
    with Attempt() as attempt:
        # Equal shapes, so that the same kernels run.
        once, again, beside = (_outputs(model, module, rows) for rows in (near, near, large))
    if attempt.failure is not None:  # a layer that does not run alone is left to the check
        return None
    by_chance = _share_changed(once[0], again[0])  # kernels may add up in any order
    if _share_changed(once[0], beside[0]) > by_chance + _BY_CHANCE:
        return f"its layers ({_name_of(module)}) quantize a token's activations by other tokens"
    if limit >= EXACT or not _is_quantized(module):
        return None
    if distance(once[1] + once[2] - once[0], once[0]) > limit:
        return (
            f"its layers ({_name_of(module)}) round activations in coarse steps, which the last "
            "bit of an activation decides"
        )
    return None


def _outputs(model: Model, module: nn.Module, rows: Tensor) -> Tensor:
    """Return the outputs of a layer for rows of inputs, float64 [num_rows, out_features].

    Raises:
        TypeError: the layer returns something else than one output a row.
    """
    # A call of the module would also call the user's hooks.
    made: Any = module.forward(rows.to(dtype_of(model))[None])
    if not isinstance(made, Tensor) or made.shape[:-1] != (1, len(rows)):
        raise TypeError(f"expected one output a row, got {type(made).__name__}")
    return made[0].double()


def _share_changed(outputs: Tensor, others: Tensor) -> float:
    is_same = (outputs == others) | (outputs.isnan() & others.isnan())
    return 1.0 - float(is_same.double().mean())


def _device_of(model: Model, module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    devices = [each.device for each in tensors if each.device.type != "meta"]
    return devices[0] if devices else model.device


def _name_of(module: nn.Module) -> str:
    """Return the name of a layer's class, or of its weight's class if that makes it special."""
    weight = getattr(module, "weight", None)
    is_special = isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter)
    return type(weight if type(module) is nn.Linear and is_special else module).__name__
