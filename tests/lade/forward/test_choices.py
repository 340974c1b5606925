"""Experts are chosen as torch chooses them, and kinds of routers are recognized."""

from typing import Any

import numpy as np
import pytest
import torch

from lade.forward import _experts
from lade.forward.reading import read
from tests.lade.forward.families import model_of
from tests.lade.forward.test_bits import Texts, Way, no_grad, way  # noqa: F401


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
                    _experts.select(row.numpy(), order, num, is_sorted)
                    assert order[:num].tolist() == expected.tolist()


def test_groups_are_chosen_by_their_two_largest() -> None:
    values = np.array([3, 0, 2, 2, 5, -9, 1, 1], np.float32)
    _experts.leave_groups(values, np.zeros(4, np.float32), np.zeros(4, np.int64), 2)
    assert values.tolist() == [3, 0, 2, 2] + [-np.inf] * 4


def test_what_sets_routers_apart_is_read() -> None:
    for family, tells, expected in (
        ("mixtral", lambda layer: layer.experts.num_chosen, 2),
        ("qwen2_moe", lambda layer: layer.experts.shared_gate is None, False),
        ("qwen3_moe", lambda layer: layer.inner, 0),
        ("glm4_moe", lambda layer: layer.experts.correction[1], "e_score_correction_bias"),
        ("ernie4_5_moe", lambda layer: layer.inner > 0, True),
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


def test_a_token_of_many_experts_has_the_same_bits(way: Way) -> None:  # noqa: F811
    model = grouped().to(way.dtype)
    assert Texts(model).differences(0) == []
