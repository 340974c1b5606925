"""Tree, mask, cache and target: a node sees its own path and nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from lade.cache import TreeCache
from lade.masks import tree_mask
from lade.target import TreeTarget
from lade.tree import ROOT, Tree
from ngram_pool import Draft
from tests.lade.tiny import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")


def make_draft(parents: list[int], seed: int = 0) -> Draft:
    rng = np.random.default_rng(seed)
    depths: list[int] = []
    token_ids: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
        siblings = {t for t, p in zip(token_ids, parents, strict=False) if p == parent}
        token_ids.append(int(rng.choice([t for t in range(VOCAB_SIZE) if t not in siblings])))
    return Draft(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.linspace(0.9, 0.1, len(parents)),
    )


def path_to(draft: Draft, tree_node: int) -> list[int]:
    """Tree nodes from the root to a node, both included."""
    path = [tree_node]
    while path[0] != ROOT:
        path.insert(0, int(draft.parents[path[0] - 1]) + 1)
    return path


random_parents = st.lists(st.integers(0, 10**6), max_size=14).map(
    lambda draws: [draw % (i + 1) - 1 for i, draw in enumerate(draws)]
)


def test_build_lays_the_draft_under_the_root() -> None:
    draft = make_draft([-1, 0, -1, 2, 2])
    tree = Tree.build(42, draft, CPU)
    assert len(tree) == 6
    assert tree.token_ids.tolist() == [[42, *draft.token_ids.tolist()]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]
    assert tree.children[3, int(draft.token_ids[4])] == 5


def test_additive_mask_hides_with_the_lowest_finite_value() -> None:
    prefix = torch.tensor([[False, True]])
    tree = Tree.build(1, make_draft([-1]), CPU)
    assert tree_mask(prefix, tree.ancestors, None).int().tolist() == [
        [[[0, 1, 1, 0], [0, 1, 1, 1]]]
    ]
    low = torch.finfo(torch.float16).min
    assert tree_mask(prefix, tree.ancestors, torch.float16).tolist() == [
        [[[low, 0, 0, low], [low, 0, 0, 0]]]
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_a_node_has_the_logits_of_its_path_and_a_commit_leaves_a_fresh_cache(
    family: str, attention: str
) -> None:
    model = tiny_model(family, seed=2, attention=attention)

    @settings(max_examples=25, deadline=None)
    @given(parents=random_parents, leaf=st.integers(0, 10**6), seed=st.integers(0, 99))
    def check(parents: list[int], leaf: int, seed: int) -> None:
        check_one_step(model, make_draft(parents, seed), leaf % (len(parents) + 1))

    check()


@torch.no_grad()
def check_one_step(model: Any, draft: Draft, leaf: int) -> None:
    prompt = [5, 9, 11, 5, 9]
    target = TreeTarget(model, torch.tensor([prompt]), {"use_cache": True}, 3, 40)
    target.prefill()
    target.commit([ROOT])
    tree = Tree.build(8, draft, CPU)
    logits = target.forward(target.inputs(tree))
    token_ids = tree.token_ids[0].tolist()
    for node in range(len(tree)):
        path = [token_ids[i] for i in path_to(draft, node)]
        alone = model(torch.tensor([prompt + path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, rtol=1e-5, atol=1e-5)
    kept = path_to(draft, leaf)
    target.commit(kept)
    committed = prompt + [token_ids[i] for i in kept]
    fresh = DynamicCache(config=model.config)
    model(torch.tensor([committed]), past_key_values=fresh)
    assert target.cache.get_seq_length() == len(committed)
    for mine, theirs in zip(target.cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-5)


def test_cache_grows_past_its_first_slots_and_keeps_what_it_holds() -> None:
    cache = TreeCache(num_layers=2, num_slots=0, max_slots=400)
    expected = []
    for step in range(5):
        for layer in range(2):
            new = torch.randn(1, 2, 150, 4)
            expected.append((layer, new))
            keys, values = cache.update(new, -new, layer)
            whole = torch.cat([part for index, part in expected if index == layer], dim=2)
            assert torch.equal(keys, whole)
            assert torch.equal(values, -whole)
        assert cache.get_seq_length() == 150 * (step + 1)


def test_cache_grows_in_steps_and_not_beyond_what_is_needed() -> None:
    cache = TreeCache(num_layers=1, num_slots=1000, max_slots=1500)

    def num_slots() -> int:
        return int(cache.layers[0]._key_store.buffer.shape[3])

    cache.update(torch.zeros(1, 1, 1000, 2), torch.zeros(1, 1, 1000, 2), 0)
    assert num_slots() == 1256
    for expected in (1256, 1256, 1500, 1500, 1500, 1600):
        cache.update(torch.zeros(1, 1, 100, 2), torch.zeros(1, 1, 100, 2), 0)
        assert num_slots() == expected
    short = TreeCache(num_layers=1, num_slots=10, max_slots=20)
    short.update(torch.zeros(1, 1, 10, 2), torch.zeros(1, 1, 10, 2), 0)
    assert short.layers[0]._key_store.buffer.shape[3] == 20


def test_layers_on_several_devices_have_stores_of_their_own() -> None:
    cache = TreeCache(num_layers=2, num_slots=4, max_slots=9, share=False)
    for layer in range(2):
        cache.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), layer)
        assert cache.layers[layer]._key_store.buffer.shape[0] == 1
    cache.keep(0, [1])
    assert cache.get_seq_length() == 1


def test_layers_of_unlike_shapes_each_find_a_place() -> None:
    cache = TreeCache(num_layers=3, num_slots=4, max_slots=9)
    shapes = [(1, 2, 3, 4), (1, 1, 3, 4), (1, 2, 3, 6)]
    states = [(torch.randn(shape), torch.randn(shape)) for shape in shapes]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    cache.keep(1, [1])  # of slots 1 and 2, the second
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        assert torch.equal(layer.keys, keys[:, :, [0, 2]])
        assert torch.equal(layer.values, values[:, :, [0, 2]])


def test_cache_crops_reorders_and_resets_like_any_other() -> None:
    cache = TreeCache(num_layers=1, num_slots=4, max_slots=9)
    assert cache.get_seq_length() == 0
    keys = torch.randn(2, 1, 3, 4)
    cache.update(keys, -keys, 0)
    cache.crop(-1)
    assert torch.equal(cache.layers[0].keys, keys[:, :, :2])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].values, -keys[[1, 1], :, :2])
    with pytest.raises(ValueError, match="expected a number of at most 0, got 2"):
        cache.layers[0].crop(2)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.get_max_length() == -1


def test_commit_moves_only_what_is_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is a prefix of the tree, the usual case, copies nothing."""
    cache = TreeCache(num_layers=1, num_slots=8, max_slots=9)
    keys = torch.randn(1, 1, 6, 4)
    cache.update(keys, keys, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", None)
        cache.keep(2, [0, 1, 2])
    assert torch.equal(cache.layers[0].keys, keys[:, :, :5])
