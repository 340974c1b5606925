"""Grids of cases of which `make test` runs a few, and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the named ones as exhaustive.

    Args:
        values: of a parameter, in the order of the whole grid.
        quick: those that the quick run keeps.
    """
    values = [*values]
    missing = [value for value in quick if value not in values]
    assert not missing, f"not of this grid: {missing}"
    return [v if v in quick else pytest.param(v, marks=pytest.mark.exhaustive) for v in values]


def thinned_rows(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all rows but the named ones as exhaustive: each has values of several parameters."""
    rows = [*rows]
    missing = [row for row in quick if row not in rows]
    assert not missing, f"not of this grid: {missing}"
    return [r if r in quick else pytest.param(*r, marks=pytest.mark.exhaustive) for r in rows]
