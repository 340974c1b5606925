"""Attention over trees without copies of keys and values, against transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import lade
from lade.attention.packed import PACKED_SDPA, packed_sdpa
from tests.lade.shared import shared_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


class Layer(nn.Module):
    """What `sdpa` looks at in an attention layer."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups
        self.is_causal = True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_heads", "num_key_heads", "num_queries", "value_dim"),
    [(1, 6, 2, 5, 8), (3, 9, 3, 4, 8), (2, 4, 1, 7, 6), (1, 4, 4, 3, 8), (2, 6, 2, 1, 8)],
)
def test_it_attends_as_sdpa_does(
    rows: int,
    num_heads: int,
    num_key_heads: int,
    num_queries: int,
    value_dim: int,
    is_added: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    num_keys = 20
    query = torch.randn(rows, num_queries, num_heads, 8, dtype=dtype).transpose(1, 2)
    key = torch.randn(rows, num_key_heads, num_keys, 8, dtype=dtype)
    value = torch.randn(rows, num_key_heads, num_keys, value_dim, dtype=dtype)
    mask: Tensor = torch.rand(rows, 1, num_queries, num_keys) < 0.6
    mask[..., 0] = True
    if is_added:
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)
    layer = Layer(num_heads // num_key_heads)
    expected, _ = AttentionInterface()["sdpa"](layer, query, key, value, mask, scaling=0.3)
    got, weights = packed_sdpa(layer, query, key, value, mask, scaling=0.3)
    assert weights is None
    assert got.shape == (rows, num_queries, num_heads, value_dim)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("shape", [(2, 1, 1, 20), (2, 6, 5, 20), None])
def test_other_masks_are_left_to_sdpa(shape: tuple[int, ...] | None) -> None:
    query = torch.randn(2, 6, 5, 8)
    key = value = torch.randn(2, 2, 20, 8)
    mask = None if shape is None else torch.rand(shape) < 2
    expected, _ = AttentionInterface()["sdpa"](Layer(3), query, key, value, mask, is_causal=False)
    got, _ = packed_sdpa(Layer(3), query, key, value, mask, is_causal=False)
    assert torch.equal(got, expected)


def test_what_else_layers_pass_is_left_to_sdpa() -> None:
    """The newest transformers refuses soft caps there, the oldest ignores them."""
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 6, 8)
    inputs = (Layer(2), query, key, key, torch.ones(1, 1, 2, 6) > 0)

    def attend(attention: Any) -> Any:
        try:
            return attention(*inputs, softcap=3.0)[0].tolist()
        except ValueError as error:
            return str(error)

    assert attend(packed_sdpa) == attend(AttentionInterface()["sdpa"])


def test_steps_use_it_where_heads_share_keys_and_the_model_keeps_its_own() -> None:
    model = shared_model("llama")
    seen: set[str] = set()

    def look(module: Any, args: Any) -> None:
        seen.add(module.self_attn.config._attn_implementation)
        assert model.config._attn_implementation == "sdpa"

    handle = model.model.layers[0].register_forward_pre_hook(look)
    assert lade.probe(model).attention == PACKED_SDPA
    lade.generate(model, torch.arange(2, 9)[None], **GREEDY)
    handle.remove()
    assert seen == {"sdpa", PACKED_SDPA}


@pytest.mark.parametrize(("num_key_value_heads", "attention"), [(4, "sdpa"), (2, "eager")])
def test_other_models_keep_their_attention(num_key_value_heads: int, attention: str) -> None:
    model = shared_model("llama", attention=attention, num_key_value_heads=num_key_value_heads)
    assert lade.probe(model).attention == attention
