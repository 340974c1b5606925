"""Sampling gives, seed for seed, the tokens and the random state of plain `generate`."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import lade
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.02},
    {"top_h": 0.4},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "renormalize_logits": True},
]
PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[9], [10, 11]]},
    {"sequence_bias": [[[9], 2.0], [[10, 11], 3.0]]},
    {"min_new_tokens": 12, "eos_token_id": [5, 6, 7, 8, 9, 10]},
    {"min_length": 15, "eos_token_id": [5, 6, 7, 8, 9, 10]},
    {"forced_bos_token_id": 4},
    {"forced_eos_token_id": 3},
    {"exponential_decay_length_penalty": (3, 1.3)},
    {"suppress_tokens": [1, 2, 3, 4]},
    {"begin_suppress_tokens": [5, 6, 7]},
    {"remove_invalid_values": True},
    {"guidance_scale": 1.5},
    {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 8], ngram_len=3)},
    {"repetition_penalty": 1.2, "temperature": 0.4, "top_p": 0.9, "no_repeat_ngram_size": 3},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row + 2, (int(ids[-1]) + row) % 50, 60, 61]},
]
# What looks at one token, at several, at the prompt, at a row; and all together.
QUICK = (WARPERS[1], WARPERS[3], WARPERS[-1], PROCESSORS[2], PROCESSORS[6], *PROCESSORS[-2:])


def name_of(options: dict[str, Any]) -> str:
    return "-".join(options)


@pytest.mark.parametrize("options", thinned(WARPERS + PROCESSORS, *QUICK), ids=name_of)
def test_every_processor_samples_as_generate_does(options: dict[str, Any]) -> None:
    """In batches, which have rows alone at their end."""
    accepted = 0
    for seed in range(2):
        model = shared_model("llama", seed=seed)
        _, got = both(model, THREE, seed=seed, **options)
        accepted += got.stats.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("options", thinned(PROCESSORS, *QUICK[3:]), ids=name_of)
def test_every_processor_is_greedy_in_batches_as_generate_is(options: dict[str, Any]) -> None:
    both(shared_model("llama", seed=3), THREE, do_sample=False, **options)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("least", thinned([2, 20], 20))
def test_choosing_at_all_nodes_at_once_gives_the_same(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: noise is drawn ahead, and what was not used is taken back."""
    monkeypatch.setattr("lade.sampling.exact._MAX_NOISE_BYTES", 1)
    monkeypatch.setattr("lade.sampling.exact._MIN_LEAD", least)
    model = shared_model("llama", seed=least)
    outputs = dict.fromkeys(("output_scores", "output_logits"), least == 2)
    for options in WARPERS:
        options = {"num_return_sequences": 2, **options, **outputs}
        both(model, THREE, seed=least, eos_token_id=[*range(0, 97, 6)], **options)


def test_samples_of_one_prompt_are_those_of_generate() -> None:
    model = shared_model("llama", seed=1)
    for seed in range(4):
        _, got = both(model, ONE, seed=seed, num_return_sequences=5, temperature=0.4)
        assert got.stats.num_prefills == 5
        assert got.stats.num_row_steps > got.stats.num_steps


def test_rows_of_one_prompt_are_allowed_the_tokens_that_generate_allows_them() -> None:
    """Recent releases of transformers tell the function the prompt, older ones the row."""
    model = shared_model("llama", seed=1)
    for seed in range(2):
        both(model, THREE, seed=seed, num_return_sequences=2, **PROCESSORS[-1])


def test_the_measured_budget_and_any_pool_give_the_same_samples() -> None:
    model = shared_model("llama", seed=2)
    pool = lade.NGramPool()
    pool.observe(list(range(2, VOCAB_SIZE)) * 5)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 40}
    for seed in range(4):
        same_as_generate(model, THREE, pool=pool, seed=seed, **options)


class Noisy(LogitsProcessor):  # type: ignore[misc]
    """Draws from torch's own generator between the draws of `generate`."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.is_contiguous()
        self.seen.append(input_ids.tolist())
        return scores + torch.randn(scores.shape)


class EveryThird(StoppingCriteria):  # type: ignore[misc]
    """Finishes one row after the other, by counting its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), scores))
        rows = torch.arange(input_ids.shape[0])
        return rows < len(self.seen) // 3


@pytest.mark.parametrize("prompt", [ONE, THREE], ids=["one row", "batch"])
@pytest.mark.parametrize("eos_token_id", [EOS_TOKEN_ID, None])
def test_user_processors_and_criteria_see_exactly_what_generate_shows_them(
    prompt: torch.Tensor, eos_token_id: int | None
) -> None:
    model = tiny_model("llama", seed=1)
    model.generation_config.eos_token_id = eos_token_id
    for do_sample in (True, False):
        processors, criteria = (Noisy(), Noisy()), (EveryThird(), EveryThird())
        made = [
            {"logits_processor": [processor], "stopping_criteria": [criterion]}
            for processor, criterion in zip(processors, criteria, strict=True)
        ]
        options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 30}
        if do_sample:
            options["temperature"] = 0.5
        same_as_generate(model, prompt, fresh=partial(next, iter(made)), **options)
        assert processors[0].seen == processors[1].seen
        assert criteria[0].seen == criteria[1].seen
        assert len(processors[0].seen) > 2


def test_a_distribution_that_is_none_raises_as_in_generate() -> None:
    model = shared_model("llama", seed=1)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] > 12 else scores

    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 20}
    options["logits_processor"] = [broken]
    for prompt in (ONE, THREE):
        mask = (prompt != 0).long()
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(prompt, attention_mask=mask, **options)
        state = torch.get_rng_state()
        pool = lade.NGramPool()
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            lade.generate(model, prompt, attention_mask=mask, pool=pool, **options)
        assert torch.equal(torch.get_rng_state(), state)
        assert list(pool._sequences) == [0]
