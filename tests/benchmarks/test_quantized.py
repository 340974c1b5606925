"""A copy with 8-bit weights: close to the model, which stays as it is, and drafts for it."""

from typing import Any

import pytest
import torch
from torch import nn

import lade
from benchmarks.quantized import Int8Linear, int8_copy
from lade.drafters import AssistantModel
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])


def states_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_close_and_the_model_stays_as_it_is(dtype: torch.dtype) -> None:
    model = tiny_model("qwen2", dtype=dtype)  # with biases
    before = states_of(model)
    copied = int8_copy(model)
    with torch.no_grad():
        logits, ours = model(PROMPT).logits.float(), copied(PROMPT).logits.float()
    assert not torch.equal(logits, ours)
    assert (logits - ours).std() < 0.1 * logits.std()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    kinds = [type(module) for module in copied.modules()]
    assert nn.Linear not in kinds
    assert kinds.count(Int8Linear) == 3 * 7 + 1
    assert not any(isinstance(module, Int8Linear) for module in model.modules())


def test_weights_are_whole_steps_of_their_row() -> None:
    linear = nn.Linear(32, 3)
    with torch.no_grad():
        linear.weight[1] = 0
        linear.weight[2] *= 1000
    quantized = Int8Linear(linear)
    assert quantized.weight.dtype == torch.int8
    steps = quantized.scales.float()[:, None].expand(3, 32)
    # Half a step, and for the largest weight of a row what its scale is rounded by.
    assert ((linear.weight - quantized.weight * steps).abs() <= 0.75 * steps).all()
    assert quantized.weight[2].abs().max() >= 126
    states = torch.randn(2, 5, 32)
    got = quantized(states.bfloat16()).float()
    errors = (got - linear(states)).abs().amax(dim=(0, 1))
    assert (errors <= torch.tensor([0.05, 0.01, 50.0])).all()


def test_it_drafts_for_the_model_that_it_is_a_copy_of() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    drafter = AssistantModel(int8_copy(model), length=3, expansion="chain")
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=24)
    got = lade.generate(
        model,
        PROMPT,
        drafter=drafter,
        config=lade.Config(strict_drafter=True, max_draft_tokens=3),
        do_sample=False,
        max_new_tokens=24,
        return_dict_in_generate=True,
    )
    assert got.sequences.tolist() == expected.tolist()
    assert got.stats.mean_accepted_tokens > 2


def test_what_has_no_such_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="on the CPU, got one on meta"):
        int8_copy(tiny_model("llama").to("meta"))
    with pytest.raises(ValueError, match="to have linear layers, got none"):
        int8_copy(int8_copy(tiny_model("llama")))
