"""Attention over trees in plain torch, against transformers' own attention with dense masks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import StaticLayer
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from lade.attention.tree import TREE_ATTENTION, Seen, attend, tree_attention, with_seen
from tests.grids import thinned
from tests.lade.tiny import tiny_model
from tests.support import tiny as support

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


def random_seen(rows: int, num_nodes: int, most_cached: int, hides: bool = False) -> Seen:
    """Return ragged rows, the first one's prefix empty; some nodes see nothing of theirs.

    Args:
        rows, num_nodes, most_cached: the shape; there are slots for that many tokens.
        hides: whether prefixes have holes; that of the third row is then hidden as a whole.
    """
    num_cached = torch.randint(0, most_cached + 1, (rows,), dtype=torch.int32)
    num_cached[0] = 0
    starts = torch.randint(0, most_cached + 3, (rows, num_nodes), dtype=torch.int32)
    ancestors = (torch.rand(rows, num_nodes, num_nodes) < 0.5).tril()
    ancestors |= torch.eye(num_nodes, dtype=torch.bool)
    if not hides:
        return Seen(num_cached, starts, ancestors)
    # Some of the nodes' own slots are hidden too, which must not count.
    visible = torch.rand(rows, most_cached + num_nodes) < 0.6
    visible[2:3] = False
    return Seen(num_cached, starts, ancestors, visible)


def dense(seen: Seen, num_slots: int) -> Tensor:
    """Return what is seen as a mask [rows, 1, num_nodes, num_slots], slot by slot."""
    rows, num_nodes = seen.starts.shape
    mask = torch.zeros(rows, 1, num_nodes, num_slots, dtype=torch.bool)
    for row in range(rows):
        end = int(seen.num_cached[row])
        for node in range(num_nodes):
            mask[row, 0, node, int(seen.starts[row, node]) : end] = True
            if seen.visible is not None:
                mask[row, 0, node] &= seen.visible[row]
            for other in range(num_nodes):
                mask[row, 0, node, end + other] = seen.ancestors[row, node, other]
    return mask


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as eager attention takes it."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


SHAPES = [(1, 6, 2, 5, 8, 8), (3, 9, 3, 4, 8, 6), (2, 4, 1, 7, 6, 8), (2, 4, 4, 1, 8, 8)]


def inputs(
    shape: Sequence[int], dtype: torch.dtype = torch.float64, hides: bool = False
) -> tuple[Tensor, Tensor, Tensor, Seen]:
    rows, num_heads, num_key_heads, num_nodes, dim, value_dim = shape
    query = torch.randn(rows, num_nodes, num_heads, dim, dtype=dtype).transpose(1, 2)
    key = torch.randn(rows, num_key_heads, NUM_SLOTS, dim, dtype=dtype)
    value = torch.randn(rows, num_key_heads, NUM_SLOTS, value_dim, dtype=dtype)
    return query, key, value, random_seen(rows, num_nodes, NUM_SLOTS - num_nodes, hides)


def sdpa(*args: Any, **options: Any) -> Any:
    return AttentionInterface()["sdpa"](*args, **options)


@pytest.mark.parametrize("hides", [False, True])
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
    hides: bool,
) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(shape, hides=hides)
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


def test_without_a_scale_it_is_that_of_the_keys() -> None:
    query, key, value, seen = inputs(SHAPES[1])
    mask = with_seen(placeholder(3, 4, NUM_SLOTS), seen)
    got, _ = tree_attention(Layer(3), query, key, value, mask)
    assert torch.equal(got, attend(query, key, value, seen, scaling=8**-0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_only_in_the_end(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(SHAPES[0], dtype=dtype)
    exact = attend(query.double(), key.double(), value.double(), seen, scaling=0.4)
    got = attend(query, key, value, seen, scaling=0.4)
    assert got.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    assert ((got - exact).abs() <= half_a_step * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_where_nobody_looks_may_be_anything(dtype: torch.dtype, hides: bool) -> None:
    torch.manual_seed(0)
    query, key, value, seen = inputs(SHAPES[1], dtype=dtype, hides=hides)
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


WINDOW = 8  # of the tiny models


def seen_by_kind(
    num_cached: int, padding: list[int], parents: list[int], hides: bool
) -> dict[int | None, Seen]:
    """Return what the nodes of a tree, the same in each row, see without a window and with one.

    Args:
        num_cached, padding, parents: slots of the prefixes, of the padding in front, and the tree.
        hides: whether padding is told as slots that nobody sees; otherwise as where prefixes start.
    """
    rows, num_nodes = len(padding), len(parents)
    depths = [0] * num_nodes
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            ancestors[node] |= ancestors[parent]
    slots = num_cached + torch.tensor(depths)
    lengths = torch.full((rows,), num_cached, dtype=torch.int32)
    firsts = torch.tensor(padding)[:, None].expand(rows, num_nodes)
    visible = None
    if hides:
        visible = torch.arange(NUM_SLOTS) >= firsts[:, :1]
        firsts = torch.zeros_like(firsts)
    made = {}
    for window in (None, WINDOW):
        starts, near = firsts, torch.tensor(True)
        if window is not None:
            starts = torch.maximum(firsts, slots - window + 1)
            near = slots[:, None] - slots[None, :] < window
        of_nodes = (ancestors & near).expand(rows, -1, -1)
        made[window] = Seen(lengths, starts.int(), of_nodes, visible)
    return made


MODELS: dict[str, tuple[Callable[..., Any], str]] = {
    "llama": (tiny_model, "sdpa"),
    "mistral": (tiny_model, "sdpa"),
    "gemma3_text": (tiny_model, "sdpa"),
    "deepseek_v3": (tiny_model, "sdpa"),
    "gemma2": (support.tiny_model, "eager"),
    "gpt_oss": (support.tiny_model, "eager"),
}


def layer_windows(model: Any) -> dict[str, int | None]:
    """Return the window of each kind of layer; one kind where the model has no kinds."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) < 2:
        return {"": getattr(config, "sliding_window", None)}
    assert kinds == {"full_attention", "sliding_attention"}
    return {"full_attention": None, "sliding_attention": config.sliding_window}


def masks(model: Any, make: Callable[[int | None], Tensor]) -> Any:
    """Return a mask, or one for each kind of layer, as the model takes them."""
    made = {kind: make(window) for kind, window in layer_windows(model).items()}
    return made.get("", made)


def run(model: Any, prompt: Any, tree: Any, attention: str) -> Tensor:
    """Return the logits of a tree behind a prompt, both in a preallocated cache."""
    own = model.config._attn_implementation
    num_layers = model.config.num_hidden_layers
    cache = Cache(layers=[StaticLayer(max_cache_len=NUM_SLOTS) for _ in range(num_layers)])
    with torch.no_grad():
        model(**prompt, past_key_values=cache)
        model.set_attn_implementation(attention)
        logits: Tensor = model(**tree, past_key_values=cache).logits
    model.set_attn_implementation(own)
    return logits


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_it_has_the_logits_of_its_own_attention(name: str, hides: bool) -> None:
    make, own = MODELS[name]
    model = make(name, dtype=torch.float64, attention=own)
    padding, num_cached, parents = [0, 3], 13, [-1, 0, 0, 1, 3, 2]
    seen = seen_by_kind(num_cached, padding, parents, hides)
    for window in layer_windows(model).values():
        assert window in seen
    rows, num_nodes = len(padding), len(parents)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 90, (rows, num_cached + num_nodes), generator=generator)

    def own_mask(mask: Tensor) -> Tensor:
        return added(mask, torch.float64) if own == "eager" else mask

    def of_prompt(window: int | None) -> Tensor:
        slots, keys = torch.arange(num_cached)[:, None], torch.arange(NUM_SLOTS)
        near = (keys <= slots) & (slots - keys < (window or NUM_SLOTS))
        real = keys >= torch.tensor(padding)[:, None, None]
        return own_mask(((near & real) | (slots == keys))[:, None])

    def of_tree(window: int | None) -> Tensor:
        return own_mask(dense(seen[window], NUM_SLOTS))

    def of_ours(window: int | None) -> Tensor:
        return with_seen(placeholder(rows, num_nodes, NUM_SLOTS), seen[window])

    def logits_of(make_mask: Callable[[int | None], Tensor], attention: str) -> Tensor:
        skipped = torch.tensor(padding)[:, None]
        prompt = {
            "input_ids": ids[:, :num_cached],
            "position_ids": (torch.arange(num_cached) - skipped).clamp(min=0),
            "attention_mask": masks(model, of_prompt),
        }
        tree = {
            "input_ids": ids[:, num_cached:],
            "position_ids": num_cached + torch.tensor([0, 1, 1, 2, 3, 2]) - skipped,
            "attention_mask": masks(model, make_mask),
        }
        return run(model, prompt, tree, attention)

    expected = logits_of(of_tree, own)
    tolerance = 1e-5 if name == "gemma2" else 1e-9  # its softmax is in float32
    assert torch.allclose(logits_of(of_ours, TREE_ATTENTION), expected, atol=tolerance, rtol=0)
    for window, right in seen.items():
        seen[window] = right._replace(starts=right.starts + 1)
    wrong = logits_of(of_ours, TREE_ATTENTION)
    assert not torch.allclose(wrong, expected, atol=100 * tolerance, rtol=0)


@pytest.mark.parametrize("hides", thinned([False, True], True))
def test_compiled_models_find_what_is_seen_and_do_not_remember_it(hides: bool) -> None:
    """The attribute of the mask is an input of the compiled graph, like the mask itself."""
    model = tiny_model("llama")
    model.set_attn_implementation(TREE_ATTENTION)
    compiled: Any = torch.compile(model.__call__, backend="eager", fullgraph=True)
    ids = torch.tensor([[5, 9, 7]])
    counter: Any = torch._dynamo.utils.counters["stats"]
    graphs = []
    for ancestors in (torch.ones(3, 3).tril(), torch.eye(3)):
        seen = Seen(
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, 3, dtype=torch.int32),
            ancestors.bool()[None],
            torch.ones(1, 3, dtype=torch.bool) if hides else None,
        )
        given = {"input_ids": ids, "position_ids": torch.arange(3)[None], "use_cache": False}
        with torch.no_grad():
            mask = with_seen(placeholder(1, 3, 3), seen)
            expected = model(**given, attention_mask=mask).logits
            got = compiled(**given, attention_mask=mask).logits
        assert torch.equal(got, expected)
        graphs.append(counter["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", ["indices", "block_indices", "position_bias", "cache"])
def test_what_changes_attention_otherwise_is_refused(name: str) -> None:
    query, key, value, seen = inputs(SHAPES[0])
    mask = with_seen(placeholder(1, 5, NUM_SLOTS), seen)
    given = (Layer(3), query, key, value, mask)
    message = f"Layer: attention 'lade_tree' cannot honour '{name}'"
    with pytest.raises(NotImplementedError, match=message):
        tree_attention(*given, **{name: torch.zeros(1)})  # type: ignore[arg-type]
    tree_attention(*given, **{name: None})  # type: ignore[arg-type]


def test_weights_and_dropout_are_refused() -> None:
    query, key, value, seen = inputs(SHAPES[0])
    given = (query, key, value, with_seen(placeholder(1, 5, NUM_SLOTS), seen))
    with pytest.raises(NotImplementedError, match="no weights to return for output_attentions"):
        tree_attention(Layer(3), *given, output_attentions=True)
    with pytest.raises(NotImplementedError, match=r"has no dropout, got 0\.1 in training"):
        tree_attention(Layer(3).train(), *given, dropout=0.1)
    tree_attention(Layer(3), *given, dropout=0.1, output_attentions=False)


def test_a_mask_of_other_queries_or_keys_is_refused() -> None:
    query, key, value, seen = inputs(SHAPES[0])
    mask = with_seen(placeholder(1, 5, NUM_SLOTS), seen)
    shorter = key[:, :, :-1], value[:, :, :-1]
    for given in [(query[:, :, :4], key, value), (query, *shorter)]:
        with pytest.raises(NotImplementedError, match=r"a mask of shape .*, got \[1, 1, 5, 24\]"):
            tree_attention(Layer(3), *given, mask)


def test_masks_that_nobody_explained_are_left_to_sdpa() -> None:
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


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_sdpa_would_ignore_is_refused_where_nobody_explained_the_mask(name: str) -> None:
    query, key, value, seen = inputs(SHAPES[0])
    mask = with_seen(placeholder(1, 5, NUM_SLOTS), seen)
    options: dict[str, Any] = {name: 2.0 if name == "softcap" else torch.zeros(6).double()}
    tree_attention(Layer(3), query, key, value, mask, **options)
    message = rf"Layer: attention 'lade_tree' cannot honour '{name}' without .*\(with_seen\)"
    for other in (None, mask.clone(), mask[..., :-1]):
        with pytest.raises(NotImplementedError, match=message):
            tree_attention(Layer(3), query, key, value, other, **options)


@pytest.mark.parametrize("name", ["indices", "block_indices", "cache"])
def test_what_neither_honours_is_refused_with_any_mask(name: str) -> None:
    query, key, value, seen = inputs(SHAPES[0])
    for mask in (None, dense(seen, NUM_SLOTS)):
        with pytest.raises(NotImplementedError, match=f"'lade_tree' cannot honour '{name}'$"):
            tree_attention(Layer(3), query, key, value, mask, **{name: torch.zeros(1)})  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="no weights to return"):
            tree_attention(Layer(3), query, key, value, mask, output_attentions=True)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
def test_a_prefill_beside_trees_is_that_of_sdpa(name: str) -> None:
    """As another thread runs it on the same model: also with padding, and behind a cache."""
    model = tiny_model(name, dtype=torch.float64, attention="sdpa")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 90, (2, 12), generator=generator)
    padded = torch.ones_like(ids)
    padded[1, :4] = 0
    for mask in (None, padded):
        made = []
        for attention in ("sdpa", TREE_ATTENTION):
            model.set_attn_implementation(attention)
            new = model.generate(
                ids,
                attention_mask=torch.ones_like(ids) if mask is None else mask,
                max_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            with torch.no_grad():
                of_prompt = model(input_ids=ids, attention_mask=mask).logits
            made.append((new.sequences, torch.stack(new.logits), of_prompt))
        assert all(map(torch.equal, *made))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_prefill_that_sdpa_would_get_wrong_is_refused(name: str) -> None:
    model = support.tiny_model(name, dtype=torch.float64, attention="eager")
    model.set_attn_implementation(TREE_ATTENTION)
    with pytest.raises(NotImplementedError, match="Attention: attention 'lade_tree' cannot honour"):
        model(input_ids=torch.tensor([[5, 6, 7]]))
