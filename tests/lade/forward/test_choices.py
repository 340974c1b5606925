"""Experts are chosen as torch chooses them, and kinds of routers are recognized."""

from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn

from lade.forward import _experts, words
from lade.forward.job import forwards_for, why_by_torch
from lade.forward.reading import LayerPlan, read
from tests.lade.forward.families import model_of
from tests.lade.forward.test_bits import Texts, dtype, no_grad  # noqa: F401

select = numba.njit(_experts.select.py_func)


@pytest.mark.parametrize("num_values", [1, 2, 3, 8, 17, 60, 128, 256, 512])
def test_what_is_equal_is_chosen_as_torch_chooses_it(num_values: int) -> None:
    order = np.empty(num_values, np.int64)
    for num in (each for each in (1, 2, 4, 8, 10, 17) if each <= num_values):
        for num_levels in (1, 2, 5, 1000):
            values = torch.randint(0, num_levels, (50, num_values)).float()
            values[:5][torch.rand(5, num_values) < 0.1] = float("nan")
            values[5] = values[5].sort()[0]
            values[6] = -float("inf")
            for is_sorted in (True, False):
                for row, expected in zip(
                    values, values.topk(num, sorted=is_sorted)[1], strict=True
                ):
                    select(row.numpy(), order, num, is_sorted)
                    assert order[:num].tolist() == expected.tolist()


def experts_of(layer: LayerPlan) -> Any:
    """Return the experts of a layer; None if it has none."""
    return next((each for each in layer.phases if hasattr(each, "gating")), None)


def grouped(**options: Any) -> Any:
    """Return a model whose tokens choose among groups of experts, and which has many."""
    given = {"n_routed_experts": 80, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 6}
    return model_of("glm4_moe", num_local_experts=80, **{**given, **options})


def test_how_weights_lie_and_what_gates_do_is_read() -> None:
    for family, lies, gate_and_up, made in (
        ("gpt_oss", words.LIE_ACROSS | words.ALTERNATE, "num, a1, a0", "a1[2 * i], F(7.0)"),
        ("aria_text", words.LIE_ACROSS, "num, a0, a1", "silu(a0[i]) * a1[i]"),
        ("lfm2_moe", 0, "num, a0, a1", "silu(a0[i]) * a1[i]"),
    ):
        stacks = experts_of(read(model_of(family)).layers[-1])
        assert stacks.lies == lies, family
        assert gate_and_up in stacks.gating, stacks.gating
        assert made in stacks.gating, stacks.gating
    assert forwards_for(model_of("gpt_oss", intermediate_size=36)) is None  # no whole vectors


class Bounded(nn.Module):
    """An activation with a bound that no gate of five tokens reaches."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate).clamp(max=20)


class Mixed(nn.Module):
    """An activation of all gates of a token."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return gate.softmax(dim=-1)


def test_a_bound_of_large_gates_is_read_and_what_is_no_gate_is_refused() -> None:
    model = model_of("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.act_fn = Bounded().eval()
    assert "at_most(silu(a0[i]), F(20.0))" in experts_of(read(model).layers[1]).gating
    experts.act_fn = Mixed().eval()
    assert "its numbers depend on each other" in str(why_by_torch(model))


def test_a_token_of_many_experts_has_the_same_bits(dtype: torch.dtype) -> None:  # noqa: F811
    model = grouped().to(dtype)
    assert Texts(model).differences(0) == []


def test_wide_experts_whose_weights_lie_across_give_the_same_bits(dtype: torch.dtype) -> None:  # noqa: F811
    """Their pieces are of other sizes for one token than for many."""
    given = {"hidden_size": 160, "intermediate_size": 1056, "num_local_experts": 3}
    model = model_of("gpt_oss", dtype, **given)
    texts = Texts(model)
    assert texts.differences(0) == []
    torch.set_num_threads(2)
    assert texts.differences(1, ("tree", "piece")) == []
