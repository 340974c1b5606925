"""Where anything about experts has changed, a model is read anew."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import model_of

LONG: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}


@pytest.mark.parametrize("family", thinned(["qwen3_moe", "gpt_oss"], "qwen3_moe"))
def test_experts_of_any_implementation_are_read(family: str, ran: list[Ran]) -> None:
    for name in ("eager", "grouped_mm", "batched_mm"):
        model = model_of(family)
        model.set_experts_implementation(name)
        same_as_generate(model, ONE, accept=0.7, config=EIGHT, **LONG)
        assert ran
        ran.clear()


def _another_stack(model: Any) -> None:
    experts = model.model.layers[-1].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.flip(0), requires_grad=False)


def _correction(model: Any) -> None:
    model.model.layers[-1].mlp.gate.e_score_correction_bias.add_(torch.tensor([0.0, 9, 0, 9]))


def _hook(model: Any) -> None:
    model.model.layers[-1].mlp.experts.register_forward_hook(lambda _, __, out: 2 * out)


def _gate(model: Any) -> None:
    experts = model.model.layers[-1].mlp.experts
    usual = experts._apply_gate
    experts._apply_gate = lambda columns: 2 * usual(columns)


def _biases(model: Any) -> None:
    mlp = model.model.layers[-1].mlp
    mlp.experts.gate_up_proj_bias.add_(1)
    mlp.experts.down_proj_bias = nn.Parameter(mlp.experts.down_proj_bias.flip(0))
    mlp.router.bias.mul_(-9)


CHANGES = [_another_stack, _correction, _hook, _gate, _biases]


@pytest.mark.parametrize(
    "change", thinned(CHANGES, _another_stack, _hook, _biases), ids=lambda each: each.__name__
)
def test_changes_are_noticed(change: Callable[[Any], None], ran: list[Ran]) -> None:
    model = model_of("gpt_oss" if change in (_gate, _biases) else "glm4_moe")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        same_as_generate(model, ONE, accept=0.7, config=EIGHT, **LONG)
        assert ran
        change(model)
        for _ in range(2):
            same_as_generate(model, ONE, accept=0.7, config=EIGHT, **LONG)


def test_another_function_for_experts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    usual: Any = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    same_as_generate(model, ONE, accept=0.7, config=EIGHT, **LONG)

    def halved(*args: Any) -> Tensor:
        return usual(*args) / 2  # type: ignore[no-any-return]

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", halved)
    said = "its experts are computed by your own code"
    same_as_generate(model, ONE, accept=0.7, config=EIGHT, plainly=said, **LONG)
