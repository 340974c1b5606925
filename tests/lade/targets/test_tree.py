"""Tree, mask, cache and target: a node sees its own path and nothing else.

What the numbers of a forward are, and what a cache holds, no text shows: hence the private names.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import lade
from lade.drafting.drafts import draft_of
from lade.probing.profile import profile_of
from lade.probing.proof import DISTANCE, Distances
from lade.targets.kv_cache import LayerKind, TreeCache
from lade.targets.layout import tree_layout
from lade.targets.masks import AttentionSpan, tree_mask
from lade.targets.trees import TreeTarget
from lade.tree import ROOT, Tree, TreeTensors
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import EIGHT, THREE, same_as_generate
from tests.lade.tiny import VOCAB_SIZE, tiny_model

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


def test_windows_and_chunks_reach_as_far_as_the_token_would_in_plain_decoding() -> None:
    """Two branches of depth 2 behind five slots: what matters is a node's depth, not its slot."""
    tree = TreeTensors.of(Tree.build(1, make_draft([-1, -1, 0, 1])), CPU)
    expected_window = [
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 0],  # the root, at 5, sees 3, 4 and itself
        [0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 0, 1],
    ]
    window, chunk = AttentionSpan(window=3), AttentionSpan(chunk=3)
    assert tree_mask(tree, 5, 10, window)[0, 0].int().tolist() == expected_window
    expected_chunk = [
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 0],  # 3, 4 and 5 are a chunk, 6 begins the next
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 1],
    ]
    assert tree_mask(tree, 5, 10, chunk)[0, 0].int().tolist() == expected_chunk
    # One slot of padding in front moves the chunks.
    padding = torch.tensor([[False, True, True]])
    padded = tree_mask(tree, 5, 10, chunk, padding)[0, 0, 0].int().tolist()
    assert padded == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]


FAMILIES = ["llama", "gpt2", "deepseek_v3", "mistral", "gemma3_text", "llama4_text"]
QUICK = ("llama", "gemma3_text")


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], "sdpa"))
@pytest.mark.parametrize("family", thinned(FAMILIES, *QUICK))
def test_a_node_has_the_logits_of_its_path_and_a_commit_leaves_a_fresh_cache(
    family: str, attention: str
) -> None:
    model = tiny_model(family, seed=2, attention=attention)

    @settings(max_examples=15, deadline=None)
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
    logits = target.forward(target.inputs([tree]))[0]
    for node in range(len(tree)):
        path = [tree.token_ids[i] for i in path_to(draft, node)]
        alone = model(torch.tensor([prompt + path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, rtol=1e-5, atol=1e-5)
    kept = path_to(draft, leaf)
    target.commit([kept])
    committed = prompt + [tree.token_ids[i] for i in kept]
    assert target.cache.length == len(committed)
    check_cache(model, target, committed)


@torch.no_grad()
def test_states_are_recorded_once_by_whichever_view_runs() -> None:
    """Transformers hooks a model, or a view, at its first forward that collects states."""
    model, ids = tiny_model("llama"), torch.tensor([[5, 9, 11]])
    target = TreeTarget(model, ids, {}, tree_layout(model), 9, attention="eager")
    take = target.record({"output_hidden_states": True})
    target.prefill()
    roots = [Tree.build(8, Draft.empty())]
    target.forward(target.inputs(roots))
    target.commit([[ROOT]])
    target.forward_roots(roots)
    target.commit([[ROOT]])
    output = take(5)
    text = model(torch.tensor([[5, 9, 11, 8, 8]]), output_hidden_states=True)
    for got, expected in zip(output.hidden_states, text.hidden_states, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def check_cache(model: Any, target: TreeTarget, committed: list[int]) -> None:
    """The cache is what a fresh forward over its committed tokens leaves."""
    fresh = DynamicCache(config=model.config)
    model(torch.tensor([committed]), past_key_values=fresh)
    for mine, theirs in zip(target.cache.layers, fresh.layers, strict=True):
        for got, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            # A layer with a window may hold more than it needs, or less than there was.
            first, last = len(committed) - expected.shape[2], len(committed)
            held = got[:, :, first - mine.offset : last - mine.offset]
            torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


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
    assert cache.length == 50
    for step in range(60):
        new = torch.randn(1, 1, 5, 4)
        kept = [[0, 1, 2, 3, 4], [0, 2, 4], [0]][step % 3]
        for layer in range(3):
            length, offset = cache.layers[layer].get_mask_sizes(5)
            keys, _ = cache.update(new, new, layer)
            assert keys.shape[2] == length
            expected = torch.cat([text, new], dim=2)[:, :, offset:]
            assert torch.equal(keys, expected)
        cache.keep(kept)
        text = torch.cat([text, new[:, :, kept]], dim=2)
        assert cache.layers[0].offset <= text.shape[2] - 7  # what the window needs is there
        assert text.shape[2] - cache.layers[0].offset <= 7 + 8 + 5
    windowed, whole = cache.layers[2], cache.layers[1]
    assert torch.equal(windowed.keys, text[:, :, windowed.offset :])
    assert torch.equal(whole.keys, text)


@pytest.mark.parametrize("family", thinned(["llama", "mistral"], "mistral"))
def test_rows_are_proved_as_parts(family: str) -> None:
    model = tiny_model(family)
    distances = profile_of(model).proofs["tree"] = Distances()
    call: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "config": EIGHT}
    same_as_generate(model, THREE, accept=0.8, **call)
    assert 0 < distances.num_left <= DISTANCE

    def change(step: lade.Step) -> None:
        with torch.no_grad():
            model.lm_head.weight += torch.randn_like(model.lm_head.weight)

    distances.num_left = 0
    with pytest.warns(lade.VerificationWarning, match="logits for a draft differ"):
        answer = lade.generate(model, THREE, on_step=change, pad_token_id=0, **call)
    assert answer.shape == (3, THREE.shape[1] + 24)


def test_of_calls_side_by_side_one_proves_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, alone = tiny_model("llama"), TreeTarget.forward_roots, set[int]()

    def noting(self: TreeTarget, roots: Any) -> Tensor:
        alone.add(id(self))
        return run(self, roots)

    profile_of(model).proofs["tree"] = Distances()
    call: dict[str, Any] = {"max_new_tokens": 48, "eos_token_id": None, "config": EIGHT}
    lade.generate(model, THREE[:1], **call)  # what the first call checks is no proof
    profile_of(model).proofs["tree"] = Distances(8)
    monkeypatch.setattr(TreeTarget, "forward_roots", noting)
    with lade.Batcher(model) as batcher:
        calls = [batcher.submit(THREE[:1] + shift, **call) for shift in range(8)]
        assert {each.result().shape[1] for each in calls} == {THREE.shape[1] + 48}
    assert 1 <= len(alone) <= 3  # one, or those that took the place of one that ended


def test_indexer_keys_go_where_the_keys_go() -> None:
    cache = TreeCache([LayerKind("indexed")] * 2, num_slots=4, max_slots=90)
    keys, index = torch.randn(1, 1, 4, 4), torch.randn(1, 4, 3)
    for layer in range(2):
        assert torch.equal(cache.update_indexer(index, layer), index)
        cache.update(keys, -keys, layer)
    cache.keep_all()
    new, new_index = torch.randn(1, 1, 3, 4), torch.randn(1, 3, 3)
    for layer in range(2):
        cache.update(new, new, layer)
        got = cache.update_indexer(new_index, layer)
        assert torch.equal(got, torch.cat([index, new_index], dim=1))
    cache.keep([0, 2])
    held = cache.layers[1].indexer_keys
    assert torch.equal(held[0], torch.cat([index[0], new_index[0, [0, 2]]]))
