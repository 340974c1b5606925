"""Text is private to its call unless the caller shares it; time tells nothing of another's."""

from typing import Any

import pytest
import torch

import lade
from tests.grids import thinned
from tests.lade.tiny import VOCAB_SIZE, tiny_model

SECRETS = [[20 + i, 35 + i, 50 + i, 65 + i] for i in range(12)]
BEGINNING = [5, 6, 7, 8]


def victim_prompt(secret: list[int]) -> torch.Tensor:
    return torch.tensor([[*BEGINNING, *secret, 9, 10, *BEGINNING, *secret]])


def num_steps(model: Any, candidate: list[int]) -> int:
    """Let a candidate be written, by what anybody may ask of `generate`; count the steps it took.

    Steps stand for what an attacker reads off the clock.
    """
    bias = {(token,): -1e4 for token in range(VOCAB_SIZE) if token not in candidate}
    pairs = dict.fromkeys(zip([BEGINNING[-1], *candidate], candidate, strict=False), 200.0)
    output = model.generate(
        torch.tensor([BEGINNING]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        do_sample=False,
        max_new_tokens=len(candidate),
        sequence_bias=bias | pairs,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    assert output.sequences[0, 4:].tolist() == candidate
    steps: int = output.stats.num_steps
    return steps


def is_told(model: Any, secret: list[int]) -> bool:
    """Tell whether the secret's number of steps alone stands out as the lowest."""
    steps = [num_steps(model, candidate) for candidate in SECRETS]
    fewest = [place for place, num in enumerate(steps) if num == min(steps)]
    return [SECRETS[place] for place in fewest] == [secret]


def attacked(secret: list[int], **options: Any) -> bool:
    model = tiny_model("llama", seed=4, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    config = lade.Config(max_draft_tokens=12)
    lade.wrap(model, config=config, **options)
    prompt = victim_prompt(secret)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, pad_token_id=0)
    return is_told(model, secret)


@pytest.mark.parametrize("place", thinned([0, 11], 11))
def test_a_secret_is_told_where_text_is_shared_and_nowhere_else(place: int) -> None:
    assert attacked(SECRETS[place], shares_text=True)
    assert attacked(SECRETS[place], pool=lade.NGramPool())
    assert not attacked(SECRETS[place])


def test_a_pool_named_by_one_caller_is_not_another_callers() -> None:
    model = lade.wrap(tiny_model("llama"))
    mine, options = lade.NGramPool(), {"max_new_tokens": 4, "pad_token_id": 0}
    model.generate(victim_prompt(SECRETS[0]), pool=mine, **options)
    held = len(mine)
    assert held == 18 + 4
    model.generate(victim_prompt(SECRETS[1]), **options)
    assert len(mine) == held
    assert model.generate.pool is None
