"""A forward by a job gives a token the same bits, whatever runs beside it and whatever is hidden.

The reference is a text that is run one token at a time. It is run again by pieces of a prompt, by
trees in which other tokens stand between its own, in forwards of several calls, and after a kept
prefix.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade.compat import CACHE
from lade.forward.job import FusedForwards, forwards_for
from lade.forward.reading import read
from lade.forward.workers import run_job
from lade.models.gguf import load_gguf
from lade.targets.joint import JointCache
from lade.targets.kv_cache import TreeCache
from lade.targets.layout import tree_layout
from lade.targets.parts import Calls, with_calls
from tests.grids import thinned, thinned_rows
from tests.lade.forward.families import adapted, model_of, widened
from tests.lade.forward.lanes import kernels_with
from tests.lade.forward.test_job import SERVED
from tests.lade.models.gguf_files import write

WAYS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUICK = "llama", "gemma2", "starcoder2"
HOWS = "piece", "tree", "parts", "kept"
# Wide enough for what is rounded to 16 bits to show in which order it was summed.
MIDDLE: dict[str, Any] = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 32}
MIDDLE |= {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 4, "vocab_size": 997}
NAN = float("nan")
LENGTH = 150  # more than two blocks of keys, and than a piece of a prompt


def force(name: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Run every forward by a job, and fail where none can; return the dtype of weights."""

    def choose(self: Any, request: Any, _: Any, cache: Any) -> Any:
        logits = self._by_job(request)
        assert logits is not None
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})

    monkeypatch.setattr(FusedForwards, "settle", lambda *_: None)
    monkeypatch.setattr(FusedForwards, "_choose", choose)
    return WAYS[name]


@pytest.fixture(params=thinned(WAYS, "bfloat16"))
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Run every forward of a test by jobs, with weights of a dtype."""
    return force(request.param, monkeypatch)


in_all = pytest.mark.parametrize("dtype", WAYS, indirect=True)  # else in one, if not exhaustive


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Nodes(NamedTuple):
    """Tokens after those of a cache; some of them continue the text."""

    token_ids: list[int]
    depths: list[int]
    ancestors: Tensor  # bool [num_nodes, num_nodes]
    path: list[int]


class Texts:
    """A text, the bits that its tokens have one by one, and ways to run it otherwise."""

    def __init__(self, model: Any, forwards: FusedForwards | None = None) -> None:
        model = widened(model)
        made = forwards or forwards_for(model)
        assert made is not None
        self._config = model.config
        layout = tree_layout(model)
        self._kinds, counts = layout.kinds, read(model).counts  # which makes one text of a part
        self._is_chain = layout.max_candidates == 1 or counts
        windowed = [kind.window for kind in self._kinds if kind.kind == "windowed"]
        self._window = next(iter(windowed), None)
        self._names = made._kinds
        self._view, self._num_ids = made.view(model), model.get_input_embeddings().num_embeddings
        rng = random.Random(0)
        self._ids = [rng.randrange(self._num_ids) for _ in range(LENGTH)]
        self.cache = self._filled()
        self.logits = list[Tensor]()  # of all but the first token
        for token_id in self._ids[1:]:
            alone = Nodes([token_id], [0], torch.ones(1, 1, dtype=torch.bool), [0])
            self.logits += self._run_nodes(self.cache, alone)
            self.cache.keep([0])

    def differences(self, seed: int, hows: tuple[str, ...] = HOWS) -> list[str]:
        """Run the text in random steps; return where bits differ."""
        rng, cache, found = random.Random(seed), self._filled(), list[str]()
        while cache.length < LENGTH:
            how = hows[rng.randrange(len(hows))]
            if how == "kept":
                cache = self._kept(cache)
                continue
            nodes = self._nodes(rng, cache.length, how == "piece")
            run = self._run_beside if how == "parts" else self._run_nodes
            got = run(cache, nodes, *[rng] * (how == "parts"))
            for node, position in zip(nodes.path, range(cache.length, LENGTH), strict=False):
                if not same_bits(got[node], self.logits[position - 1]):
                    num = len(nodes.depths)
                    found.append(f"{how} of {num}: logits of token {position}, node {node}")
            cache.keep(nodes.path)
        for layer, (mine, theirs) in enumerate(zip(cache.held, self.cache.held, strict=True)):
            names = ("keys", "recurrent_states") if hasattr(mine, "oldest") else mine.stored
            for name in names:
                pair = [getattr(each, name) for each in (mine, theirs)]
                if name == "recurrent_states":
                    pair = [each[0] for each in pair]
                num = min(each.shape[2] for each in pair)
                if not same_bits(*(each[:, :, each.shape[2] - num :] for each in pair)):
                    found.append(f"{name} of layer {layer}")
        return found

    def _nodes(self, rng: random.Random, start: int, is_piece: bool) -> Nodes:
        """Return a piece of the text, or a tree that has some of it."""
        left = LENGTH - start
        if is_piece:
            num = min(left, rng.choice((1, 2, 3, 5, 8, 17, 64, 129)))
            lower = torch.ones((num, num), dtype=torch.bool).tril()
            return Nodes(self._ids[start : start + num], [*range(num)], lower, [*range(num)])
        num = rng.choice((1, 2, 4, 9, 16, 33, 64))
        if self._is_chain:
            num_right = min(left, rng.randint(1, num))
            ids = self._ids[start : start + num_right]
            ids += [rng.randrange(self._num_ids) for _ in range(num - num_right)]
            lower = torch.ones((num, num), dtype=torch.bool).tril()
            return Nodes(ids, [*range(num)], lower, [*range(num_right)])
        path = [0, *sorted(rng.sample(range(1, num), min(left, rng.randint(1, num)) - 1))]
        ids, depths, ancestors = list[int](), list[int](), torch.eye(num, dtype=torch.bool)
        for node in range(num):
            depth = path.index(node) if node in path else None
            parent = rng.randrange(node) if depth is None else path[depth - 1] if depth else -1
            known = depth is not None
            ids.append(self._ids[start + (depth or 0)] if known else rng.randrange(self._num_ids))
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        return Nodes(ids, depths, ancestors, path)

    def _filled(self, num_tokens: int = 1, first: int | None = None) -> TreeCache:
        """Return a cache after some tokens, those of the text if no other first one is given."""
        cache = TreeCache(self._kinds, 64, 512)
        ids = self._ids[:num_tokens] if first is None else [first] * num_tokens
        self._run(cache, ids, [*range(num_tokens)], None)
        cache.keep_all()
        return cache

    def _kept(self, cache: TreeCache) -> TreeCache:
        """Return a cache that has taken over a text that was kept."""
        held = DynamicCache(config=self._config)  # layers with windows know what has left them
        cache.hand_over(held)
        other = TreeCache(self._kinds, 64, 512)
        other.take_over(held)
        other.keep_all()
        return other

    def _run_nodes(self, cache: TreeCache, nodes: Nodes) -> Tensor:
        positions = [cache.length + depth for depth in nodes.depths]
        return self._run(cache, nodes.token_ids, positions, self._masks(cache, nodes))

    def _run_beside(self, cache: TreeCache, nodes: Nodes, rng: random.Random) -> Tensor:
        """Run nodes between those of two other calls."""
        others = [(self._filled(num, 3), self._nodes(rng, 1, False)) for num in (5, 2)]
        parts = [others[0], (cache, nodes), others[1]]
        sizes = [len(each.depths) for _, each in parts]
        ids = [token_id for _, each in parts for token_id in each.token_ids]
        positions = [own.length + depth for own, each in parts for depth in each.depths]
        of_parts = [self._masks(own, each) for own, each in parts]
        empty = torch.ones((1, 1, len(ids), len(ids) + 1), dtype=torch.bool)
        masks = {
            name: with_calls(empty.clone(), Calls(sizes, [each[name] for each in of_parts]))
            for name in self._names
        }
        logits = self._run(JointCache([own for own, _ in parts], sizes), ids, positions, masks)
        return logits[sizes[0] : sizes[0] + sizes[1]]

    def _masks(self, cache: TreeCache, nodes: Nodes) -> dict[str, Tensor]:
        """Return what nodes see, by kind of layers, bool [1, 1, num_nodes, num_keys]."""
        masks, of_nodes = {}, torch.tensor(nodes.depths) + cache.length
        for name in self._names:
            has_window = "sliding" in name or all(kind.window for kind in self._kinds)
            window = self._window if has_window else None
            positions = torch.cat([torch.arange(cache.first_slot(window), cache.length), of_nodes])
            num_before = len(positions) - len(of_nodes)
            before = torch.ones((len(of_nodes), num_before), dtype=torch.bool)
            sees = torch.cat([before, nodes.ancestors], dim=1)
            if window is not None:
                sees &= positions > of_nodes[:, None] - window
            masks[name] = sees[None, None]
        return masks

    def _run(self, cache: Any, ids: list[int], positions: list[int], masks: Any) -> Tensor:
        given = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
        mask = masks if masks is None or len(masks) > 1 else next(iter(masks.values()))
        output = self._view(**given, attention_mask=mask, use_cache=True, **{CACHE: cache})
        logits: Tensor = output.logits[0]
        return logits


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    assert mine.dtype is theirs.dtype
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (mine, theirs)))


# --- the bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(SERVED, *QUICK))
def test_a_token_has_the_same_bits_in_any_forward(family: str, dtype: torch.dtype) -> None:
    texts = Texts(model_of(family, dtype))
    for seed in range(2):
        assert texts.differences(seed) == []


@in_all
def test_each_kind_of_forward_gives_the_same_bits(dtype: torch.dtype) -> None:
    texts = Texts(model_of("llama", dtype, **MIDDLE))
    for how in HOWS[:3]:
        assert texts.differences(0, (how,)) == []


@pytest.mark.parametrize("family", thinned(["llama", "qwen3_moe", "gemma4_text"], "qwen3_moe"))
def test_packed_weights_give_the_same_bits(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, "Q4_K", "Q6_K")
    assert Texts(load_gguf(tmp_path / "model.gguf")).differences(0) == []


SHAPES: list[dict[str, Any]] = [
    {"head_dim": 48, "num_key_value_heads": 1},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 128},
    {"intermediate_size": 100, "num_attention_heads": 5, "hidden_size": 80, "head_dim": 16}
    | {"num_key_value_heads": 5, "vocab_size": 131},
]


@pytest.mark.parametrize(
    ("options", "dtype"),
    thinned_rows(product(SHAPES, WAYS), *zip(SHAPES, WAYS, strict=True)),
    ids=str,
    indirect=["dtype"],
)
def test_rows_need_not_be_whole_vectors(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = model_of("llama", dtype, **options)
    texts = Texts(model)
    assert texts.differences(0) == []
    theirs = model.float()(torch.tensor([texts._ids])).logits[0, 1:]
    assert torch.allclose(torch.stack(texts.logits), theirs, atol=1e-4)


def test_low_rank_additions_have_the_same_bits(dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)
    adapted(model, dtype=torch.float32)
    assert Texts(model).differences(0) == []


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("opt", {"word_embed_proj_dim": 32}),  # a product before the layers
        ("xmod", {"languages": ["de_DE", "en_XX", "fr_XX"]}),  # products of no tokens
    ],
)
def test_a_product_for_some_layers_or_tokens_has_the_same_bits(
    family: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    assert Texts(model_of(family, dtype, **options)).differences(0) == []


def test_layers_with_hooks_have_the_same_bits(dtype: torch.dtype) -> None:
    model = model_of("gemma2", dtype)
    model.model.layers[1].register_forward_hook(lambda _, __, out: out * 1.5)
    assert Texts(model).differences(0) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_lanes", [8, 16])
def test_vectors_of_either_length_keep_the_order(
    num_lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this machine are one of the two."""
    kernels = kernels_with(num_lanes, tmp_path, monkeypatch)
    for name in WAYS:
        dtype = force(name, monkeypatch)
        for options in (MIDDLE, *SHAPES):
            model = widened(model_of("llama", dtype, **options))
            assert Texts(model, FusedForwards(model, kernels, run_job)).differences(0) == []
    whole = write(tmp_path, "llama", "Q4_0")  # digits are written in whole blocks
    packed = load_gguf(tmp_path / "model.gguf")
    texts = Texts(packed, FusedForwards(packed, kernels, run_job))
    assert texts.differences(0) == []
    theirs = whole(torch.tensor([texts._ids])).logits[0, 1:]
    assert torch.allclose(torch.stack(texts.logits), theirs, atol=1e-4)


# --- what is hidden ---------------------------------------------------------------------------


@in_all
@pytest.mark.parametrize("value", thinned([NAN, float("inf")], NAN))
def test_what_is_hidden_adds_nothing_whatever_it_holds(value: float, dtype: torch.dtype) -> None:
    """Neither rejected siblings, nor what follows in the same piece; what is seen counts."""
    model = model_of("llama", dtype)
    texts = Texts(model)
    texts._ids = [*range(10, 20)]
    embedding: nn.Embedding = model.get_input_embeddings()
    embedding.weight[7] = value
    siblings = Nodes([5, 7, 6, 7, 8], [0, 1, 1, 2, 2], torch.eye(5, dtype=torch.bool), [0, 2, 4])
    for node, parent in ((1, 0), (2, 0), (3, 2), (4, 2)):
        siblings.ancestors[node] |= siblings.ancestors[parent]
    cache = texts._filled(9)
    got = texts._run_nodes(cache, siblings)
    assert got.isnan().any(-1).tolist() == [False, True, False, True, False]
    cache.keep([])
    lower = torch.ones((4, 4), dtype=torch.bool).tril()
    path = texts._run_nodes(cache, Nodes([5, 6, 8, 7], [0, 1, 2, 3], lower, [0]))
    assert path.isnan().any(-1).tolist() == [False, False, False, True]
    assert same_bits(got[[0, 2, 4]], path[:3])
    whole = texts._run(texts._filled(1), [5, 6, 8, 7, 9], [1, 2, 3, 4, 5], None)
    assert whole.isnan().any(-1).tolist() == [False, False, False, True, True]
