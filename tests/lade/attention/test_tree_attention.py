"""Attention over trees in plain torch, against transformers' own attention with dense masks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from lade.attention.masks import Seen
from lade.attention.tree import attend, tree_attention, with_seen

NUM_SLOTS = 24


class Layer(nn.Module):
    """What the attention functions of transformers look at in a layer."""

    def __init__(self, num_key_value_groups: int, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups
        self.sinks = sinks
        self.is_causal = True
        self.eval()


def placeholder(rows: int, num_nodes: int, num_slots: int) -> Tensor:
    """Return a mask that says nothing true: only what it carries can be what is attended to."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(rows, 1, num_nodes, num_slots)


def random_seen(rows: int, num_nodes: int, most_cached: int) -> Seen:
    """Return ragged rows, the first one's prefix empty; some nodes see nothing of theirs."""
    num_cached = torch.randint(0, most_cached + 1, (rows,), dtype=torch.int32)
    num_cached[0] = 0
    starts = torch.randint(0, most_cached + 3, (rows, num_nodes), dtype=torch.int32)
    ancestors = (torch.rand(rows, num_nodes, num_nodes) < 0.5).tril()
    ancestors |= torch.eye(num_nodes, dtype=torch.bool)
    return Seen(num_cached, starts, ancestors)


def dense(seen: Seen, num_slots: int) -> Tensor:
    """Return what is seen as a mask [rows, 1, num_nodes, num_slots], slot by slot."""
    rows, num_nodes = seen.starts.shape
    mask = torch.zeros(rows, 1, num_nodes, num_slots, dtype=torch.bool)
    for row in range(rows):
        end = int(seen.num_cached[row])
        for node in range(num_nodes):
            mask[row, 0, node, int(seen.starts[row, node]) : end] = True
            for other in range(num_nodes):
                mask[row, 0, node, end + other] = seen.ancestors[row, node, other]
    return mask


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as eager attention takes it."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


SHAPES = [(1, 6, 2, 5, 8, 8), (3, 9, 3, 4, 8, 6), (2, 4, 1, 7, 6, 8), (2, 4, 4, 1, 8, 8)]


def inputs(
    shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Seen]:
    rows, num_heads, num_key_heads, num_nodes, dim, value_dim = shape
    query = torch.randn(rows, num_nodes, num_heads, dim, dtype=dtype).transpose(1, 2)
    key = torch.randn(rows, num_key_heads, NUM_SLOTS, dim, dtype=dtype)
    value = torch.randn(rows, num_key_heads, NUM_SLOTS, value_dim, dtype=dtype)
    return query, key, value, random_seen(rows, num_nodes, NUM_SLOTS - num_nodes)


def sdpa(*args: Any, **options: Any) -> Any:
    return AttentionInterface()["sdpa"](*args, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("own", "is_added", "options", "tolerance"),
    [
        (sdpa, False, {}, 1e-12),
        (modeling_llama.eager_attention_forward, True, {}, 1e-6),  # its softmax is in float32
        (modeling_gemma2.eager_attention_forward, True, {"softcap": 1.5}, 1e-6),  # and so is this
        (modeling_gpt_oss.eager_attention_forward, True, {"s_aux": True}, 1e-12),
    ],
    ids=["sdpa", "llama", "gemma2", "gpt_oss"],
)
def test_it_attends_as_transformers_does_with_a_dense_mask(
    own: Callable[..., Any],
    is_added: bool,
    options: dict[str, Any],
    tolerance: float,
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(shape)
    sinks = torch.randn(query.shape[1], dtype=torch.float64)
    layer = Layer(query.shape[1] // key.shape[1], sinks)
    if "s_aux" in options:
        options = {"s_aux": sinks}
    mask = dense(seen, NUM_SLOTS)
    own_mask = added(mask, query.dtype) if is_added else mask
    expected, _ = own(layer, query, key, value, own_mask, scaling=0.4, **options)
    ours = with_seen(placeholder(shape[0], shape[3], NUM_SLOTS), seen)
    got, weights = tree_attention(
        layer, query, key, value, ours, scaling=0.4, sliding_window=2, **options
    )
    assert weights is None
    assert got.shape == (shape[0], shape[3], shape[1], shape[5])
    assert got.is_contiguous()
    assert torch.allclose(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_only_in_the_end(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(SHAPES[0], dtype=dtype)
    exact = attend(query.double(), key.double(), value.double(), seen, scaling=0.4)
    got = attend(query, key, value, seen, scaling=0.4)
    assert got.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    assert ((got - exact).abs() <= half_a_step * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_where_nobody_looks_may_be_anything(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(SHAPES[1], dtype=dtype)
    unseen = ~dense(seen, NUM_SLOTS).any(dim=2)[..., None]  # [rows, 1, num_slots, 1]
    for row, num_cached in enumerate(seen.num_cached.tolist()):
        unseen[row, :, num_cached : num_cached + 4] = False  # a node's keys are its own, always
    assert unseen.sum() > 10
    expected = attend(query, key, value, seen, scaling=0.4)
    for junk in (torch.nan, torch.inf, -torch.inf, 1e30):
        spoilt = key.masked_fill(unseen, junk), value.masked_fill(unseen, junk)
        assert torch.equal(attend(query, *spoilt, seen, scaling=0.4), expected)


def test_scores_far_apart_do_not_overflow() -> None:
    """With weights relative to another part's peak, exp(2000) would be infinite."""
    query = torch.tensor([2000.0]).expand(1, 1, 1, 1)
    value = torch.arange(4.0).reshape(1, 1, 4, 1)
    sees = torch.ones(1, 1, 1, dtype=torch.bool)
    seen = Seen(torch.tensor([2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), sees)
    for keys, expected in [((1, 0, -1), 0.0), ((-1, -2, 0), 2.0), ((0, 1, 0), 1.0)]:
        key = torch.tensor([*keys, torch.nan]).reshape(1, 1, 4, 1)
        assert attend(query, key, value, seen, scaling=1.0).item() == expected
        sinks = torch.tensor([5000.0])
        assert attend(query, key, value, seen, scaling=1.0, sinks=sinks).item() == 0


# What layers may pass that changes attention, and what is said of it where the mask says what is
# seen, and where it does not.
HONOURED_BY_NONE: dict[str, Any] = {"indices": 1, "block_indices": 1, "cache": 1}
REFUSED: list[tuple[dict[str, Any], str | None, str | None]] = [
    *(
        ({name: 1}, f"cannot honour '{name}'", f"cannot honour '{name}'")
        for name in HONOURED_BY_NONE
    ),
    ({"position_bias": 1}, "cannot honour 'position_bias'", None),
    ({"softcap": 2.0}, None, r"cannot honour 'softcap' without .*\(with_seen\)"),
    ({"s_aux": torch.zeros(6).double()}, None, r"cannot honour 's_aux' without .*\(with_seen\)"),
    ({"output_attentions": True}, "no weights to return", "no weights to return"),
    ({"s_aux": torch.zeros(5).double()}, "a sink for each of 6 heads", "cannot honour"),
]


@pytest.mark.parametrize(("options", "with_it", "without_it"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    options: dict[str, Any], with_it: str | None, without_it: str | None
) -> None:
    query, key, value, seen = inputs(SHAPES[0])
    mask = with_seen(placeholder(1, 5, NUM_SLOTS), seen)
    for other, message in ((mask, with_it), (dense(seen, NUM_SLOTS), without_it)):
        if message is not None:
            with pytest.raises(
                NotImplementedError, match=f"Layer: attention 'lade_tree' .*{message}"
            ):
                tree_attention(Layer(3), query, key, value, other, **options)
        elif "position_bias" not in options:
            tree_attention(Layer(3), query, key, value, other, **options)
    nothing: dict[str, Any] = dict.fromkeys(options)
    tree_attention(Layer(3), query, key, value, mask, **nothing)


def test_dropout_and_masks_of_other_queries_or_keys_are_refused() -> None:
    query, key, value, seen = inputs(SHAPES[0])
    mask = with_seen(placeholder(1, 5, NUM_SLOTS), seen)
    with pytest.raises(NotImplementedError, match=r"has no dropout, got 0\.1 in training"):
        tree_attention(Layer(3).train(), query, key, value, mask, dropout=0.1)
    shorter = key[:, :, :-1], value[:, :, :-1]
    for given in [(query[:, :, :4], key, value), (query, *shorter)]:
        with pytest.raises(NotImplementedError, match=r"a mask of shape .*, got \[1, 1, 5, 24\]"):
            tree_attention(Layer(3), *given, mask)


def test_masks_that_nobody_explained_are_left_to_sdpa() -> None:
    """As where another thread prefills a prompt on the same model."""
    torch.manual_seed(0)
    query, key, value, seen = inputs(SHAPES[1])
    mask = dense(seen, NUM_SLOTS)
    bias = torch.randn(1, query.shape[1], 4, NUM_SLOTS, dtype=torch.float64)
    cases: list[tuple[Tensor | None, dict[str, Any]]] = [
        (None, {}),
        (None, {"is_causal": False, "softcap": None, "s_aux": None}),
        (mask, {"scaling": 0.3, "sliding_window": 2}),
        (added(mask, torch.float64), {}),
        (with_seen(mask.clone(), seen).clone(), {"scaling": 0.4}),
        (mask, {"position_bias": bias}),
    ]
    results: list[Tensor] = []
    for other, options in cases:
        given: tuple[Any, ...] = (query, key, value, other)
        got, weights = tree_attention(Layer(3), *given, **options)
        assert weights is None
        assert torch.equal(got, sdpa(Layer(3), *given, **options)[0])
        results.append(got)
    for index, result in enumerate(results):  # each of the options was honoured
        assert not any(torch.allclose(result, other) for other in results[:index])
