"""Trees on transformers' static cache, by torch and compiled: the text is that of `generate`.

How often torch compiles, and what a cache holds, no text shows: hence the private names.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

import lade
from lade.compat import CACHE, start_compiler
from lade.probing.profile import profile_of
from lade.probing.proof import Distances
from lade.targets import static
from lade.targets.layout import tree_layout
from lade.targets.parts import TREE_SDPA
from lade.targets.static import StaticSteps, StaticTarget
from lade.tree import Tree
from tests.grids import thinned, thinned_rows
from tests.lade.both import ONE, THREE, answered, same_as_generate
from tests.lade.targets.test_tree import make_draft, path_to
from tests.lade.tiny import tiny_model
from tests.support.tiny import tiny_model as architecture

FAMILIES = [
    *("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4_text", "gemma2", "mistral"),
    *("phi3", "cohere2", "qwen3_moe", "olmo2", "gpt2", "glm4", "falcon"),
]
CONFIG = lade.Config(execution="static", max_draft_tokens=7)
LONG: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None}
PROMPT = torch.arange(5, 35)[None]

compiled: list[Any] = []  # graphs


def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Compile as "aot_eager" does, and note it."""
    compiled.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)


BY_BACKEND: dict[str, Any] = {"compile_config": CompileConfig(backend=counting, fullgraph=True)}
BY_TORCH: dict[str, Any] = {"disable_compile": True}
WAYS = {"by torch": BY_TORCH, "compiled": BY_BACKEND}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have memory for short texts, so that they outgrow it."""
    monkeypatch.setattr(static, "WIDTHS", (4, 16))
    monkeypatch.setattr(static, "LENGTHS", (32, 64, 128))
    compiled.clear()
    start_compiler()
    yield
    torch._dynamo.reset()


def model_of(family: str, **options: Any) -> Any:
    """Return a model of an architecture whose experts no host chooses."""
    model = architecture(family, dtype=torch.float32, **options)
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("batched_mm")
    return model


# --- the text of generate -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    thinned_rows(product(FAMILIES, WAYS), ("llama", "compiled"), ("gemma3_text", "by torch")),
)
def test_a_text_is_that_of_generate_by_one_graph_of_each_shape(family: str, name: str) -> None:
    """The prompt is longer than the first memory, the text than windows and the second memory."""
    model, way = model_of(family), WAYS[name]
    for _ in range(2):  # the second call finds everything compiled
        _, got = same_as_generate(model, PROMPT, accept=0.8, config=CONFIG, **LONG, **way)
        assert 0 < got.stats.num_accepted_tokens < got.stats.num_draft_tokens
    steps = profile_of(model).static_steps
    assert steps.why_not is None
    assert len(compiled) == len(steps.runs) <= 4
    assert bool(compiled) == (way is BY_BACKEND)
    assert {*steps.caches} == ({64, 128} if compiled else set())


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("name", thinned(WAYS))
def test_so_is_that_of_a_trained_model(name: str) -> None:
    loaded = lade.models.load(dtype="float32")
    ids = loaded.tokenizer("The cat sat on the mat. The cat", return_tensors="pt").input_ids
    same_as_generate(loaded.model, ids, config=CONFIG, **LONG, **WAYS[name])


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gemma3_text"))
@torch.no_grad()
def test_nodes_of_trees_of_any_width_have_the_logits_of_their_paths(family: str) -> None:
    model, prompt = model_of(family), [5, 9, 11, 5, 9]
    kwargs: dict[str, Any] = {"use_cache": True}
    target = StaticTarget(model, torch.tensor([prompt]), kwargs, tree_layout(model), 40, steps=None)
    target.prefill()
    committed, rng = [*prompt], np.random.default_rng(0)
    for num_nodes in (1, 3, 4, 5, 16, 17, 64, 2):
        draft = make_draft([int(rng.integers(-1, node)) for node in range(num_nodes - 1)])
        tree = Tree.build(8, draft)
        logits = target.forward(target.inputs([tree]))[0]
        assert len(logits) == num_nodes
        for node in {0, num_nodes // 2, num_nodes - 1}:
            path = [tree.token_ids[each] for each in path_to(draft, node)]
            alone = model(torch.tensor([committed + path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[node], alone, rtol=1e-4, atol=1e-4)
        kept = path_to(draft, num_nodes - 1)
        target.commit([kept])
        committed += [tree.token_ids[each] for each in kept]
    fresh, mine = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(torch.tensor([committed]), past_key_values=fresh)
    for got, expected in zip(target.hand_over(mine).layers, fresh.layers, strict=True):
        torch.testing.assert_close(got.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.values, expected.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_sampling_goes_through_it_as_through_any_target(acceptance: Any) -> None:
    model = model_of("llama")
    texts = []
    for execution in ("eager", "static"):
        config = lade.Config(acceptance=acceptance, execution=execution, max_draft_tokens=7)
        torch.manual_seed(3)
        options: dict[str, Any] = {"do_sample": True, "config": config, **LONG, **BY_TORCH}
        if acceptance == "exact":
            same_as_generate(model, PROMPT, accept=0.8, **options)
        texts.append(answered(model, PROMPT, **options).sequences.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", thinned(["llama", "mistral"], "mistral"))
def test_steps_are_proved_and_go_back(family: str) -> None:
    model = model_of(family)
    for num_left in (0, 1):
        distances = profile_of(model).proofs["tree"] = Distances(num_left)
        same_as_generate(model, PROMPT, accept=0.8, config=CONFIG, **LONG, **BY_TORCH)
        assert distances.num_proofs > 0


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "execution"), [("llama", None), ("mistral", "static")])
def test_a_static_cache_is_copied_and_filled(family: str, execution: Any) -> None:
    """Made by `generate`, by the caller, and with an earlier turn in it."""
    model = model_of(family)
    config = lade.Config(execution=execution, max_draft_tokens=7)
    call: dict[str, Any] = {"config": config, "accept": 0.8, **BY_TORCH, **LONG}
    earlier = torch.cat([PROMPT[:, :25] + 1, PROMPT], dim=1)

    def given(held: Tensor) -> dict[str, Any]:
        cache = StaticCache(config=model.config, max_cache_len=170)
        if held.numel():
            model(held, past_key_values=cache)
        return {CACHE: cache, "attention_mask": torch.ones_like(earlier[:, 25 - held.shape[1] :])}

    with torch.no_grad():
        same_as_generate(model, PROMPT, cache_implementation="static", **call)
        same_as_generate(model, PROMPT, fresh=lambda: given(earlier[:, :0]), **call)
        filled = given(earlier[:, :25])
        expected, got = same_as_generate(model, earlier, fresh=lambda: deepcopy(filled), **call)
        more: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        longer = [
            model.generate(torch.cat([each.sequences, PROMPT], 1), **{CACHE: each[CACHE]}, **more)
            for each in (expected, got)
        ]
    assert type(got[CACHE]) is StaticCache
    assert got.stats.num_accepted_tokens > 0
    assert longer[0].tolist() == longer[1].tolist()


# --- what is not compiled -------------------------------------------------------------------------


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no working C++ compiler found")


def wrong(graph: Any, inputs: Any) -> Any:
    return lambda *args: [each.neg() if each.is_floating_point() else each for each in graph(*args)]


@pytest.mark.parametrize(
    ("backend", "why"), [(broken, "no working C\\+\\+ compiler"), (wrong, "step differs from")]
)
def test_what_does_not_compile_runs_by_torch_and_is_said_once(backend: Any, why: str) -> None:
    model = model_of("llama")
    way = {"compile_config": CompileConfig(backend=backend)}
    with pytest.warns(RuntimeWarning, match=f"runs steps of LlamaForCausalLM eagerly.*{why}"):
        same_as_generate(model, PROMPT, accept=0.8, config=CONFIG, **LONG, **way)
    same_as_generate(model, PROMPT, accept=0.8, config=CONFIG, **LONG, **way)


def test_other_calls_run_eagerly_and_say_so() -> None:
    def said(why: str) -> Any:
        return pytest.warns(RuntimeWarning, match=why)

    model = model_of("llama")
    with said("several rows"):
        same_as_generate(model, THREE, config=CONFIG, accept=0.8)
    with said("your own code"):
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        same_as_generate(model, ONE, config=CONFIG, accept=0.8)
    hook.remove()
    with said("by 'chain'"):
        same_as_generate(model_of("bloom"), ONE, config=CONFIG, accept=0.8)
    with said("its prompt is too long"):
        same_as_generate(model, PROMPT.repeat(1, 4), config=CONFIG, accept=0.8)
    with said("its text is longer than 128 tokens"):
        longer = {**LONG, "max_new_tokens": 120}
        same_as_generate(model, PROMPT, accept=0.8, config=CONFIG, **longer, **BY_TORCH)
    with said("another call has its compiled steps"):

        def nested(step: Any) -> None:
            if not compiled:
                compiled.append(step)
                same_as_generate(model, ONE, config=CONFIG, **BY_BACKEND)

        answered(model, ONE, config=CONFIG, on_step=nested, max_new_tokens=8, **BY_BACKEND)


def test_compiled_steps_go_to_the_next_call_or_go_with_the_call() -> None:
    steps = StaticSteps()
    first, second = (tiny_model() for _ in range(2))
    assert steps.lend(first)
    assert not steps.lend(second)
    steps.take_back()
    assert steps.lend(second)
    del second
    assert steps.lend(first)
    model = model_of("llama")
    same_as_generate(model, PROMPT, config=CONFIG, **LONG | {"max_new_tokens": 8}, **BY_BACKEND)
    kept = profile_of(model).static_steps
    assert kept.runs
    lade.release(model)
    assert (kept.runs, kept.caches) == ({}, {})


# --- a device that is none ------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(["llama", "gemma3_text", "gpt_oss"], "gpt_oss"))
@torch.no_grad()
def test_on_a_device_that_has_no_numbers_no_step_mixes_devices_or_waits(family: str) -> None:
    """The meta device stands in for a GPU: it refuses what reads a number, or takes two devices."""
    model, ids = model_of(family).to("meta"), torch.full((1, 30), 5, device="meta")
    given = {"use_cache": True}, tree_layout(model), 40, GenerationConfig()
    for attention in (None, TREE_SDPA)[: 1 + (model.config._attn_implementation == "sdpa")]:
        target = StaticTarget(model, ids, *given, attention, steps=None)
        assert target.prefill().device.type == "meta"
        for parents in ([-1, 0, -1, 2], [], [*range(-1, 14)], [-1, 0]):
            tree = Tree.build(8, make_draft(parents))
            assert target.forward(target.inputs([tree])).device.type == "meta"
            target.commit([[*range(0, len(tree), 2)]])
        target.forward_roots([tree.without_draft()])
        held = target.hand_over(DynamicCache(config=model.config))
        assert {layer.keys.device.type for layer in held.layers} == {"meta"}
