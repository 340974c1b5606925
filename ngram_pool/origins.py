"""`Origins`: which text of a pool came from other pools, and which deltas were taken.

With it, pools that exchange deltas have every text once. Nothing here knows the text itself.

Next file: `pool.py`, which sends deltas and takes them.
"""

import os
import secrets
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Int64Array
from ngram_pool.arrays import OpenSequence
from ngram_pool.delta import PoolDelta

# Pools whose last delta is remembered, so that it is not taken twice, and sequences of theirs that
# may go on in their next ones; those that came longest ago are dropped.
_MAX_ORIGINS = 4096
_MAX_CONTINUED = 1024
# Stretches of text that came from other pools. Beyond that, the text between the two oldest ones
# counts as other pools', too.
_MAX_STRETCHES = 1024


class Origins:
    """What one pool remembers of others; a copy has another name, and continues no sequence."""

    def __init__(self) -> None:
        #: From where to where text came from other pools, counted as `PoolState.num_observed`.
        self.stretches: tuple[tuple[int, int], ...] = ()
        # By origin, in the order in which they came: the epoch until which deltas were taken.
        self._until: OrderedDict[str, int] = OrderedDict()
        self._begin()

    def _begin(self) -> None:
        # The name of this pool among all there are, and the process in which it is that.
        self._name = "", -1
        # Sequences of other pools, by origin and last position there.
        self._continued: OrderedDict[tuple[str, int], OpenSequence] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"stretches": self.stretches, "_until": self._until}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def name(self) -> str:
        """Return the name of this pool among all there are."""
        if self._name[1] != os.getpid():  # a forked child learns on its own
            self._name = secrets.token_hex(8), os.getpid()
        return self._name[0]

    def begin_taking(self, delta: PoolDelta) -> bool:
        """Return whether a delta is to be taken, and count it as taken: at most once, then.

        Raises:
            ValueError: it has a part of what was taken before, and more.
        """
        origin, until = delta.since.origin, self._until
        if (origin, os.getpid()) == self._name or delta.until.epoch <= until.get(origin, 0):
            return False
        if delta.since.epoch < until.get(origin, 0):
            raise ValueError(
                f"expected a delta of the pool {origin} since epoch {until[origin]}, which was "
                f"merged last, or later, got {delta!r}"
            )
        until[origin] = delta.until.epoch
        until.move_to_end(origin)
        while len(until) > _MAX_ORIGINS:
            until.popitem(last=False)
        return True

    def continued(self, origin: str, previous: int) -> OpenSequence:
        """Return the sequence whose last position was `previous` in a pool, or a new one."""
        return self._continued.pop((origin, previous), None) or OpenSequence()

    def keep(self, origin: str, last: int, opened: OpenSequence) -> None:
        """Keep a sequence, so that the next delta of its pool can go on with it."""
        self._continued[origin, last] = opened
        while len(self._continued) > _MAX_CONTINUED:
            self._continued.popitem(last=False)

    def note(self, now: int, num_held: int, num_tokens: int) -> None:
        """Note that the next tokens to be observed are another pool's, and none after them.

        Args:
            now: how many tokens were observed; `num_held`: of these, how many are held.
        """
        oldest = now - num_held
        taken = [(begin, min(end, now)) for begin, end in self.stretches if oldest < end]
        taken = [(begin, end) for begin, end in taken if begin < end]
        if num_tokens:
            begin = taken.pop()[0] if taken and taken[-1][1] == now else now
            taken.append((begin, now + num_tokens))
        if len(taken) > _MAX_STRETCHES:
            taken[:2] = [(taken[0][0], taken[1][1])]
        self.stretches = tuple(taken)

    def is_taken(self, positions: Int64Array) -> NDArray[np.bool_]:
        """Return whether text came from other pools, by positions counted as `stretches`."""
        begins, ends = np.array(self.stretches, np.int64).reshape(-1, 2).T
        stretch = np.searchsorted(begins, positions, "right") - 1
        is_taken: NDArray[np.bool_] = (stretch >= 0) & (positions < np.append(ends, 0)[stretch])
        return is_taken
