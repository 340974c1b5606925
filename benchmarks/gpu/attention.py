"""Attention to trees in 16 bits: what a new shape costs, and how far off its numbers are.

Kernels that are chosen by shape may be built for each new one, and nearly every tree has a new one.
Next file: `host.py`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from benchmarks.gpu.stage import Stage
from lade.attention.packed import packed_sdpa
from lade.bench.device import wait_for

# Numbers of nodes and of keys, no two of them alike; of a tree of Llama's 8B shape.
_SHAPES = tuple((9 + 3 * i, 700 + 131 * i) for i in range(8))
_NUM_HEADS, _NUM_KEY_HEADS, _HEAD_DIM = 32, 8, 128
_WITHOUT_PLANS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

_Attend = Callable[..., Any]
#: By name: what attends, and where.
_WAYS: Mapping[str, tuple[_Attend, Callable[[], AbstractContextManager[Any]]]] = {
    "sdpa": (AttentionInterface()["sdpa"], nullcontext),
    "sdpa without cuDNN": (AttentionInterface()["sdpa"], lambda: sdpa_kernel(_WITHOUT_PLANS)),
    "lade": (packed_sdpa, nullcontext),
}


class _Layer(nn.Module):
    """What `sdpa` looks at in an attention layer."""

    num_key_value_groups = _NUM_HEADS // _NUM_KEY_HEADS
    is_causal = True


def measure_attention(device: torch.device, stage: Stage) -> None:
    """Attend to trees of new shapes, each twice, and compare with attention in float64."""
    layer = _Layer()
    for dtype in (torch.bfloat16, torch.float16):
        for name, (attend, where) in _WAYS.items():
            if not stage.may_begin(f"{name} in {dtype}"):
                return
            first, again, apart = [], [], []
            with stage.part(f"{name} in {dtype}"), where():
                attend(layer, *_inputs(device, dtype, 8, 600))  # what the first call of all costs
                for num_nodes, num_keys in _SHAPES:
                    inputs = _inputs(device, dtype, num_nodes, num_keys)
                    expected = _exact(*inputs)
                    sec, got = _timed(device, attend, layer, inputs)
                    first.append(sec)
                    again.append(_timed(device, attend, layer, inputs)[0])
                    difference = (got.double() - expected).abs().max() / expected.abs().max()
                    apart.append(float(difference))
                stage.add(
                    {
                        "attention": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "num_shapes": len(_SHAPES),
                        "new_shape_sec": median(first),
                        "longest_sec": max(first),
                        "same_shape_sec": median(again),
                        "largest_difference": max(apart),  # of the largest number
                    }
                )


def _inputs(
    device: torch.device, dtype: torch.dtype, num_nodes: int, num_keys: int
) -> tuple[Tensor, ...]:
    """Return queries, keys, values and a mask in which a node sees the prefix and some nodes."""
    made = torch.Generator().manual_seed(num_keys)
    query = torch.randn((1, num_nodes, _NUM_HEADS, _HEAD_DIM), generator=made)
    key, value = torch.randn((2, 1, _NUM_KEY_HEADS, num_keys, _HEAD_DIM), generator=made)
    mask = torch.ones((1, 1, num_nodes, num_keys), dtype=torch.bool)
    ancestors = torch.rand((num_nodes, num_nodes), generator=made) < 0.5
    mask[..., num_keys - num_nodes :] = ancestors.tril() | torch.eye(num_nodes, dtype=torch.bool)
    numbers = (each.to(device, dtype) for each in (query.transpose(1, 2), key, value))
    return (*numbers, mask.to(device))


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return [1, num_nodes, num_heads, head_dim] in float64."""
    num_sharing = query.shape[1] // key.shape[1]
    keys, values = (each.double().repeat_interleave(num_sharing, dim=1) for each in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    attended: Tensor = (weights @ values).transpose(1, 2)
    return attended


def _timed(
    device: torch.device, attend: _Attend, layer: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[float, Tensor]:
    wait_for(device)
    start = perf_counter()
    attended, _ = attend(layer, *inputs)
    wait_for(device)
    return perf_counter() - start, attended
