"""Threads that share a model, and nested calls of it: each has the text that it has alone."""

from functools import partial
from typing import Any

import pytest
import torch

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.stress.interrupts import call_from_threads
from tests.support.tiny import tiny_model as tiny_architecture


@pytest.mark.parametrize("kind", thinned(["gemma2", "tree", "kept", "sparse"], "gemma2", "kept"))
@pytest.mark.parametrize("num_calls", thinned([12, 60], 12))
def test_threads_that_share_a_model_get_the_plain_text(kind: str, num_calls: int) -> None:
    result = call_from_threads(kind, num_calls, num_threads=4)
    assert result.calls == num_calls
    assert (result.raised, result.wrong, result.left, result.told) == (0, 0, 0, [])


@pytest.mark.parametrize("family", ["gemma2", "granite_swa"])
def test_nested_forwards_of_the_same_model_are_its_own(family: str) -> None:
    model = tiny_architecture(family, attention="eager", dtype=torch.float32)
    alone = model(ONE).logits

    def nested(step: Any) -> None:
        assert torch.equal(model(ONE).logits, alone)

    by = partial(lade.generate, on_step=nested)
    same_as_generate(model, ONE, config=EIGHT, by=by, guidance_scale=2.0, eos_token_id=None)
