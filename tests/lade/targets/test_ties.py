"""A watch finds where verifying drafts may choose other keys than plain decoding does."""

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from lade.compat import INDEXERS_TAKE_MASKS, attention_of
from lade.targets.ties import TieWatch, applies, num_chosen, ties_at_last_place
from tests.support.tiny import causal_lm_types, tiny_model

TYPES = [
    name
    for name in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
    if name in causal_lm_types()
]
NUM_CHOSEN = 64
PROMPT = torch.randint(2, 96, (1, 84), generator=torch.Generator().manual_seed(0))
PATH = [5, 17, 17, 60, 33]  # what is decoded behind the prompt
# The same as a tree: slots 1, 4 and 5 are of tokens beside the path.
NODES = [5, 80, 17, 17, 9, 44, 60, 33]
ON_PATH = [0, 2, 3, 6, 7]
PARENTS = [-1, 0, 0, 2, 2, 3, 3, 6]

takes_masks = pytest.mark.skipif(
    not INDEXERS_TAKE_MASKS, reason="indexers of this transformers do not see a tree's mask"
)


def model_with(num_heads: int, name: str = "deepseek_v32", **options: Any) -> Any:
    return tiny_model(name, **{"index_topk": NUM_CHOSEN, "index_n_heads": num_heads} | options)


@torch.no_grad()
def cache_of(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=PROMPT, past_key_values=cache)
    return cache


@torch.no_grad()
def one_by_one(model: Any) -> Tensor:
    """Return the logits behind each token of the path, as plain decoding computes them."""
    cache = cache_of(model)
    forwards = [model(input_ids=torch.tensor([[i]]), past_key_values=cache) for i in PATH]
    return torch.cat([forward.logits[0] for forward in forwards])


@torch.no_grad()
def as_tree(model: Any, cache: DynamicCache) -> Tensor:
    """Return the logits behind each token of the path, of one forward over the tree."""
    cached, size = PROMPT.shape[1], len(NODES)
    sees = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            sees[node] |= sees[parent]
    mask = torch.cat([torch.ones(size, cached, dtype=torch.bool), sees], dim=1)[None, None]
    windowed = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    positions = cached + sees.sum(-1) - 1
    near = positions[:, None] - torch.cat([torch.arange(cached), positions]) < 8
    of_window = (mask & near)[..., cached - 7 :]
    masks = {"indexed_attention": mask, "sliding_attention": of_window}
    if attention_of(model) == "eager":  # there, masks are added
        lowest = torch.finfo(model.dtype).min
        masks = {kind: (~seen).to(model.dtype) * lowest for kind, seen in masks.items()}
    logits: Tensor = model(
        input_ids=torch.tensor([NODES]),
        position_ids=positions[None],
        attention_mask=masks if windowed else masks["indexed_attention"],
        past_key_values=cache,
    ).logits
    return logits[0, ON_PATH]


# --- what is a tie -------------------------------------------------------------------------------

INF = float("inf")
LEAST = torch.finfo(torch.float64).min


@pytest.mark.parametrize(
    ("scores", "is_tied"),
    [
        ([9.0, 5.0, 3.0, 1.0], False),
        ([9.0, 0.0, 0.0, -1.0], True),
        ([9.0, 0.0, 0.0, 0.0], True),
        ([0.0, 0.0, 0.0, 0.0], True),
        ([9.0, 5.0, 5.0 - 1e-7, 1.0], True),  # rounding may turn these round
        ([9.0, 5.0, 5.0 - 1e-3, 1.0], False),
        ([1e-7, 5e-8, 3e-8, 0.0], False),  # small, and far apart
        ([0.0, 5e-8, -1e-7, -9.0], True),  # near by what rounding does to the size of -9
        ([5.0, 5.0, 1.0, 1.0], False),  # among the chosen, and among the others
        ([9.0, 5.0, -INF, -INF], False),  # no other may be seen
        ([9.0, -INF, -INF, -INF], False),  # whatever else is chosen stays masked
        ([9.0, LEAST, LEAST, LEAST], False),  # so it does where masks are added
        ([9.0, 5.0, 5.0, -INF], True),
        ([9.0, 5.0, 5.0, LEAST], True),
    ],
)
def test_a_tie_is_one_at_the_last_place_among_keys_that_are_seen(
    scores: list[float], is_tied: bool
) -> None:
    row = torch.tensor([scores, [9.0, 5.0, 3.0, 1.0]], dtype=torch.float64)
    ties = ties_at_last_place(row, row.topk(2).values, 1e-5)
    assert ties.tolist() == [is_tied, False]


def test_who_chooses_all_keys_has_no_tie() -> None:
    scores = torch.zeros(1, 3, 4)
    assert not ties_at_last_place(scores, scores, 1e-5).any()


# --- what the watch sees -------------------------------------------------------------------------


@takes_masks
@pytest.mark.parametrize("name", TYPES)
def test_nodes_before_the_first_tie_are_as_plain_decoding_has_them(name: str) -> None:
    num_exact = num_other = 0
    for seed in range(3):
        model = model_with(2, name, seed=seed)
        cache, watch = cache_of(model), TieWatch(model)
        with watch:
            logits = as_tree(model, cache)
        assert watch.tied is not None
        assert watch.tied.shape == (1, len(NODES))
        tied = watch.tied[0, ON_PATH].tolist()
        num_clean = [*tied, True].index(True)
        differ = (logits - one_by_one(model)).abs().amax(-1) > 1e-4
        assert not differ[:num_clean].any(), (seed, tied)
        num_exact += num_clean
        num_other += int(differ.sum())
    # Neither of them alone would tell anything.
    assert num_exact > 0
    assert num_other > 0


@takes_masks
@pytest.mark.parametrize("name", TYPES)
def test_many_heads_have_no_tie(name: str) -> None:
    model = model_with(16, name, seed=1)
    cache, watch = cache_of(model), TieWatch(model)
    with watch:
        logits = as_tree(model, cache)
    assert not watch.found
    assert (logits - one_by_one(model)).abs().max() < 1e-4


def test_routers_of_experts_are_not_looked_at() -> None:
    model = model_with(2, index_topk=200)  # more than there are keys
    chosen: list[tuple[int, ...]] = []

    class Spy(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is torch.topk:
                chosen.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    for parameter_name, parameter in model.named_parameters():
        if ".gate." in parameter_name:
            parameter.data.zero_()  # all experts tie
    cache, watch = cache_of(model), TieWatch(model)
    with Spy(), watch:
        as_tree(model, cache)
    assert any(shape[-1] == model.config.n_routed_experts for shape in chosen)
    assert not watch.found


def test_a_watch_forgets_the_forward_before() -> None:
    model = model_with(2, seed=1)
    cache, watch = cache_of(model), TieWatch(model)
    with watch:
        as_tree(model, cache)
    was_found = watch.found
    with watch, torch.no_grad():
        model(input_ids=PROMPT[:, :20])
    assert was_found
    assert not watch.found
    assert watch.tied is not None
    assert watch.tied.shape == (1, 20)


def test_what_it_cannot_see_counts_as_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(16)
    watch = TieWatch(model)
    with watch:
        pass  # a recorded forward runs no module
    assert watch.tied is None
    assert watch.found
    indexer = model.model.layers[1].self_attn.indexer

    def fused(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)

    monkeypatch.setattr(indexer, "forward", fused)
    with watch, torch.no_grad():
        model(input_ids=PROMPT[:, :20])
    assert watch.tied is None
    assert watch.found


def test_other_threads_are_not_watched() -> None:
    model = model_with(2)
    cache, watch = cache_of(model), TieWatch(model)
    with watch:
        other = Thread(target=as_tree, args=(model, cache))
        other.start()
        other.join()
        with torch.no_grad():
            model(input_ids=PROMPT[:, :20])
    assert not watch.found


def test_watches_may_be_nested() -> None:
    model = model_with(2)
    cache, outer, inner = cache_of(model), TieWatch(model), TieWatch(model)
    with outer, inner:
        as_tree(model, cache)
    assert outer.tied is not None
    assert inner.tied is not None
    assert torch.equal(outer.tied, inner.tied)


def test_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(2)
    cache, watch = cache_of(model), TieWatch(model)
    indexer = model.model.layers[0].self_attn.indexer

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(indexer, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"), watch:
        as_tree(model, cache)
    assert watch.found  # nobody is to trust what is left of it
    assert not indexer._forward_hooks
    assert not indexer._forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0


# --- when it is needed ---------------------------------------------------------------------------


def test_models_that_choose_keys_are_watched_where_text_is_exact() -> None:
    model = model_with(16)
    assert num_chosen(model) == NUM_CHOSEN
    assert applies(model)
    assert applies(model.float())
    assert not applies(model.bfloat16())
    other = tiny_model("llama")
    assert num_chosen(other) is None
    assert not applies(other)
