"""Attention over trees without copies of keys and values, against transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import lade
from lade.targets.parts import TREE_SDPA, Calls, attend, with_calls, with_held
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


class Layer(nn.Module):
    """What the attention functions of transformers look at in a layer."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups
        self.is_causal = True
        self.eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
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
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    num_keys = 20
    query = torch.randn(rows, num_queries, num_heads, 8, dtype=dtype).transpose(1, 2)
    key = torch.randn(rows, num_key_heads, num_keys, 8, dtype=dtype)
    value = torch.randn(rows, num_key_heads, num_keys, value_dim, dtype=dtype)
    mask: Tensor = torch.rand(rows, 1, num_queries, num_keys) < 0.6
    mask[..., 0] = True
    layer = Layer(num_heads // num_key_heads)
    expected, _ = AttentionInterface()["sdpa"](layer, query, key, value, mask, scaling=0.3)
    got, weights = attend(layer, query, key, value, mask, scaling=0.3)
    assert weights is None
    assert got.shape == (rows, num_queries, num_heads, value_dim)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("mask", [None, torch.arange(20.0).expand(2, 1, 5, 20)])
def test_other_masks_are_left_to_sdpa(mask: Tensor | None) -> None:
    query = torch.randn(2, 6, 5, 8)
    key = value = torch.randn(2, 2, 20, 8)
    expected, _ = AttentionInterface()["sdpa"](Layer(3), query, key, value, mask, is_causal=False)
    got, _ = attend(Layer(3), query, key, value, mask, is_causal=False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("own", "chosen"), [("sdpa", TREE_SDPA), ("eager", "eager")])
def test_it_takes_the_place_of_sdpa_alone(own: str, chosen: str) -> None:
    model = shared_model("llama", attention=own)
    assert lade.probe(model).attention == chosen
    assert lade.probe(model, num_rows=2).attention == chosen


def test_batches_of_a_model_that_changes_its_masks_are_decoded_plainly() -> None:
    """What rows see is lost with the mask; the check sees that."""
    model = tiny_model("llama", seed=3)

    def copy_mask(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
        mask = inputs.get("attention_mask")
        return args, inputs | {"attention_mask": None if mask is None else mask.clone()}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(copy_mask, with_kwargs=True)
    assert lade.probe(model, num_rows=2).verification == "plain"
    ids = torch.tensor([[0, 0, 5, 6, 5], [5, 6, 7, 5, 6]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    with pytest.warns(
        lade.PlainDecodingWarning, match="takes no parts|your own code|share one forward"
    ):
        got = lade.generate(model, **inputs, **GREEDY)
    assert got.tolist() == model.generate(**inputs, **GREEDY).tolist()


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_a_model_names_beside_the_mask_are_not_passed_over(name: str) -> None:
    """Models with sparse attention mask them for torch's own functions alone."""
    query, mask = torch.randn(1, 2, 3, 8), torch.ones(1, 1, 3, 5, dtype=torch.bool)
    keys = torch.randn(1, 2, 5, 8)
    named: dict[str, Any] = {name: torch.zeros(1, 3, 2)}
    with pytest.raises(NotImplementedError, match=name):
        attend(nn.Identity(), query, keys, keys, mask, **named)


# --- calls one after the other -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_calls_in_one_row_attend_as_each_alone(dtype: torch.dtype) -> None:
    """By additive masks, too, and without one: each token sees itself and those before it."""
    torch.manual_seed(0)
    sizes, lengths, layer = [1, 3, 5, 2], [20, 30, 5, 9], Layer(3)
    masks: list[Tensor | None] = [torch.rand(1, 1, 1, 20) < 0.6, torch.rand(1, 1, 3, 30) < 0.6]
    for mask in masks:
        assert mask is not None
        mask[..., 0] = True
    additive = torch.zeros(1, 1, 2, 9, dtype=dtype)
    additive[..., 3:7] = -torch.inf
    masks += [None, additive]
    query = torch.randn(1, sum(sizes), 6, 8, dtype=dtype).transpose(1, 2)
    held = [torch.randn(2, 1, 2, length, 8, dtype=dtype) for length in lengths]
    new = torch.zeros(1, 2, sum(sizes), 8, dtype=dtype)
    keys, values = (with_held(new, [each[at] for each in held]) for at in (0, 1))
    calls = with_calls(torch.ones(1, 1, 1, 1), Calls(sizes, masks))
    got, weights = attend(layer, query, keys, values, calls, scaling=0.3)
    assert weights is None
    assert got.shape == (1, sum(sizes), 6, 8)
    own, start = AttentionInterface()["sdpa"], 0
    for size, (key, value), mask in zip(sizes, held, masks, strict=True):
        of_call = query[:, :, start : start + size]
        expected, _ = own(layer, of_call, key, value, mask, scaling=0.3)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert torch.allclose(got[:, start : start + size], expected, atol=tolerance, rtol=0)
        start += size
    with pytest.raises(NotImplementedError, match="softcap"):
        attend(layer, query, keys, values, calls, softcap=3.0)
    with pytest.raises(NotImplementedError, match="keys and values change"):
        attend(layer, query, new, values, calls)
    wrong = with_calls(
        torch.ones(1, 1, 1, 1), Calls(sizes, [torch.ones(1, 1, 1, 19) > 0, *masks[1:]])
    )
    with pytest.raises(RuntimeError):
        attend(layer, query, keys, values, wrong)


# --- at the sizes of real models, in 16 bits on a GPU -------------------------------------------

ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest
DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.twin),
    *(pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in ROUNDING),
]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_keys"), [(64, 2, 5000), (128, 8, 700), (256, 8, 5000)]
)
def test_trees_attend_as_in_float64(
    head_dim: int, num_heads: int, num_keys: int, device: str, dtype: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(1)
    seen = torch.rand((1, 1, 16, num_keys), generator=made) < 0.7
    query = torch.randn((1, 16, num_heads, head_dim), generator=made).to(device, dtype)
    # Room behind the nodes, as in a cache whose slots are allocated ahead.
    slots = torch.randn((2, 1, 2, num_keys + 40, head_dim), generator=made).to(device, dtype)
    key, value = slots[..., :num_keys, :]
    layer = Layer(num_heads // 2)
    for mask, num in ((seen.to(device), 16), (None, 1)):  # and a step without a draft
        of_nodes = query[:, :num].transpose(1, 2)
        got, _ = attend(layer, of_nodes, key, value, mask)
        keys, values = (
            each.double().repeat_interleave(layer.num_key_value_groups, 1) for each in (key, value)
        )
        exact = scaled_dot_product_attention(of_nodes.double(), keys, values, attn_mask=mask)
        apart = (got.double() - exact.transpose(1, 2)).abs().max() / exact.abs().max()
        assert got.dtype == dtype
        assert float(apart) < ROUNDING[dtype]
