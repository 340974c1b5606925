"""The three entry points, and what passes through them."""

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers

import lade
from tests.lade.tiny import byte_tokenizer, tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
MASK = torch.ones_like(PROMPT)
LENGTH = {"max_new_tokens": 25}


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", seed=1)


def plain(model: Any, **options: Any) -> list[list[int]]:
    """Return the text of plain `generate`, of a wrapped model too."""
    options = {**LENGTH, "attention_mask": MASK, "do_sample": False, **options}
    ids: list[list[int]] = type(model).generate(model, PROMPT, **options).tolist()
    return ids


def ours(model: Any, **options: Any) -> Any:
    return lade.generate(
        model, PROMPT, attention_mask=MASK, **{**LENGTH, "do_sample": False, **options}
    )


# --- entry points ------------------------------------------------------------------------------


def test_wrap_shares_one_pool_and_unwrap_leaves_no_trace(model: Any) -> None:
    attributes = set(vars(model))
    pool = lade.NGramPool(1000)
    lade.wrap(model, pool=pool)
    for calls in (1, 2):
        model.generate(PROMPT, attention_mask=MASK, do_sample=False, max_new_tokens=5)
        assert len(pool) == calls * 12
    lade.wrap(model, pool=lade.NGramPool(50))  # again: replaces the pool
    model.generate(PROMPT, attention_mask=MASK, do_sample=False, max_new_tokens=5)
    assert len(pool) == 24
    assert type(model).generate is transformers.GenerationMixin.generate
    assert lade.unwrap(model) is model
    assert set(vars(model)) - attributes == {"_lade_profiles"}
    with pytest.raises(
        ValueError, match=r"expected a model that lade\.wrap was called on, got Llama"
    ):
        lade.unwrap(model)


def test_a_pipeline_decodes_with_lade_after_wrap() -> None:
    model = tiny_model("llama", seed=2, vocab_size=256)
    model.generation_config.eos_token_id = None
    tokenizer = byte_tokenizer()
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"do_sample": False, "max_new_tokens": 20}
    expected = pipeline("abcabcabc", **options)
    pool = lade.NGramPool()
    lade.wrap(model, pool=pool)
    assert pipeline("abcabcabc", **options) == expected
    assert len(pool) == 29


def test_dict_output_has_stats_and_a_cache_of_all_tokens_but_the_last(model: Any) -> None:
    output = ours(model, return_dict_in_generate=True)
    assert isinstance(output, lade.GenerateOutput)
    stats = output.stats
    num_new = output.sequences.shape[1] - PROMPT.shape[1]
    assert stats.num_tokens == num_new
    assert stats.num_committed_tokens == num_new - 1
    assert stats.num_accepted_tokens + stats.num_steps == stats.num_committed_tokens
    assert min(stats.prefill_sec, stats.draft_sec, stats.forward_sec, stats.commit_sec) > 0
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    # Plain generate can go on from it.
    expected = plain(model, max_new_tokens=35)
    longer = model.generate(
        output.sequences,
        attention_mask=torch.ones_like(output.sequences),
        past_key_values=output.past_key_values,
        do_sample=False,
        max_new_tokens=10,
    )
    assert longer.tolist() == expected


def test_a_generation_keeps_nothing_alive(model: Any) -> None:
    gc.disable()
    try:
        reference = weakref.ref(ours(model, return_dict_in_generate=True).past_key_values)
        assert reference() is None  # freed at once, without waiting for the cyclic collector
    finally:
        gc.enable()
