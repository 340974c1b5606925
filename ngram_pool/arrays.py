"""The arrays that a pool's kernels work on, in groups; `_kernels.py` says what they hold.

Next file: `state.py`.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import NEVER, NONE, Float64Array, Int32Array, Int64Array
from ngram_pool.table import SuccessorTable

# Tokens whose expected counts are kept: 12 bytes each. Rarer ones hardly matter.
_NUM_UNIGRAMS = 2**12
_NO_TABLE = SuccessorTable(1)
_NO_LAYERS = np.empty((0, _kernels.NUM_LAYER_COLUMNS), np.int64)
_UNBEGUN = (NONE, NEVER, NEVER, 0)  # the state of a sequence without text


class Row:
    """What the kernels know of a pool or a sequence whose arrays they find by address.

    It holds none of these arrays: whoever reads them by it does.
    """

    def __init__(self, values: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
        self.values = np.array(values, np.int64)
        self.address: int = self.values.ctypes.data
        self._arrays = [weakref.ref(array) for array in arrays]

    def is_of(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Return whether these are the arrays whose addresses it has."""
        return all(ref() is array for ref, array in zip(self._arrays, arrays, strict=True))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy has other arrays


@dataclass(slots=True, weakref_slot=True, eq=False)
class OpenSequence:
    """A sequence, open for as long as it is referenced."""

    prewarmed: SuccessorTable = _NO_TABLE
    #: Pools that are only read: held here, as the kernels know their arrays by address alone.
    layers: tuple[Any, ...] = ()
    #: The kernels' `layers`.
    layer_rows: Int64Array = field(default_factory=lambda: _NO_LAYERS)
    #: The kernels' `sequence`, int64 [4].
    state: Int64Array = field(default_factory=lambda: np.array(_UNBEGUN, np.int64))
    #: As of the last call of `row`.
    known_row: Row | None = None

    @classmethod
    def of(
        cls, prewarmed: SuccessorTable | None, layers: tuple[Any, ...], rows: list[list[int]]
    ) -> "OpenSequence":
        """Return a sequence without text, with a table, and with layers and their rows."""
        layer_rows = np.array(rows, np.int64) if rows else _NO_LAYERS
        return cls(_NO_TABLE if prewarmed is None else prewarmed, layers, layer_rows)

    def begin(self) -> None:
        """Begin anew, without text."""
        self.state[:] = _UNBEGUN

    def row(self) -> tuple[Row, NamedTuple]:
        """Return the kernels' row, and what must be held while they read by it."""
        held, known = self.prewarmed.held, self.known_row
        if known is None or not known.is_of((held.keys,)):
            places = [array.ctypes.data for array in (self.state, self.layer_rows, *held[:3])]
            num_keys = 0 if self.prewarmed is _NO_TABLE else len(held.keys)
            sizes = (num_keys, held.token_ids.shape[1])
            values = (places[0], places[1], len(self.layers), *places[2:], *sizes)
            known = self.known_row = Row(values, (held.keys,))
        return known, held


class Text(NamedTuple):
    """The arrays of the text; see `_kernels.py`."""

    text: Int32Array
    links: Int32Array
    heads: Int32Array


class Unigrams(NamedTuple):
    """How often the target would use a token, by all that was harvested."""

    token_ids: Int32Array  # [_NUM_UNIGRAMS], NONE where empty
    counts: Float64Array  # [_NUM_UNIGRAMS], expected; 0 where empty

    @classmethod
    def empty(cls) -> "Unigrams":
        """Return the counts of nothing harvested."""
        return cls(np.full(_NUM_UNIGRAMS, NONE, np.int32), np.zeros(_NUM_UNIGRAMS))

    def copy(self) -> "Unigrams":
        """Return an independent copy."""
        return Unigrams._make(array.copy() for array in self)

    def as_dict(self) -> dict[int, float]:
        """Return the expected counts by token."""
        is_held = self.token_ids != NONE
        return dict(
            zip(self.token_ids[is_held].tolist(), self.counts[is_held].tolist(), strict=True)
        )


class Room(NamedTuple):
    """Scratch arrays of the kernels, for one thread."""

    # for one context
    context: Int64Array
    found: Int64Array
    features: Float64Array
    summed: Float64Array
    found_probs: Float64Array
    # for a tree
    candidates: Int64Array
    candidate_probs: Float64Array
    left_ids: Int64Array
    left_probs: Float64Array
    nodes: Int64Array
    node_probs: Float64Array
    support_probs: Float64Array
