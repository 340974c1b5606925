"""Greedy text equals `generate(do_sample=False)` token for token, in float64."""

from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.tiny import EOS_TOKEN_ID, FAMILIES, ScriptedDrafter, random_prompt, tiny_model

NINE = lade.Config(max_draft_tokens=9)
NUM_PROMPTS = 36  # for each family; `make fuzz` compares 20,000 calls


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama"))
def test_text_equals_plain_generate_over_random_prompts(family: str) -> None:
    rng = np.random.default_rng(0)
    pool = lade.NGramPool(capacity_tokens=2000)  # small: it forgets on the way
    total = lade.DecodeStats()
    for number in range(NUM_PROMPTS):
        if number % 12 == 0:
            model = tiny_model(family, seed=number)
        prompt = random_prompt(rng)
        length = int(rng.integers(1, 25))
        config = lade.Config(
            max_draft_tokens=[None, 0, 1, 3, 8, 25][number % 6],
            max_candidates=[None, 1, 3][number % 3],
        )
        _, got = same_as_generate(model, prompt, max_new_tokens=length, pool=pool, config=config)
        total.add(got.stats)
    # The comparison means nothing unless drafts are both accepted and rejected.
    assert total.acceptance_rate < 0.98
    assert total.num_accepted_tokens > 20
    assert total.num_draft_tokens - total.num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("deepseek_v3", "eager")],
)
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0], ids=["never", "sometimes", "always"])
def test_text_is_the_same_whatever_is_drafted(family: str, accept: float, attention: str) -> None:
    rng = np.random.default_rng(1)
    model = tiny_model(family, seed=3, attention=attention)
    for length in (1, 7, 40):
        options: dict[str, Any] = {"max_new_tokens": length, "accept": accept}
        _, got = same_as_generate(model, random_prompt(rng), seed=length, config=NINE, **options)
        if length == 40 and accept == 1.0:
            assert got.stats.mean_accepted_tokens > 2
        if accept == 0.0:
            # Only a wrong branch beside the spine can be right by chance.
            assert got.stats.mean_accepted_tokens < 1.3


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_text_equals_plain_generate_on_a_gpu(family: str) -> None:
    rng = np.random.default_rng(6)
    model = tiny_model(family, seed=6).cuda()
    pool = lade.NGramPool()
    for _ in range(20):
        same_as_generate(model, random_prompt(rng), max_new_tokens=30, pool=pool)


@pytest.mark.parametrize("family", thinned(["llama", "gpt2"], "llama"))
def test_stops_at_every_eos_id_and_at_the_exact_length(family: str) -> None:
    """EOS ids are chosen from the answer itself, so that they come in the middle of drafts."""
    rng = np.random.default_rng(2)
    model = tiny_model(family, seed=5)
    num_cut = 0
    for _ in range(12):
        prompt = random_prompt(rng)
        free, _ = same_as_generate(model, prompt, max_new_tokens=30, eos_token_id=[EOS_TOKEN_ID])
        new = free.sequences[0, prompt.shape[1] :].tolist()
        eos = [int(rng.choice(new)), int(rng.choice(new))]
        for options in (
            {"max_new_tokens": 30, "eos_token_id": eos},
            {"max_new_tokens": None, "max_length": prompt.shape[1] + 9, "eos_token_id": eos[0]},
            {"max_new_tokens": None, "max_length": prompt.shape[1] + 1},
        ):
            drafter = ScriptedDrafter(free.sequences[0].tolist(), rng, accept=1.0)
            config = lade.Config(max_draft_tokens=12)
            expected, _ = same_as_generate(model, prompt, drafter=drafter, config=config, **options)
            assert drafter.observed == expected.sequences[0].tolist()
            num_cut += len(drafter.observed) < free.sequences.shape[1]
    assert num_cut > 12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_padded_prompt_gives_the_text_of_generate(attention: str) -> None:
    """The drafter sees no padding."""
    model = tiny_model("llama", seed=7, attention=attention)
    prompt = torch.tensor([[0, 0, 0, 5, 9, 5, 9, 5]])
    same_as_generate(model, prompt, accept=0.8, config=EIGHT, max_new_tokens=30)


@pytest.mark.parametrize("ends", ["by a token", "by length"])
def test_learned_positions_are_used_up_to_the_last_and_no_further(ends: str) -> None:
    """A tree must not reach for positions gpt2 does not have, though the answer may end there."""
    model = tiny_model("gpt2", seed=1, n_positions=32, max_position_embeddings=32)
    prompt = torch.tensor([[5, 6] * 12])
    limits: dict[str, Any] = {"max_new_tokens": None, "max_length": 32}
    free, _ = same_as_generate(model, prompt, **limits)
    text = free.sequences[0].tolist()
    if ends == "by a token":
        limits = {"max_new_tokens": 50, "eos_token_id": text[29]}
    drafter = ScriptedDrafter(text, np.random.default_rng(0), accept=1.0)
    config = lade.Config(max_draft_tokens=20)
    same_as_generate(model, prompt, drafter=drafter, config=config, **limits)
