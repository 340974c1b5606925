"""The attention that trees have by default, at the sizes of real models, in 16 bits on a GPU.

Each test has a twin in float32 that runs on a CPU; on a GPU these sizes reach kernels, blocks and
rounding that tiny models do not.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from lade.attention.packed import PACKED_SDPA, packed_sdpa
from lade.probing.factory import VerificationPlan, make_target
from lade.targets.trees import TreeTarget
from lade.tree import Tree
from tests.grids import thinned
from tests.lade.attention.test_tree_attention import Layer
from tests.lade.targets.test_tree import make_draft, path_to
from tests.lade.tiny import tiny_model

# How far numbers may be off, of the largest one.
ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DEVICES = (
    pytest.param("cpu", torch.float32, marks=pytest.mark.twin),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda),
    pytest.param("cuda", torch.float16, marks=pytest.mark.cuda),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda),
)


class Size(NamedTuple):
    head_dim: int
    num_heads: int
    num_cached: int
    window: int | None


SIZES = {
    f"{head_dim}-{num_heads}-{num_cached}-{window}": Size(head_dim, num_heads, num_cached, window)
    for head_dim, num_heads, num_cached, window in product(
        (64, 128, 256), (2, 8), (700, 5000), (None, 300)
    )
}
NUM_KEY_HEADS = 2
# A spine of five nodes with branches beside and behind it.
PARENTS = [-1, 0, 1, 2, 3, -1, 5, 0, 7, 2, 9, -1, 4, 12, 4]


def seen_by(size: Size) -> Tensor:
    """Return which keys each node sees, bool [num_nodes, num_keys]."""
    tree = Tree.build(7, make_draft(PARENTS))
    keys = torch.arange(size.num_cached)
    last = size.num_cached + torch.tensor(tree.depths)[:, None]
    is_near = torch.ones(len(tree), size.num_cached, dtype=torch.bool)
    if size.window is not None:
        is_near = keys > last - size.window
    return torch.cat([is_near, torch.as_tensor(tree.ancestors)], dim=1)


def exact(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Return attention in float64, [1, num_nodes, num_heads, head_dim]."""
    num_sharing = query.shape[1] // key.shape[1]
    keys, values = (each.double().repeat_interleave(num_sharing, dim=1) for each in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    attended: Tensor = (weights @ values).transpose(1, 2)
    return attended


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("name", thinned(SIZES, "128-8-700-None", "64-2-5000-300"))
def test_trees_attend_as_in_float64(name: str, device: str, dtype: torch.dtype) -> None:
    size = SIZES[name]
    seen = seen_by(size).to(device)
    made = torch.Generator().manual_seed(1)
    num_nodes, num_keys = seen.shape
    query = torch.randn((1, num_nodes, size.num_heads, size.head_dim), generator=made)
    slots = torch.randn((2, 1, NUM_KEY_HEADS, num_keys + 40, size.head_dim), generator=made)
    query = query.to(device, dtype).transpose(1, 2)
    # Room behind the nodes, as in a cache whose slots are allocated ahead.
    key, value = slots.to(device, dtype)[..., :num_keys, :]
    layer = Layer(size.num_heads // NUM_KEY_HEADS)
    got, _ = packed_sdpa(layer, query, key, value, seen[None, None])
    expected = exact(query, key, value, seen)
    assert got.dtype == dtype
    assert float((got.double() - expected).abs().max() / expected.abs().max()) < ROUNDING[dtype]
    alone, _ = packed_sdpa(layer, query[:, :, :1], key, value, None)  # a step without a draft
    expected = exact(query[:, :, :1], key, value, torch.ones_like(seen[:1]))
    assert float((alone.double() - expected).abs().max() / expected.abs().max()) < ROUNDING[dtype]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("head_dim", thinned([64, 128], 64))
def test_a_tree_has_the_logits_of_its_paths_one_by_one(
    head_dim: int, family: str, device: str, dtype: torch.dtype
) -> None:
    """Behind 700 tokens; mistral sees 300 of them. Paths are run whole and without a cache."""
    options: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 256)
    options |= {"head_dim": head_dim, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    options |= {"num_attention_heads": 8, "num_key_value_heads": NUM_KEY_HEADS}
    if family == "mistral":
        options["sliding_window"] = 300
    model = tiny_model(family, seed=2, dtype=dtype, **options).to(device)
    prompt = np.random.default_rng(0).integers(2, 90, (1, 700))
    ids = torch.from_numpy(prompt).to(device)
    plan = VerificationPlan("tree", PACKED_SDPA, {})
    inputs = {"attention_mask": torch.ones_like(ids)}
    draft = make_draft(PARENTS)
    tree = Tree.build(5, draft)
    with torch.no_grad():
        target = make_target(model, ids, inputs, plan, 40, GenerationConfig())
        assert isinstance(target, TreeTarget)
        target.prefill()
        got = target.forward(target.inputs([tree])).logits[0].double()
        reference = model.double() if device == "cpu" else model.float()
        for node in (0, 5, 8, 13):  # the root, and the ends of branches
            path = [tree.token_ids[each] for each in path_to(draft, node)]
            whole = torch.cat([ids, torch.tensor([path], device=device)], dim=1)
            expected = reference(whole, use_cache=False).logits[0, -1].double()
            apart = float((got[node] - expected).abs().max() / expected.std())
            # What two layers and a head make of the rounding of each number.
            assert apart < 12 * ROUNDING[dtype]
