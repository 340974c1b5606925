"""Grids of cases: `make test` runs a few of them, and `make test-all` all."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def thinned(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the named ones as exhaustive.

    Args:
        values: of a parameter, in the order of the whole grid.
        quick: those that the quick run keeps.
    """
    return _marked([*values], quick, lambda v: pytest.param(v, marks=pytest.mark.exhaustive))


def thinned_rows(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all rows but the named ones as exhaustive: each has values of several parameters."""
    return _marked([*rows], quick, lambda r: pytest.param(*r, marks=pytest.mark.exhaustive))


def _marked(values: list[Any], quick: Sequence[Any], mark: Callable[[Any], Any]) -> list[Any]:
    missing = [value for value in quick if value not in values]
    assert not missing, f"not of this grid: {missing}"
    return [value if value in quick else mark(value) for value in values]
