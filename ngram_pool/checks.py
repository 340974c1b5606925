"""Validation of arguments where they enter the package."""

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import MAX_TOKEN_ID, Int64Array


def positive(name: str, value: SupportsIndex) -> int:
    """Return `value` as an integer of at least 1, or raise."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"expected {name} to be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected {name} to be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"expected {name} to be positive, got {number}")
    return number


def token_ids_of(name: str, values: Sequence[int] | NDArray[np.integer[Any]]) -> Int64Array:
    """Return `values` as a contiguous int64 array, or raise."""
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError) as error:  # such as for ragged lists
        raise ValueError(f"expected {name} to be one-dimensional integers: {error}") from None
    if ids.ndim != 1:
        raise ValueError(f"expected {name} of shape [num_tokens], got shape {list(ids.shape)}")
    if not len(ids):
        return np.empty(0, np.int64)
    if ids.dtype == object and all(isinstance(value, int) for value in ids):
        raise ValueError(f"expected {name} from 0 to {MAX_TOKEN_ID}, got {max(ids, key=abs)}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"expected {name} to be integers, got dtype {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise ValueError(
            f"expected {name} from 0 to {MAX_TOKEN_ID}, got {low if low < 0 else high}"
        )
    return np.ascontiguousarray(ids, np.int64)
