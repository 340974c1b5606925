"""Caches, configs and stop strings of the caller: filled, honoured, or left as they were."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, both, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import CACHE, ScriptedDrafter, byte_tokenizer, tiny_model


def test_scores_reach_stopping_criteria() -> None:
    model = shared_model("llama", seed=1)
    seen: list[Any] = []

    def unsure(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(scores)
        return torch.full((input_ids.shape[0],), len(scores) >= 9 and bool(scores[-1].max() > 0))

    _, got = both(model, ONE, stopping_criteria=[unsure], output_scores=True)
    assert len(got.scores) < 24
    assert [len(scores) for scores in seen[:3]] == [1, 2, 3]
    assert seen[1][0] is seen[2][0]  # and not made anew each time


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


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches
@pytest.mark.parametrize("place", thinned(["model", "call", "argument"], "call"))
@pytest.mark.parametrize("num_rows", [1, 3])
def test_stop_strings_are_honoured_wherever_they_stand(place: str, num_rows: int) -> None:
    model = tiny_model("llama", seed=2, vocab_size=256)
    model.generation_config.eos_token_id = None if num_rows == 1 else 255
    tokenizer = byte_tokenizer()
    prompt = (THREE + 60)[:num_rows]
    free = model.generate(prompt, max_new_tokens=30, do_sample=False, attention_mask=prompt * 0 + 1)
    letters = [c for c in tokenizer.decode(free[0, 12:]) if c.isascii() and c.isprintable()]
    stop = [letters[3], letters[5]]
    options: dict[str, Any] = {"attention_mask": prompt * 0 + 1, "tokenizer": tokenizer}
    options |= {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    if place == "model":
        model.generation_config.stop_strings = stop
    elif place == "call":
        options["generation_config"] = GenerationConfig(stop_strings=stop, do_sample=False)
    else:
        options["stop_strings"] = stop
    drafter = None
    if num_rows == 1:
        drafter = ScriptedDrafter(free[0].tolist(), np.random.default_rng(0), 1.0)
    expected, _ = same_as_generate(model, prompt, drafter=drafter, config=EIGHT, **options)
    assert num_rows > 1 or expected.sequences.shape[1] < free.shape[1]
    own = stop if place == "model" else None
    assert model.generation_config.stop_strings == own
    seen = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(model.generation_config.stop_strings)  # other threads may be using it now
        return scores

    lade.generate(model, prompt, logits_processor=[watch], **options)
    assert seen
    assert all(stop_strings == own for stop_strings in seen)
    del options["tokenizer"]
    with pytest.raises(ValueError, match="expected tokenizer="):
        lade.generate(model, prompt, **options)
