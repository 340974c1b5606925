"""A copy of a model with 8-bit weights, to be its own assistant in benchmarks.

Only the weights are int8, as torch's own kernel for CPUs takes them, and all else is bfloat16. With
SmolLM2-135M on two cores of an AMD EPYC with AVX-512, a forward over one token takes 15 ms instead
of 29 in bfloat16 and 48 in float32, one over 6 tokens 19 ms instead of 28 and 75, and one over 64
tokens 111 ms instead of 84 in bfloat16. 97.6 % of the tokens of greedy answers are its likeliest,
too. Dynamic quantization (`torch.ao`), which is deprecated, was about as fast; `torch._int_mm` was
slower, and so was this kernel in float32 (67 ms for one token).
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

_MAX_INT8 = 127


class Int8Linear(nn.Module):
    """A linear layer in bfloat16 whose weights are int8, with a scale for each output."""

    weight: Tensor  # int8 [out_features, in_features]
    scales: Tensor  # bfloat16 [out_features]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        largest = weight.abs().amax(dim=1).clamp(min=1e-8)
        scales = (largest / _MAX_INT8).to(torch.bfloat16)
        steps = (weight / scales.float()[:, None]).round().clamp(-_MAX_INT8, _MAX_INT8)
        self.register_buffer("weight", steps.to(torch.int8))
        self.register_buffer("scales", scales)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().bfloat16(), False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the outputs [..., out_features] for inputs [..., in_features]."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        outputs: Tensor = product.view(*states.shape[:-1], -1)
        return outputs if self.bias is None else outputs + self.bias


def int8_copy(model: Any) -> Any:
    """Return a copy of a model whose linear layers, the head among them, have int8 weights.

    The model itself is not changed. Embeddings and all other parameters of the copy are bfloat16.

    Raises:
        ValueError: the model is not on a CPU, or has no linear layers, as one whose layers are
            quantized already.
    """
    name = type(model).__name__
    if model.device.type != "cpu":
        raise ValueError(f"expected {name} on the CPU, got one on {model.device}")
    copied = copy.deepcopy(model)
    layers = [
        (parent, attribute, child)
        for parent in copied.modules()
        for attribute, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.is_floating_point()
    ]
    if not layers:
        raise ValueError(f"expected {name} to have linear layers, got none")
    for parent, attribute, child in layers:
        setattr(parent, attribute, Int8Linear(child))
    return copied.to(torch.bfloat16)
