"""How far two computations of the same logits are apart."""

import math

import pytest
import torch

from lade.compat.closeness import distance
from lade.forward.comparing import is_near

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
        ([1.0, 3.0, NAN], [1.0, 3.0, 2.0], INF),
        ([1.0, 3.0, INF], [1.0, 3.0, 2.0], INF),
        ([1.0, 3.0, 2.0], [1.0, 3.0, NAN], INF),
        ([NAN, NAN], [NAN, -INF], INF),
        ([2.0, NAN], [2.5, NAN], 0.2),  # a single number has no deviation
    ],
)
def test_distances_are_in_standard_deviations_and_infinite_where_infinities_differ(
    logits: list[float], reference: list[float], expected: float
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        both = torch.tensor(logits, dtype=dtype), torch.tensor(reference, dtype=dtype)
        assert distance(*both) == pytest.approx(expected)
        assert is_near(*both) == (expected == 0)
