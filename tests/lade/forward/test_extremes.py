"""NaN, infinity and huge numbers are results like others: compiled forwards have torch's."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lade
from lade.forward import _kernels, _rows, _tiles
from tests.grids import thinned
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import model_of
from tests.lade.forward.test_bits import no_grad  # noqa: F401

INF, NAN, LOWEST = math.inf, math.nan, torch.finfo(torch.float32).min
EXTREMES = torch.tensor([INF, -LOWEST, 1e38, 1e30, 1e14, 100, 89, 88.5, 88, 20, 4, 1e-3, 0, NAN])
PROMPT = torch.randint(3, 90, (1, 18), generator=torch.Generator().manual_seed(0))


def called(function: Any, row: Tensor, *more: Any) -> Tensor:
    """Return what a compiled function makes of a row, in place."""
    result = row.numpy().copy()
    function(result, *more)
    return torch.from_numpy(result)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_by_tanh": partial(functional.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "exponential": torch.exp,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(name: str) -> None:
    row, function = torch.cat([EXTREMES, -EXTREMES]), vars(_rows)[name]

    def each(row: Any) -> None:
        for index in range(len(row)):
            row[index] = function(row[index])

    mine = called(numba.njit(each, error_model="numpy"), row)
    # torch's own results of float32 differ between the vectors and the rest of a row.
    expected = ACTIVATIONS[name](row.double()).float()
    assert torch.allclose(mine, expected, 1e-5, 1e-6, equal_nan=True), (mine, expected)


ROWS = [
    *([0.0, -INF, 1.0], [-INF, -INF, -INF], [INF, 0.0, 1.0], [NAN, 0.0, 1.0], [0.0, 1.0, NAN]),
    *(
        [1e30, -1e30, 0.0],
        [LOWEST, LOWEST, -1e30],
        [1e16, 1.0000001e16, 1e16],
        [0.0, -100.0, -88.0],
    ),
]


largest, exponential, total = (vars(_rows)[name] for name in ("largest", "exponential", "total"))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def softmax(row: Any) -> None:
    """Write the softmax of a row over it, as programs do."""
    most = largest(row)
    for index in range(len(row)):
        row[index] = exponential(row[index] - most)
    whole = total(row)
    for index in range(len(row)):
        row[index] = row[index] / whole


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def weigh(row: Any, peak: Any, total: Any, sums: Any) -> None:
    """Call a kernel that is compiled only within others."""
    _kernels._weigh(row, peak, total, sums)


@pytest.mark.parametrize("scores", ROWS)
def test_a_softmax_is_torchs(scores: list[float]) -> None:
    row = torch.tensor(scores)
    mine = called(softmax, row)
    assert torch.allclose(mine, row.softmax(0), 1e-6, 1e-37, True)


@pytest.mark.parametrize("scores", [*ROWS, [3e6, 3e6 - 1.0, -INF], [2.9e6, 3e6, 3e6], [5.0, NAN]])
@pytest.mark.parametrize("first", [[0.5, -1.0], [-INF], [1e20, 2e20], [LOWEST], [5.0, NAN]])
def test_attention_block_by_block_is_torchs(first: list[float], scores: list[float]) -> None:
    """Whatever the block before: its weights, and these, are those of one softmax of both."""
    values = torch.arange(6.0).view(6, 1).sin()
    peak, total, sums = np.array([-INF]), np.zeros(1, np.float32), np.zeros(1, np.float32)
    for block, of_block in ((first, values[:3]), (scores, values[3:])):
        given = torch.full((_tiles.BLOCK,), -INF)
        given[: len(block)] = torch.tensor(block)
        row = given.numpy()
        weigh(row, peak, total, sums)
        total += row.sum()
        sums += (row[: len(block), None] * of_block[: len(block)].numpy()).sum(0)
    weights = torch.tensor([*first, *scores]).softmax(0)
    together = torch.cat([values[: len(first)], values[3 : 3 + len(scores)]])
    expected = (weights[:, None] * together).sum(0)
    if torch.tensor([*first, *scores]).max() == -INF:  # a row that sees no key: see `_attend_from`
        assert total[0] == sums[0] == 0.0
    else:
        assert torch.allclose(torch.from_numpy(sums / total), expected, 1e-5, 1e-6, True)


def queries(by: float) -> Callable[[Any], None]:
    """Return a change that makes scores of attention so many times as large."""

    def change(model: Any) -> None:
        attention = model.model.layers[1].self_attn
        names = ("q_proj", "q_b_proj", "qkv_proj")
        next(
            getattr(attention, name) for name in names if getattr(attention, name, None)
        ).weight.mul_(by)

    return change


def sinks(value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(value)

    return change


def rows_of(name: str, value: float) -> Callable[[Any], None]:
    """Return a change that sets the first row of some parameters."""

    def change(model: Any) -> None:
        for each, parameter in model.named_parameters():
            if each.endswith(name):
                parameter[0] = value

    return change


CHANGES = [
    *[("llama", queries(by)) for by in (1e8, 1e16, 1e30)],
    *[("gpt_oss", queries(1e16)), ("gemma2", queries(1e16)), ("youtu", queries(1e16))],
    *[("gpt_oss", sinks(value)) for value in (-1e20, LOWEST, -INF, 1e5, 1e20, INF)],
    *[("qwen3_next", rows_of(name, 80.0)) for name in ("dt_bias", "A_log")],
    *[("qwen3_next", rows_of("dt_bias", value)) for value in (-1e30, 1e30)],
    *[("qwen3_next", rows_of("mlp.gate.weight", 1e30)), ("bamba", rows_of("dt_bias", 1e30))],
    *[("mixtral", rows_of("gate.weight", value)) for value in (1e30, -1e30)],
    *[("llama", rows_of("gate_proj.weight", value)) for value in (1e30, INF, NAN)],
    *[("llama", rows_of("lm_head.weight", value)) for value in (1e36, -INF, NAN)],
]


@pytest.mark.parametrize("when", thinned(["before", "later"], "later"))
@pytest.mark.parametrize("case", thinned(range(len(CHANGES)), 1, 5, 7, 12, 18, 24))
def test_texts_are_those_of_generate(case: int, when: str, ran: list[Ran]) -> None:
    family, change = CHANGES[case]
    model = model_of(family).requires_grad_(False)
    if when == "later":
        lade.generate(model, PROMPT, max_new_tokens=4)
    change(model)
    same_as_generate(model, PROMPT, knows=True, config=EIGHT, max_new_tokens=30, eos_token_id=None)
    has_nan = when == "before" and not all(
        bool(each.isfinite().all()) for each in model.parameters()
    )
    assert ran or has_nan  # what cannot be read runs by torch
