"""What `tests/equality` cannot say of a text that is to be that of `generate`."""

from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.lade.both import same_as_generate
from tests.lade.tiny import ScriptedDrafter, tiny_model


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
    drafter = ScriptedDrafter([text], np.random.default_rng(0), accept=1.0)
    config = lade.Config(max_draft_tokens=20)
    same_as_generate(model, prompt, drafter=drafter, config=config, **limits)
