"""Caches, configs and stop strings of the caller: filled, honoured, or left as they were."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import CACHE, byte_tokenizer, tiny_model

# --- caches ---------------------------------------------------------------------------------


def test_caches_that_do_not_fit_are_refused() -> None:
    model = shared_model("llama", seed=1)
    cache = model.generate(
        THREE, attention_mask=(THREE != 0).long(), max_new_tokens=4, return_dict_in_generate=True
    ).past_key_values
    with pytest.raises(ValueError, match=f"expected {CACHE} of 1 row, got 3"):
        lade.generate(model, ONE, past_key_values=cache, max_new_tokens=4)
    with pytest.raises(ValueError, match=f"tuple (of|for) `{CACHE}` is not supported"):
        lade.generate(model, ONE, past_key_values=((), ()), max_new_tokens=4)


# --- inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", thinned(["model", "call", "argument"], "call"))
def test_stop_strings_are_honoured_wherever_they_stand(place: str) -> None:
    model = tiny_model("llama", seed=2, vocab_size=256, eos_token_id=None)
    tokenizer, prompt = byte_tokenizer(), THREE[:1] + 60
    options: dict[str, Any] = {"attention_mask": prompt * 0 + 1, "max_new_tokens": 30}
    options |= {"do_sample": False, "pad_token_id": 0}
    free = model.generate(prompt, **options)
    letters = [c for c in tokenizer.decode(free[0, 12:]) if c.isascii() and c.isprintable()]
    stop = [letters[3], letters[5]]
    seen = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(model.generation_config.stop_strings)  # other threads may be using it now
        return scores

    options |= {"tokenizer": tokenizer, "logits_processor": [watch]}
    if place == "model":
        model.generation_config.stop_strings = stop
    elif place == "call":
        options["generation_config"] = GenerationConfig(stop_strings=stop, do_sample=False)
    else:
        options["stop_strings"] = stop
    expected, _ = same_as_generate(model, prompt, accept=0.9, config=EIGHT, **options)
    assert expected.sequences.shape[1] < free.shape[1]
    own = stop if place == "model" else None
    assert seen
    assert all(
        stop_strings == own for stop_strings in [*seen, model.generation_config.stop_strings]
    )
    del options["tokenizer"]
    with pytest.raises(ValueError, match="expected tokenizer="):
        lade.generate(model, prompt, **options)
