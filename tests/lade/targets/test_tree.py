"""Tree, mask, cache and target: a node sees its own path and nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import lade
from lade.attention.masks import FULL, Reach, TreeSlots
from lade.attention.packed import PACKED_ROWS, PACKED_SDPA
from lade.compat import MARKS_CACHES
from lade.drafting.drafts import draft_of
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import LayerKind
from lade.targets.layout import may_share_a_row, tree_layout
from lade.targets.trees import TreeTarget
from lade.tree import ROOT, Packing, Tree, TreeBatch, at_nodes, of_trees, origins
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.tiny import IS_NEWEST, VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")


def make_draft(parents: list[int], seed: int = 0) -> Draft:
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    for parent in parents:
        siblings = {t for t, p in zip(token_ids, parents, strict=False) if p == parent}
        token_ids.append(int(rng.choice([t for t in range(VOCAB_SIZE) if t not in siblings])))
    return draft_of(token_ids, parents, np.linspace(0.9, 0.1, len(parents)))


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


def test_trees_of_different_sizes_lie_one_after_the_other_in_one_row() -> None:
    trees = [Tree.build(7, make_draft([])), Tree.build(8, make_draft([-1, 0]))]
    packing = Packing.of([*map(len, trees)], CPU)
    assert packing.shape == (2, 3)
    padded = torch.tensor([[7, 0, 0], [8, 4, 5]])
    assert packing.pack(padded).tolist() == [[7, 8, 4, 5]]
    assert packing.pack(torch.stack([padded, -padded])).shape == (2, 1, 4)  # axes, rows, nodes
    assert packing.pad(torch.tensor([7, 8, 4, 5])).tolist() == [[7, 7, 7], [8, 4, 5]]
    assert (packing.rows.tolist(), packing.nodes.tolist()) == ([0, 1, 1, 1], [0, 0, 1, 2])


def test_nodes_are_found_in_a_forward_with_padding_and_in_one_without() -> None:
    trees = [Tree.build(7, make_draft([])), Tree.build(8, make_draft([-1, 0]))]
    packed = torch.tensor([[70, 80, 81, 82]])
    padded = torch.tensor([[70, -1, -1, -2], [80, 81, 82, -2]])  # with a fourth node beside them
    assert origins(trees, 1) == [(0, 0), (0, 1)]
    assert origins(trees, 2) == [(0, 0), (1, 0)]
    assert of_trees(packed, trees).tolist() == packed.tolist()
    assert of_trees(padded, trees).tolist() == [[70, -1, -1], [80, 81, 82]]
    for output in (packed, padded):
        assert at_nodes(output, trees, [0, 2]).tolist() == [70, 82]


def tree_slots(visible: Tensor, num_cached: Tensor, trees: TreeBatch, *more: Any) -> TreeSlots:
    """With room for the nodes behind what is visible."""
    visible = torch.nn.functional.pad(visible, (0, trees.width))
    return TreeSlots(visible, num_cached, trees.ancestors, trees.depths, *more)


def test_additive_mask_hides_with_the_lowest_finite_value() -> None:
    visible, num_cached = torch.tensor([[False, True]]), torch.tensor([2])
    trees = TreeBatch.stack([Tree.build(1, make_draft([-1]))], CPU)
    slots = tree_slots(visible, num_cached, trees)
    assert slots.mask(FULL, 0, None).int().tolist() == [[[[0, 1, 1, 0], [0, 1, 1, 1]]]]
    low = torch.finfo(torch.float16).min
    assert slots.mask(FULL, 0, torch.float16).tolist() == [[[[low, 0, 0, low], [low, 0, 0, 0]]]]


def test_nodes_of_a_ragged_batch_lie_behind_their_own_row() -> None:
    visible = torch.tensor([[True, True, True], [True, False, False]])
    tree = Tree.build(1, make_draft([-1]))
    trees = TreeBatch.stack([tree, tree], CPU)
    slots = tree_slots(visible, torch.tensor([3, 1]), trees)
    assert slots.mask(FULL, 0, None).int().tolist() == [
        [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]],
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]],  # not [1, 0, 0, 1, 0]: slots follow the row's own
    ]


def test_windows_and_chunks_reach_as_far_as_the_token_would_in_plain_decoding() -> None:
    """Two branches of depth 2 behind five slots: what matters is a node's depth, not its slot."""
    trees = TreeBatch.stack([Tree.build(1, make_draft([-1, -1, 0, 1]))], CPU)
    visible = torch.ones((1, 5), dtype=torch.bool)
    slots = tree_slots(visible, torch.tensor([5]), trees)
    expected_window = [
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 0],  # the root, at 5, sees 3, 4 and itself
        [0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 0, 1],
    ]
    assert slots.mask(Reach(window=3), 0, None)[0, 0].int().tolist() == expected_window
    assert slots.mask(Reach(window=3), 3, None)[0, 0].int().tolist() == [
        row[3:] for row in expected_window
    ]
    expected_chunk = [
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 0],  # 3, 4 and 5 are a chunk, 6 begins the next
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 1],
    ]
    assert slots.mask(Reach(chunk=3), 0, None)[0, 0].int().tolist() == expected_chunk
    # One slot of padding in front moves the chunks.
    padded = tree_slots(visible, torch.tensor([5]), trees, torch.tensor([1]))
    assert padded.mask(Reach(chunk=3), 0, None)[0, 0, 0].int().tolist() == [
        *[0, 0, 0, 0, 1, 1],
        *[0, 0, 0, 0],
    ]


FAMILIES = ["llama", "gpt2", "deepseek_v3", "mistral", "gemma3_text", "llama4_text"]
QUICK = ("llama", "gemma3_text")


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], "sdpa"))
@pytest.mark.parametrize("family", thinned(FAMILIES, *QUICK))
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
    target = TreeTarget(model, torch.tensor([prompt]), {"use_cache": True}, tree_layout(model), 40)
    target.prefill()
    tree = Tree.build(8, draft)
    logits = target.forward(target.inputs([tree])).logits[0]
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
            # A layer with a window may hold more than it needs, or less than there was.
            first, last = len(committed) - expected.shape[2], len(committed)
            held = got[row : row + 1, :, first - mine.offset : last - mine.offset]
            torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager", PACKED_ROWS], "sdpa", PACKED_ROWS))
@pytest.mark.parametrize("family", thinned(FAMILIES, *QUICK))
def test_rows_of_a_batch_are_each_as_alone_step_after_step(family: str, attention: str) -> None:
    packs = attention == PACKED_ROWS
    model = tiny_model(family, seed=4, attention="sdpa" if packs else attention)
    if packs and lade.probe(model, num_rows=2).attention != PACKED_ROWS:
        pytest.skip("the check rules it out for this model")
    shares_rows = packs and may_share_a_row(model, tree_layout(model))
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
        target = TreeTarget(
            model,
            torch.tensor(prompts),
            {"use_cache": True},
            tree_layout(model),
            60,
            attention=attention if packs else None,
        )
        target.prefill()
        committed = [list(prompt) for prompt in prompts]
        for number, step in enumerate(steps):
            if number == 1:
                keep = [row for row in range(3) if row != dropped]
                target.select(keep)
                committed = [committed[row] for row in keep]
            drafts = [make_draft(parents, number) for parents, _ in step[: len(committed)]]
            trees = [Tree.build(8 + number, draft) for draft in drafts]
            logits = target.forward(target.inputs(trees)).logits
            if shares_rows and len({*map(len, trees)}) > 1:
                assert logits.shape[:2] == (1, sum(map(len, trees)))
            leaves = [step[row][1] % len(tree) for row, tree in enumerate(trees)]
            at_leaves = at_nodes(logits, trees, leaves)
            kept = []
            for row, (draft, tree) in enumerate(zip(drafts, trees, strict=True)):
                path = path_to(draft, leaves[row])
                ids = [*committed[row], *[tree.token_ids[node] for node in path]]
                alone = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(at_leaves[row], alone, rtol=1e-5, atol=1e-5)
                kept.append(path)
                committed[row] = ids
            target.commit(kept)
            assert target.num_cached == [len(ids) for ids in committed]
        everyone = [list(range(3)) if len(steps) == 1 else keep][0]
        target.rejoin()
        for row, ids in zip(everyone, committed, strict=True):
            check_cache(model, target, row, ids)

    check()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_prompts_run_without_their_padding_and_their_keys_lie_where_they_would(family: str) -> None:
    model = tiny_model(family, seed=4, attention="sdpa")
    long = [7, 7, 3, 2, 8, 5, 0, 0, 4, 1, 2]
    ids = torch.tensor([[0] * 9 + [5, 9], long, [0] * 5 + [3] * 6, long])
    mask = (ids > 0).long()
    model_kwargs = {
        "use_cache": True,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    outputs, targets, widths = [], [], []
    handle = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: widths.append([*args[0].shape])
    )
    for attention in (PACKED_SDPA, PACKED_ROWS):
        target = TreeTarget(model, ids, model_kwargs, tree_layout(model), 20, attention=attention)
        with torch.no_grad():
            outputs.append(target.prefill().logits[:, -1])
        targets.append(target)
    handle.remove()
    is_uniform = MARKS_CACHES and all(kind.kind == "full" for kind in tree_layout(model).kinds)
    assert widths == [[4, 11], [1, 17] if is_uniform else [4, 11]]  # one of them once
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    padded, packed = targets
    assert packed.num_cached == padded.num_cached == [11] * 4
    for mine, theirs in zip(packed.cache.layers, padded.cache.layers, strict=True):
        for got, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert got.shape == expected.shape
            is_real = mask.bool()[:, None, -got.shape[2] :, None]
            torch.testing.assert_close(got * is_real, expected * is_real, rtol=1e-5, atol=1e-5)
            assert not is_uniform or not (got * ~is_real).any()


@pytest.mark.parametrize(
    ("family", "may"),
    [
        ("llama", True),
        ("mistral", True),
        pytest.param("deepseek_v32", False, marks=pytest.mark.exhaustive),
        ("llama4_text", False),
    ],
)
def test_rows_have_their_own_where_slots_matter_or_keys_are_chosen(family: str, may: bool) -> None:
    if family == "deepseek_v32" and not IS_NEWEST:
        pytest.skip("this version's sparse attention takes no trees")
    model = tiny_model(family)
    assert may_share_a_row(model, tree_layout(model)) == may


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],  # `generate` goes on from the padding
        [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],  # hardly worth it
    ],
)
def test_other_prompts_run_as_they_are(mask: list[list[int]]) -> None:
    model = tiny_model("llama", seed=4)
    ids = torch.arange(2, 14).view(2, 6)
    target = TreeTarget(
        model,
        ids,
        {"use_cache": True, "attention_mask": torch.tensor(mask)},
        tree_layout(model),
        20,
        attention=PACKED_ROWS,
    )
    assert target.prefill().logits.shape[0] == 2
    assert target._packed_prefill(model) is None


def test_cache_grows_past_its_first_slots_and_keeps_what_it_holds() -> None:
    cache = TreeCache([LayerKind("full")] * 2, num_slots=0, max_slots=400)
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
    cache = TreeCache([LayerKind("full")] * 1, num_slots=1000, max_slots=1500)

    def num_slots() -> int:
        return int(cache.layers[0]._key_place[0].buffer.shape[3])

    cache.update(torch.zeros(1, 1, 1000, 2), torch.zeros(1, 1, 1000, 2), 0)
    assert num_slots() == 1256
    # The last one is more than was planned, and then more may come.
    for expected in (1256, 1256, 1500, 1500, 1500, 1875):
        cache.update(torch.zeros(1, 1, 100, 2), torch.zeros(1, 1, 100, 2), 0)
        assert num_slots() == expected
    short = TreeCache([LayerKind("full")] * 1, num_slots=10, max_slots=20)
    short.update(torch.zeros(1, 1, 10, 2), torch.zeros(1, 1, 10, 2), 0)
    assert short.layers[0]._key_place[0].buffer.shape[3] == 20


def test_layers_on_several_devices_have_stores_of_their_own() -> None:
    cache = TreeCache([LayerKind("full")] * 2, num_slots=4, max_slots=9, share=False)
    for layer in range(2):
        cache.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), layer)
        assert cache.layers[layer]._key_place[0].buffer.shape[0] == 1
    cache.keep([[1]])
    assert cache.get_seq_length() == 1


def test_layers_of_unlike_shapes_each_find_a_place() -> None:
    cache = TreeCache([LayerKind("full")] * 3, num_slots=4, max_slots=9)
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
    cache = TreeCache([LayerKind("full")] * 1, num_slots=8, max_slots=9)
    keys = torch.randn(1, 1, 6, 4)
    cache.update(keys, keys, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", None)
        cache.keep([[0, 1, 2, 3, 4]])
    assert torch.equal(cache.layers[0].keys, keys[:, :, :5])


def test_a_ragged_cache_grows_and_holds_nothing_that_was_never_written() -> None:
    """Hidden slots are multiplied by 0, and 0 times NaN is NaN."""
    cache = TreeCache([LayerKind("full")] * 1, num_slots=4, max_slots=600)
    cache.update(torch.ones(2, 1, 4, 1), torch.ones(2, 1, 4, 1), 0)
    cache.keep([[0], [0, 1, 2, 3]])
    for _ in range(3):
        new = torch.full((2, 1, 150, 1), 2.0)
        keys, _ = cache.update(new, new, 0)
        assert bool(keys.isfinite().all())
    assert keys[0, 0, :, 0].tolist() == [1] + [2] * 450 + [0] * 3
    assert keys[1, 0, :, 0].tolist() == [1] * 4 + [2] * 450


def test_rows_are_left_out_in_place_and_come_back() -> None:
    cache = TreeCache([LayerKind("full")] * 2, num_slots=4, max_slots=9)
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
    cache = TreeCache([LayerKind("full")] * 2, num_slots=4, max_slots=9)
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


def test_a_layer_with_a_window_holds_little_more_than_its_window() -> None:
    """The whole text goes by; what a query can still see is there, under its own slot."""
    kinds = [LayerKind("windowed", 8), LayerKind("full"), LayerKind("windowed", 8)]
    cache = TreeCache(kinds, num_slots=50, max_slots=400)
    text = torch.randn(1, 1, 50, 4)
    for chunk in (text[:, :, :30], text[:, :, 30:33], text[:, :, 33:]):
        for layer in range(3):
            length, offset = cache.layers[layer].get_mask_sizes(chunk.shape[2])
            keys, _ = cache.update(chunk, chunk, layer)
            seen = cache.get_seq_length() if layer == 2 else cache.layers[layer].get_seq_length()
            assert keys.shape[2] == length
            assert torch.equal(keys, text[:, :, offset:seen])
    cache.keep_all()
    assert cache.lengths == [50]
    for step in range(60):
        new = torch.randn(1, 1, 5, 4)
        kept = [[0, 1, 2, 3, 4], [0, 2, 4], [0]][step % 3]
        for layer in range(3):
            length, offset = cache.layers[layer].get_mask_sizes(5)
            keys, _ = cache.update(new, new, layer)
            assert keys.shape[2] == length
            expected = torch.cat([text, new], dim=2)[:, :, offset:]
            assert torch.equal(keys, expected)
        cache.keep([kept])
        text = torch.cat([text, new[:, :, kept]], dim=2)
        assert cache.layers[0].offset <= text.shape[2] - 7  # what the window needs is there
        assert text.shape[2] - cache.layers[0].offset <= 7 + 8 + 5
    windowed, whole = cache.layers[2], cache.layers[1]
    assert torch.equal(windowed.keys, text[:, :, windowed.offset :])
    assert torch.equal(whole.keys, text)


def test_a_windowed_cache_is_taken_over_and_handed_over_as_it_is() -> None:
    config = tiny_model("mistral").config
    for length in (3, 20):
        theirs = DynamicCache(config=config)
        keys = torch.randn(2, 1, length, 4)
        for layer in range(3):
            theirs.update(keys, -keys, layer)
        cache = TreeCache([LayerKind("windowed", 8)] * 3, num_slots=length + 4, max_slots=60)
        cache.take_over(theirs)
        new = torch.randn(2, 1, 4, 4)
        for layer in range(3):
            mine, _ = cache.update(new, new, layer)
            # What `update` returns is what transformers' own would: a window less one, and the new.
            assert torch.equal(mine, torch.cat([theirs.layers[layer].keys, new], dim=2))
        cache.keep_all()
        assert cache.lengths == [length + 4] * 2
        cache.hand_over(theirs)
        text = torch.cat([keys, new], dim=2)
        assert theirs.get_seq_length() == length + 4
        for layer in theirs.layers:
            assert torch.equal(layer.keys, text[:, :, -7:])
        plain_keys, _ = theirs.update(new, new, 0)  # and they go on from there
        assert torch.equal(plain_keys, torch.cat([text[:, :, -7:], new], dim=2))


def test_indexer_keys_go_where_the_keys_go() -> None:
    cache = TreeCache([LayerKind("indexed")] * 2, num_slots=4, max_slots=90)
    keys, index = torch.randn(2, 1, 4, 4), torch.randn(2, 4, 3)
    for layer in range(2):
        assert torch.equal(cache.update_indexer(index, layer), index)
        cache.update(keys, -keys, layer)
    cache.keep_all()
    new, new_index = torch.randn(2, 1, 3, 4), torch.randn(2, 3, 3)
    for layer in range(2):
        cache.update(new, new, layer)
        got = cache.update_indexer(new_index, layer)
        assert torch.equal(got, torch.cat([index, new_index], dim=1))
    cache.keep([[0, 2], [1, 2]])
    held = cache.layers[1].indexer_keys
    assert torch.equal(held[0], torch.cat([index[0], new_index[0, [0, 2]]]))
    assert torch.equal(held[1], torch.cat([index[1], new_index[1, [1, 2]]]))
