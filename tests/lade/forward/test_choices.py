"""Experts are chosen as torch chooses them, and kinds of routers are recognized."""

import math
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn

from lade.forward import _experts, words
from lade.forward.job import forwards_for, why_by_torch
from lade.forward.reading import read
from tests.lade.forward.families import model_of
from tests.lade.forward.test_bits import Texts, dtype, no_grad  # noqa: F401


@pytest.mark.parametrize("num_values", [1, 2, 3, 8, 17, 60, 128, 256, 512])
def test_what_is_equal_is_chosen_as_torch_chooses_it(num_values: int) -> None:
    order, select = np.empty(num_values, np.int64), numba.njit(_experts.select.py_func)
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


def test_groups_are_chosen_by_their_two_largest() -> None:
    values = np.array([3, 0, 2, 2, 5, -9, 1, 1], np.float32)
    numba.njit(_experts.leave_groups.py_func)(
        values, np.zeros(4, np.float32), np.zeros(4, np.int64), 2
    )
    assert values.tolist() == [3, 0, 2, 2] + [-np.inf] * 4


def test_what_sets_routers_apart_is_read() -> None:
    for family, tells, expected in (
        ("mixtral", lambda layer: layer.experts.num_chosen, 2),
        ("qwen2_moe", lambda layer: layer.experts.shared_gate is None, False),
        ("qwen3_moe", lambda layer: layer.inner, 0),
        ("glm4_moe", lambda layer: layer.experts.correction[1], "e_score_correction_bias"),
        ("ernie4_5_moe", lambda layer: layer.inner > 0, True),
        ("mixtral", lambda layer: layer.experts.routing.weighs, words.BY_SOFTMAX),
        ("gpt_oss", lambda layer: layer.experts.routing.weighs, words.BY_SOFTMAX_OF_CHOSEN),
        ("glm4_moe", lambda layer: layer.experts.routing.added, 1e-20),
        ("lfm2_moe", lambda layer: layer.experts.routing.added, 1e-6),
        ("phimoe", lambda layer: layer.experts.routing.weighs, words.BY_MIXING),
        ("phimoe", lambda layer: round(layer.experts.routing.added, 6), 0.02),
    ):
        assert tells(read(model_of(family)).layers[-1]) == expected, family
    assert read(model_of("glm4_moe")).layers[0].experts is None


def grouped(**options: Any) -> Any:
    """Return a model whose tokens choose among groups of experts, and which has many."""
    given = {"n_routed_experts": 80, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 6}
    return model_of("glm4_moe", num_local_experts=80, **{**given, **options})


def test_groups_and_factors_are_read() -> None:
    routing = read(grouped(routed_scaling_factor=2.5)).layers[-1].experts.routing  # type: ignore[union-attr]
    assert routing.groups == (5, 2)
    assert routing.share == 2.5


def test_how_weights_lie_and_what_gates_do_is_read() -> None:
    silu = "silu", 1.0, math.inf, 0.0
    for family, expected in (
        ("gpt_oss", (words.LIE_ACROSS | words.ALTERNATE, ("swish", 1.702, 7.0, 1.0))),
        ("aria_text", (words.LIE_ACROSS, silu)),
        ("lfm2_moe", (0, silu)),
    ):
        plan = read(model_of(family)).layers[-1].experts
        assert plan is not None
        assert (plan.lies, plan.gating) == expected, family
    assert forwards_for(model_of("gpt_oss", intermediate_size=36)) is None  # no whole vectors


class Bounded(nn.Module):
    """An activation with a bound that no gate of five tokens reaches."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate).clamp(max=20)


def test_a_bound_of_large_gates_is_noticed() -> None:
    model = model_of("mixtral")
    assert why_by_torch(model) is None
    model.model.layers[1].mlp.experts.act_fn = Bounded().eval()
    assert "an activation of its own" in str(why_by_torch(model))


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
