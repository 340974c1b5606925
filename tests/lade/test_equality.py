"""Greedy text equals `generate(do_sample=False)` token for token, in float64."""

from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.grids import thinned
from tests.lade.tiny import EOS_TOKEN_ID, FAMILIES, ScriptedDrafter, random_prompt, tiny_model

NUM_PROMPTS = 170  # for each family; with twelve families, over two thousand


def plain(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    ids: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options
    )
    return ids


def ours(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    mask = torch.ones_like(prompt)
    return lade.generate(model, prompt, attention_mask=mask, do_sample=False, **options)


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama"))
def test_text_equals_plain_generate_over_random_prompts(family: str) -> None:
    rng = np.random.default_rng(0)
    pool = lade.NGramPool(capacity_tokens=2000)  # small: it forgets on the way
    total = lade.DecodeStats()
    for number in range(NUM_PROMPTS):
        if number % 50 == 0:
            model = tiny_model(family, seed=number)
        prompt = random_prompt(rng)
        length = int(rng.integers(1, 25))
        config = lade.Config(
            max_draft_tokens=[None, 0, 1, 3, 8, 25][number % 6],
            max_candidates=[None, 1, 3][number % 3],
        )
        expected = plain(model, prompt, max_new_tokens=length)
        output = ours(
            model,
            prompt,
            max_new_tokens=length,
            pool=pool,
            config=config,
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == expected.tolist(), (family, number)
        total.add(output.stats)
    # The comparison means nothing unless drafts are both accepted and rejected.
    assert 0.02 < total.acceptance_rate < 0.98
    assert total.num_accepted_tokens > 50


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0], ids=["never", "sometimes", "always"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_text_is_the_same_whatever_is_drafted(family: str, accept: float, attention: str) -> None:
    rng = np.random.default_rng(1)
    model = tiny_model(family, seed=3, attention=attention)
    for length in (1, 2, 7, 40):
        prompt = random_prompt(rng)
        expected = plain(model, prompt, max_new_tokens=length)
        drafter = ScriptedDrafter(expected[0].tolist(), rng, accept)
        output = ours(
            model,
            prompt,
            max_new_tokens=length,
            drafter=drafter,
            config=lade.Config(max_draft_tokens=9),
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == expected.tolist()
        assert drafter.observed == expected[0].tolist()
        assert drafter.closed == 1
        if length == 40 and accept == 1.0:
            assert output.stats.mean_accepted_tokens > 2
        if accept == 0.0:
            # Only a wrong branch beside the spine can be right by chance.
            assert output.stats.mean_accepted_tokens < 1.3


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_text_equals_plain_generate_on_a_gpu(family: str) -> None:
    rng = np.random.default_rng(6)
    model = tiny_model(family, seed=6).cuda()
    pool = lade.NGramPool()
    for _ in range(20):
        prompt = random_prompt(rng).cuda()
        expected = plain(model, prompt, max_new_tokens=30)
        assert ours(model, prompt, max_new_tokens=30, pool=pool).tolist() == expected.tolist()


@pytest.mark.parametrize("family", thinned(["llama", "gpt2"], "llama"))
def test_stops_at_every_eos_id_and_at_the_exact_length(family: str) -> None:
    """EOS ids are chosen from the answer itself, so that they come in the middle of drafts."""
    rng = np.random.default_rng(2)
    model = tiny_model(family, seed=5)
    num_cut = 0
    for _ in range(30):
        prompt = random_prompt(rng)
        free = plain(model, prompt, max_new_tokens=30, eos_token_id=[EOS_TOKEN_ID])[0].tolist()
        new = free[prompt.shape[1] :]
        eos = [int(rng.choice(new)), int(rng.choice(new))]
        for options in (
            {"max_new_tokens": 30, "eos_token_id": eos},
            {"max_length": prompt.shape[1] + 9, "eos_token_id": eos[0]},
            {"max_length": prompt.shape[1] + 1},
        ):
            expected = plain(model, prompt, **options)
            drafter = ScriptedDrafter(free, rng, accept=1.0)
            output = ours(
                model,
                prompt,
                drafter=drafter,
                config=lade.Config(max_draft_tokens=12),
                return_dict_in_generate=True,
                **options,
            )
            assert output.sequences.tolist() == expected.tolist()
            assert drafter.observed == expected[0].tolist()
            num_cut += expected.shape[1] < len(free)
    assert num_cut > 30


def test_a_padded_prompt_gives_the_text_of_generate() -> None:
    model = tiny_model("llama", seed=7)
    prompt = torch.tensor([[0, 0, 0, 5, 9, 5, 9, 5]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        expected = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=30)
        rng = np.random.default_rng(0)
        # The drafter sees no padding.
        drafter = ScriptedDrafter(expected[0, 3:].tolist(), rng, accept=0.8)
        got = lade.generate(
            model,
            prompt,
            attention_mask=mask,
            drafter=drafter,
            config=lade.Config(max_draft_tokens=8),
            do_sample=False,
            max_new_tokens=30,
        )
        assert got.tolist() == expected.tolist()


def test_learned_positions_may_end_before_max_length() -> None:
    """Plain decoding finishes by EOS before the positions run out; drafts must not reach there."""
    model = tiny_model("gpt2", seed=1, n_positions=32, max_position_embeddings=32)
    prompt = torch.tensor([[5, 6] * 12])
    free = plain(model, prompt, max_length=32)[0].tolist()
    options = {"max_new_tokens": 50, "eos_token_id": free[29]}
    expected = plain(model, prompt, **options)
    drafter = ScriptedDrafter(free, np.random.default_rng(0), accept=1.0)
    config = lade.Config(max_draft_tokens=20)
    got = ours(model, prompt, drafter=drafter, config=config, **options)
    assert got.tolist() == expected.tolist()


def test_learned_positions_may_be_used_up_to_the_last() -> None:
    """A tree that reached beyond `max_length` would index positions gpt2 does not have."""
    model = tiny_model("gpt2", seed=1, n_positions=32, max_position_embeddings=32)
    prompt = torch.tensor([[5, 6, 5, 6, 5, 6]])
    expected = plain(model, prompt, max_length=32)
    drafter = ScriptedDrafter(expected[0].tolist(), np.random.default_rng(0), accept=1.0)
    got = ours(
        model, prompt, max_length=32, drafter=drafter, config=lade.Config(max_draft_tokens=20)
    )
    assert got.tolist() == expected.tolist()
