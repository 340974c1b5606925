"""Models that tests share stay as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lade
from tests.lade import shared
from tests.lade.both import ONE
from tests.lade.shared import shared_model


@torch.no_grad()
def _write(model: Any) -> None:
    model.lm_head.weight.add_(1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "modules": lambda model: model.lm_head.train(),
    "hooks": lambda model: model.lm_head.register_forward_hook(print),
    "config": lambda model: setattr(model.config, "scale_attn_weights", False),
    "generation config": lambda model: setattr(model.generation_config, "top_k", 3),
    "attributes": lade.wrap,
    "weights": _write,
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_change_is_named_and_ends_the_sharing(named: str) -> None:
    model = shared_model("gpt2", seed=99)
    lade.generate(model, ONE, max_new_tokens=2)
    assert shared.hand_back() == []
    assert shared_model("gpt2", seed=99) is model is not shared_model("gpt2", seed=98)
    CHANGES[named](model)
    (told,) = shared.hand_back()
    assert told == f"tiny_model('gpt2', 99, '[]'): {named}"
    assert shared_model("gpt2", seed=99) is not model
