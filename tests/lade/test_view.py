"""Views of a model: nothing of the model itself is ever switched."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import moe

import lade
from lade.compat import attention_of
from lade.drafting.successors import PromptHarvester
from lade.view import counterpart, in_evaluation, keep_attributes, with_attention, with_own_hooks
from tests.grids import thinned
from tests.lade.tiny import BatchDrafter, ScriptedDrafter, tiny_model
from tests.ngram_pool.threads import in_threads
from tests.support.tiny import tiny_model as tiny_architecture

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def test_a_view_attends_otherwise_and_the_model_as_before() -> None:
    model = tiny_model("llama", attention="sdpa")
    called: list[str] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        called.append("view")
        return AttentionInterface()["sdpa"](*args, **kwargs)

    AttentionInterface.register("noting", noting)
    AttentionMaskInterface.register("noting", AttentionMaskInterface()["sdpa"])
    view = with_attention(model, "noting")
    expected = model(IDS).logits
    assert not called
    assert torch.equal(view(IDS).logits, expected)
    assert len(called) == 3
    assert attention_of(model) == "sdpa"
    assert view.lm_head is model.lm_head
    assert view.model.layers[0].self_attn.q_proj is model.model.layers[0].self_attn.q_proj


def test_a_view_calls_the_hooks_and_forwards_of_the_model() -> None:
    model = tiny_model("llama")
    called: list[Any] = []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_hook(lambda module, *_: called.append(module))

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:  # as accelerate wraps it
        called.append(module)
        return type(module).forward(module, *args, **kwargs)

    attention.forward = partial(forward, attention)
    view = with_attention(model, "eager")
    torch.testing.assert_close(view(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    twin = view.model.layers[0].self_attn
    assert called == [twin, twin, attention, attention]
    handle.remove()  # from both
    called.clear()
    view(IDS)
    assert called == [twin]


def test_only_the_text_part_of_a_composite_model_attends_otherwise() -> None:
    model = tiny_architecture("gemma3", seed=0, attention=None, dtype=torch.float32)
    view = with_attention(model, "eager")
    assert attention_of(view) == "eager"
    assert attention_of(model) == "sdpa"
    assert view.config.text_config is not model.config.text_config


@pytest.mark.parametrize("verification", thinned(["tree", "chain"], "tree"))
def test_single_tokens_have_the_experts_that_generate_decodes_them_with(
    verification: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off CPUs, those whose weights are copied for each token; more tokens would copy too many."""
    model = tiny_model("qwen3_moe", head_dim=8, moe_intermediate_size=16, dtype=torch.float32)
    used: set[tuple[str, bool]] = set()
    for name in ("grouped_mm", "batched_mm"):
        run = moe.ALL_EXPERTS_FUNCTIONS[name]

        def note(
            self: Any, states: torch.Tensor, *args: Any, name: str = name, run: Any = run
        ) -> Any:
            used.add((name, len(states) > 1))
            return run(self, states, *args)

        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, name, note)
    model.set_experts_implementation("grouped_mm")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48}
    expected = model.generate(IDS[:1], **options)
    drafter = ScriptedDrafter(expected[0].tolist(), np.random.default_rng(0), accept=0.5)
    options |= {"config": lade.Config(verification=verification, max_draft_tokens=4)}
    assert torch.equal(lade.generate(model, IDS[:1], drafter=drafter, **options), expected)
    assert used == {("grouped_mm", False), ("grouped_mm", True)}  # as `generate` on a CPU
    used.clear()
    monkeypatch.setattr("lade.view.device_of_inputs", lambda model: torch.device("cuda"))
    assert torch.equal(lade.generate(model, IDS[:1], drafter=drafter, **options), expected)
    assert used == {("batched_mm", False), ("grouped_mm", True)}
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_a_view_is_in_evaluation_and_the_model_in_training() -> None:
    model = tiny_model("gpt2").train()
    expected = tiny_model("gpt2")(IDS).logits
    view = in_evaluation(model)
    assert torch.equal(view(IDS).logits, expected)
    assert all(module.training for module in model.modules())


def test_a_hook_of_a_view_is_not_the_models_and_what_forwards_note_is() -> None:
    model = tiny_model("llama")
    seen: list[Any] = []
    view = with_own_hooks(model, [model.model])
    twin = counterpart(view, model, model.model)
    twin.register_forward_hook(lambda module, args, output: seen.append(output))
    model(IDS)
    assert not seen
    view(IDS)
    assert len(seen) == 1
    view.model.noted = 7
    model.model.others = 8  # written meanwhile
    keep_attributes(view, model)
    assert model.model.noted == 7
    assert model.model.others == 8
    assert not model.model._forward_hooks


def test_prompts_are_looked_at_without_a_hook_on_the_model() -> None:
    model = tiny_model("llama")
    harvester = PromptHarvester(model, 4, 97, 64)
    with harvester.watching() as view:
        assert not model.model._forward_hooks
        logits = view(IDS).logits[:, -1:]
    found = harvester.successors(logits)
    assert found is not None
    assert found.num_nodes == 4


# --- threads and nested calls --------------------------------------------------------------------


def _flash_like(*args: Any, **kwargs: Any) -> Any:
    """Attention that knows no 4D mask, as flash attention: it sees all that comes before."""
    module, query, key, value, _ = args[:5]
    kwargs = {name: kwargs[name] for name in ("dropout", "scaling") if name in kwargs}
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return AttentionInterface()["sdpa"](module, query, key, value, mask[None, None], **kwargs)


AttentionInterface.register("causal_only", _flash_like)


def _model(kind: str) -> tuple[Any, lade.Config]:
    steady = lade.Config(max_draft_tokens=8)
    if kind == "gemma2":
        model = tiny_architecture("gemma2", seed=0, attention="eager", dtype=torch.float32)
        return model, lade.Config(stable_text=True, max_draft_tokens=7)
    attention = {"flash": "causal_only", "flex": "flex_attention", "sdpa": "sdpa"}[kind]
    model = tiny_model("llama", seed=1, dtype=torch.float32, attention="sdpa")
    model.set_attn_implementation(attention)
    return model, steady


@pytest.mark.parametrize("kind", thinned(["gemma2", "flash", "sdpa"], "gemma2"))
@pytest.mark.parametrize("num_calls", thinned([4, 15], 4))
def test_threads_that_share_a_model_get_the_plain_text(kind: str, num_calls: int) -> None:
    assert failures_of_threads(kind, num_threads=4, num_calls=num_calls) == 4 * num_calls


def failures_of_threads(kind: str, num_threads: int, num_calls: int) -> int:
    """Call lade from several threads at once; return how many calls were made, or raise."""
    model, config = _model(kind)
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[5 + i, 6, 7, 5 + i, 6, 7, 5 + i]]) for i in range(num_threads)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    masks: dict[str, Any] = {"attention_mask": torch.ones_like(prompts[0])}
    answers = [model.generate(prompt, **masks, **options).tolist() for prompt in prompts]
    attention = attention_of(model)
    done: list[int] = []

    def work(place: int) -> None:
        for call in range(num_calls):
            drafter = BatchDrafter(answers[place], np.random.default_rng(call), accept=0.8)
            got = lade.generate(
                model, prompts[place], drafter=drafter, config=config, **masks, **options
            )
            assert got.tolist() == answers[place]
            done.append(place)

    assert in_threads(*(partial(work, place) for place in range(num_threads)), seconds=None) == []
    assert attention_of(model) == attention
    return len(done)


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma", "granite_swa"])
def test_nested_forwards_of_the_same_model_are_its_own(family: str) -> None:
    model = tiny_architecture(family, seed=0, attention="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(IDS),
        "do_sample": False,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "guidance_scale": 2.0,
    }
    expected = model.generate(IDS, **options)
    alone = model(IDS).logits

    def nested(step: Any) -> None:
        assert torch.equal(model(IDS).logits, alone)

    config = lade.Config(stable_text=True, max_draft_tokens=7)
    got = lade.generate(model, IDS, config=config, on_step=nested, **options)
    assert got.tolist() == expected.tolist()
