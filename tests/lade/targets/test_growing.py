"""Trees that are run a few nodes at a time, each on top of those before."""

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lade.compat import CACHE_NAMES
from lade.drafting.drafts import chain
from lade.targets.layout import tree_layout
from lade.targets.paths import ChainTarget
from lade.targets.trees import TreeTarget
from lade.tree import Tree
from tests.lade.targets.test_tree import check_cache, make_draft, path_to
from tests.lade.tiny import MAMBA2, tiny_model

PROMPT = [5, 9, 11, 5, 9]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_run_in_parts_gives_what_it_gives_at_once(family: str, attention: str) -> None:
    model = tiny_model(family, seed=2, attention=attention)
    target = TreeTarget(model, torch.tensor([PROMPT]), {"use_cache": True}, tree_layout(model), 60)
    target.prefill()
    committed, rng = [*PROMPT], np.random.default_rng(0)
    for step in range(4):  # the text grows past the window
        parents = [int(rng.integers(-1, i)) for i in range(9)]
        draft, logits = make_draft(parents, step), []
        for num_run, num in ((0, 1), (1, 2), (2, 6), (6, 10)):
            tree = Tree.build(8, draft.first(num - 1))
            logits += [*target.extend(tree, num_run).logits[0]]
        for node, got in enumerate(logits):
            path = [tree.token_ids[i] for i in path_to(draft, node)]
            alone = model(torch.tensor([committed + path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)
        kept = path_to(draft, int(rng.integers(10)))
        target.commit([kept])
        committed += [tree.token_ids[i] for i in kept]
        check_cache(model, target, 0, committed)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "restores"),
    [("llama", False), ("llama", True), ("bloom", False), ("gemma3_text", False), ("mamba2", True)],
)
@pytest.mark.parametrize("num_kept", [0, 1, 2, 4])
def test_a_chain_run_in_parts_goes_back_to_where_it_was_accepted(
    family: str, restores: bool, num_kept: int
) -> None:
    attention = "eager" if family in ("bloom", "mamba2") else "sdpa"
    options: dict[str, Any] = MAMBA2 if family == "mamba2" else {}
    model: Any = tiny_model(family, seed=2, attention=attention, **options)
    name = next(name for name in CACHE_NAMES if name in signature(model.forward).parameters)
    kwargs = {"use_cache": True, name: DynamicCache(config=model.config)}
    target = ChainTarget(model, torch.tensor([PROMPT]), kwargs, restores=restores)
    target.prefill()
    committed = [*PROMPT]
    for step in range(4):
        tokens = [8, 3 + step, 4, 7 + step]
        logits = []
        for num_run, num in ((0, 1), (1, 2), (2, 4)):
            tree = Tree.build(tokens[0], chain(tokens[1:num]))
            logits += [*target.extend(tree, num_run).logits[0]]
        assert len(logits) == 4
        for node, got in enumerate(logits):
            ids = torch.tensor([committed + tokens[: node + 1]])
            alone = model(ids, use_cache=False).logits[0, -1]
            torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)
        target.commit([[*range(num_kept)]])
        committed += tokens[:num_kept]
        assert target.num_cached == [len(committed)]
