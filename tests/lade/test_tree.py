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
from lade.tree import ROOT, Tree, TreeBatch
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
    tree = Tree.build(42, draft)
    assert len(tree) == 6
    assert tree.token_ids == [42, *draft.token_ids.tolist()]
    assert tree.depths == [0, 1, 2, 1, 2, 2]
    assert tree.ancestors.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]
    assert tree.children[3, int(draft.token_ids[4])] == 5


def test_trees_of_a_batch_are_padded_with_nodes_that_see_themselves_alone() -> None:
    trees = [Tree.build(7, make_draft([])), Tree.build(8, make_draft([-1, 0]))]
    batch = TreeBatch.stack(trees, CPU)
    assert batch.width == 3
    assert batch.token_ids[0, 0] == 7
    assert batch.token_ids[1].tolist() == trees[1].token_ids
    assert batch.depths.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch.ancestors.int().tolist() == [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]


def test_additive_mask_hides_with_the_lowest_finite_value() -> None:
    visible, num_cached = torch.tensor([[False, True]]), torch.tensor([2])
    ancestors = TreeBatch.stack([Tree.build(1, make_draft([-1]))], CPU).ancestors
    assert tree_mask(visible, num_cached, ancestors, None).int().tolist() == [
        [[[0, 1, 1, 0], [0, 1, 1, 1]]]
    ]
    low = torch.finfo(torch.float16).min
    assert tree_mask(visible, num_cached, ancestors, torch.float16).tolist() == [
        [[[low, 0, 0, low], [low, 0, 0, 0]]]
    ]


def test_nodes_of_a_ragged_batch_lie_behind_their_own_row() -> None:
    visible = torch.tensor([[True, True, True], [True, False, False]])
    tree = Tree.build(1, make_draft([-1]))
    ancestors = TreeBatch.stack([tree, tree], CPU).ancestors
    mask = tree_mask(visible, torch.tensor([3, 1]), ancestors, None)
    assert mask.int().tolist() == [
        [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]],
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]],  # not [1, 0, 0, 1, 0]: slots follow the row's own
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
    tree = Tree.build(8, draft)
    logits = target.forward(target.inputs(TreeBatch.stack([tree], CPU))).logits[0]
    for node in range(len(tree)):
        path = [tree.token_ids[i] for i in path_to(draft, node)]
        alone = model(torch.tensor([prompt + path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, rtol=1e-5, atol=1e-5)
    kept = path_to(draft, leaf)
    target.commit([kept])
    committed = prompt + [tree.token_ids[i] for i in kept]
    assert target.num_cached == [len(committed)]
    check_cache(model, target, 0, committed)


def check_cache(model: Any, target: TreeTarget, row: int, committed: list[int]) -> None:
    """The row of the cache is what a fresh forward over its committed tokens leaves."""
    fresh = DynamicCache(config=model.config)
    model(torch.tensor([committed]), past_key_values=fresh)
    for mine, theirs in zip(target.cache.layers, fresh.layers, strict=True):
        for got, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            held = got[row : row + 1, :, : len(committed)]
            torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_rows_of_a_batch_are_each_as_alone_step_after_step(family: str, attention: str) -> None:
    model = tiny_model(family, seed=4, attention=attention)
    prompts = [[5, 9, 11, 5, 9], [7, 7, 3, 2, 8], [4, 4, 4, 9, 1]]

    @settings(max_examples=12, deadline=None)
    @given(
        steps=st.lists(
            st.lists(st.tuples(random_parents, st.integers(0, 10**6)), min_size=3, max_size=3),
            min_size=1,
            max_size=3,
        ),
        dropped=st.integers(0, 2),
    )
    @torch.no_grad()
    def check(steps: list[list[tuple[list[int], int]]], dropped: int) -> None:
        target = TreeTarget(model, torch.tensor(prompts), {"use_cache": True}, 3, 60)
        target.prefill()
        committed = [list(prompt) for prompt in prompts]
        for number, step in enumerate(steps):
            if number == 1:
                keep = [row for row in range(3) if row != dropped]
                target.select(keep)
                committed = [committed[row] for row in keep]
            drafts = [make_draft(parents, number) for parents, _ in step[: len(committed)]]
            trees = [Tree.build(8 + number, draft) for draft in drafts]
            logits = target.forward(target.inputs(TreeBatch.stack(trees, CPU))).logits
            kept = []
            for row, (draft, tree) in enumerate(zip(drafts, trees, strict=True)):
                leaf = step[row][1] % len(tree)
                path = path_to(draft, leaf)
                ids = [*committed[row], *[tree.token_ids[node] for node in path]]
                alone = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[row, leaf], alone, rtol=1e-5, atol=1e-5)
                kept.append(path)
                committed[row] = ids
            target.commit(kept)
            assert target.num_cached == [len(ids) for ids in committed]
        everyone = [list(range(3)) if len(steps) == 1 else keep][0]
        target.rejoin()
        for row, ids in zip(everyone, committed, strict=True):
            check_cache(model, target, row, ids)

    check()


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
    cache.keep([[1]])
    assert cache.get_seq_length() == 1


def test_layers_of_unlike_shapes_each_find_a_place() -> None:
    cache = TreeCache(num_layers=3, num_slots=4, max_slots=9)
    shapes = [(1, 2, 3, 4), (1, 1, 3, 4), (1, 2, 3, 6)]
    states = [(torch.randn(shape), torch.randn(shape)) for shape in shapes]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    cache.keep([[0, 2]])
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        assert torch.equal(layer.keys, keys[:, :, [0, 2]])
        assert torch.equal(layer.values, values[:, :, [0, 2]])


def test_commit_moves_only_what_is_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is a prefix of the tree, the usual case, copies nothing."""
    cache = TreeCache(num_layers=1, num_slots=8, max_slots=9)
    keys = torch.randn(1, 1, 6, 4)
    cache.update(keys, keys, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", None)
        cache.keep([[0, 1, 2, 3, 4]])
    assert torch.equal(cache.layers[0].keys, keys[:, :, :5])


def test_a_ragged_cache_grows_and_holds_nothing_that_was_never_written() -> None:
    """Hidden slots are multiplied by 0, and 0 times NaN is NaN."""
    cache = TreeCache(num_layers=1, num_slots=4, max_slots=600)
    cache.update(torch.ones(2, 1, 4, 1), torch.ones(2, 1, 4, 1), 0)
    cache.keep([[0], [0, 1, 2, 3]])
    for _ in range(3):
        new = torch.full((2, 1, 150, 1), 2.0)
        keys, _ = cache.update(new, new, 0)
        assert bool(keys.isfinite().all())
    assert keys[0, 0, :, 0].tolist() == [1] + [2] * 450 + [0] * 3
    assert keys[1, 0, :, 0].tolist() == [1] * 4 + [2] * 450


def test_rows_are_left_out_in_place_and_come_back() -> None:
    cache = TreeCache(num_layers=2, num_slots=4, max_slots=9)
    keys = torch.randn(5, 1, 3, 2)
    for layer in range(2):
        cache.update(keys, -keys, layer)
    cache.keep([[0], [0, 1], [0, 1, 2], [0, 2], [0]])
    memory = cache.layers[0].keys.data_ptr()
    cache.rejoin()  # nothing was left out
    assert cache.lengths == [1, 2, 3, 2, 1]
    cache.select([1, 2, 3])
    cache.select([0, 2])  # of those: 1 and 3
    assert cache.lengths == [2, 2]
    for layer in cache.layers:
        assert torch.equal(layer.keys, torch.stack([keys[1, :, :2], keys[3][:, [0, 2]]]))
    assert cache.layers[0].keys.data_ptr() == memory
    new = torch.randn(2, 1, 300, 2)  # more than there was room for
    for layer in range(2):
        cache.update(new, new, layer)
    cache.keep([[0], [299]])
    cache.rejoin()
    assert cache.lengths == [1, 3, 3, 3, 1]
    held = cache.layers[1].keys
    assert torch.equal(held[[0, 4], :, :1], keys[[0, 4], :, :1])
    assert torch.equal(held[1, :, :3], torch.cat([keys[1, :, :2], new[0, :, :1]], dim=1))
    assert torch.equal(held[2, :, :3], keys[2])
    assert torch.equal(held[3, :, :3], torch.cat([keys[3][:, [0, 2]], new[1, :, 299:]], dim=1))


def test_a_cache_is_taken_over_by_copy_and_handed_over_without_one() -> None:
    theirs = DynamicCache()
    keys = torch.randn(2, 1, 3, 4)
    for layer in range(2):
        theirs.update(keys, -keys, layer)
    cache = TreeCache(num_layers=2, num_slots=4, max_slots=9)
    cache.take_over(theirs)
    assert cache.lengths == [3, 3]
    new = torch.randn(2, 1, 2, 4)
    for layer in range(2):
        cache.update(new, new, layer)
    assert theirs.get_seq_length() == 3  # an interrupted call leaves it as it was
    cache.keep([[1], [1]])
    for given_cache in (theirs, DynamicCache()):  # one that is filled, one that has no layers yet
        cache.hand_over(given_cache)
        assert given_cache.get_seq_length() == 4
        for layer, mine in zip(given_cache.layers, cache.layers, strict=True):
            assert torch.equal(layer.keys, torch.cat([keys, new[:, :, 1:]], dim=2))
            assert layer.keys.data_ptr() == mine.keys.data_ptr()
