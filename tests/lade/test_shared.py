"""Models that tests share stay as they are, and know no more than what their self-check found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lade
from lade.probing.profile import Profiles
from tests.lade import shared
from tests.lade.both import ONE
from tests.lade.shared import shared_model


def test_tests_that_ask_for_the_same_get_the_same() -> None:
    model = shared_model("llama", seed=1, vocab_size=50)
    assert shared_model("llama", vocab_size=50, seed=1) is model
    others = [shared_model(), shared_model("llama", 1), shared_model("llama", 1, vocab_size=51)]
    assert len({id(each) for each in [model, *others]}) == 4
    assert shared_model("llama", 1, dtype=torch.float32).dtype == torch.float32


@torch.no_grad()
def _write(model: Any) -> None:
    model.lm_head.weight.add_(1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "modules, hooks, config or training flags": lambda m: m.lm_head.register_forward_hook(print),
    "attributes": lade.wrap,
    "generation config": lambda m: setattr(m.generation_config, "eos_token_id", None),
    "values of weights": _write,
    "verdicts": lambda m: Profiles.of(m).present(m).drop_verdict("tree", "a planted fault"),
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_change_is_named_and_ends_the_sharing(named: str) -> None:
    model = shared_model("gpt2", seed=99)
    lade.generate(model, ONE, max_new_tokens=2)
    assert shared.hand_back() == []
    assert shared_model("gpt2", seed=99) is model
    CHANGES[named](model)
    (told,) = shared.hand_back()
    assert told == f"tiny_model('gpt2', 99, '[]'): {named}"
    assert shared_model("gpt2", seed=99) is not model


@pytest.mark.parametrize("are_verdicts_true", [True, False])
def test_what_the_check_found_is_kept_and_nothing_else(are_verdicts_true: bool) -> None:
    model = shared_model("gpt2", seed=98)
    lade.generate(model, ONE, max_new_tokens=8, do_sample=False)
    (profile,) = Profiles.of(model)
    assert profile.results
    assert profile.costs
    assert shared.hand_back(are_verdicts_true) == []
    kept = [*Profiles.of(model)]
    assert [each.results for each in kept] == ([profile.results] if are_verdicts_true else [])
    assert not any(each.costs or each.warned for each in kept)
