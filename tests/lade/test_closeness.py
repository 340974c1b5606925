"""How far two computations of the same logits are apart."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lade
from lade.closeness import distance, float32_precision, is_exact_in
from lade.gpu.graphs import dependencies_of
from tests.lade.both import ONE, both
from tests.lade.tiny import tiny_model

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("logits", "reference", "expected"),
    [
        ([1.0, 3.0], [1.0, 3.0], 0.0),
        ([1.0, 4.0], [1.0, 3.0], 2**-0.5),
        ([1.0, 3.0, -INF], [1.0, 3.0, -INF], 0.0),
        ([1.0, 4.0, NAN], [1.0, 3.0, NAN], 2**-0.5),
        ([-INF, NAN], [-INF, NAN], 0.0),
        # Another token would be chosen.
        ([1.0, 3.0, NAN], [1.0, 3.0, -INF], INF),
        ([1.0, 3.0, INF], [1.0, 3.0, -INF], INF),
        ([1.0, 3.0, 2.0], [1.0, 3.0, -INF], INF),
    ],
)
def test_distances_are_in_standard_deviations_and_infinite_where_infinities_differ(
    logits: list[float], reference: list[float], expected: float
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        got = distance(torch.tensor(logits, dtype=dtype), torch.tensor(reference, dtype=dtype))
        assert got == pytest.approx(expected)


@pytest.fixture
def backends() -> Iterator[Any]:
    """Backends whose precision of float32 products is set by name, as torch does since 2.9."""
    of_cpu: Any = torch.backends.mkldnn
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has one precision for all backends")
    made = {"cuda": torch.backends.cuda.matmul, "cpu": of_cpu.matmul}
    before = {name: each.fp32_precision for name, each in made.items()}
    yield made
    for name, each in made.items():
        each.fp32_precision = before[name]


def test_a_precision_that_was_set_for_one_backend_holds_for_that_one(backends: Any) -> None:
    """torch then refuses to say what holds for all."""
    model = tiny_model("llama", dtype=torch.float32)
    before = dependencies_of(model)
    assert float32_precision("cpu") == float32_precision("cuda") == "highest"
    backends["cuda"].fp32_precision = "tf32"
    assert (float32_precision("cpu"), float32_precision("cuda")) == ("highest", "tf32")
    assert is_exact_in(model)
    assert dependencies_of(model) == before
    both(model, ONE, do_sample=False, max_new_tokens=12)
    assert lade.probe(model).verification == "tree"
    backends["cpu"].fp32_precision = "bf16"
    assert not is_exact_in(model)
    assert dependencies_of(model) != before
