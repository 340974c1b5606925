"""Threads that share a model, and nested calls of it: each has the text that it has alone."""

from typing import Any

import pytest
import torch

import lade
from tests.grids import thinned
from tests.stress.interrupts import call_from_threads
from tests.support.tiny import tiny_model as tiny_architecture

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("kind", ["gemma2", "tree"])
@pytest.mark.parametrize("num_calls", thinned([12, 60], 12))
def test_threads_that_share_a_model_get_the_plain_text(kind: str, num_calls: int) -> None:
    result = call_from_threads(kind, num_calls, num_threads=4)
    assert result.calls == num_calls
    assert (result.raised, result.wrong, result.left, result.told) == (0, 0, 0, [])


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma", "granite_swa"])
def test_nested_forwards_of_the_same_model_are_its_own(family: str) -> None:
    model = tiny_architecture(family, seed=0, attention="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(IDS),
        "do_sample": False,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "guidance_scale": 2.0,
    }
    expected = model.generate(IDS, **options)
    alone = model(IDS).logits

    def nested(step: Any) -> None:
        assert torch.equal(model(IDS).logits, alone)

    config = lade.Config(max_draft_tokens=7)
    got = lade.generate(model, IDS, config=config, on_step=nested, **options)
    assert got.tolist() == expected.tolist()
