"""Turns: torch's default generators belong to the process, and one call at a time draws from them.

Every engine has a thread, and every call has its own random state. While a call runs lade's code,
the generators hold its state, and the calls of all other engines wait. Forward passes of several
calls, and user code that receives tokens, need no turn. Between two turns, the generators hold the
state of the process.
"""

from collections.abc import Sequence
from threading import Lock, get_ident

import torch
from torch import Tensor

from lade.machine.generators import put_back, random_states

_CPU = torch.device("cpu")


class Turns:
    """Gives turns to the calls of all engines, in the order in which they ask."""

    def __init__(self) -> None:
        self._next, self._turn = Lock(), Lock()
        self._holder: int | None = None  # a thread
        self._num_turns = 0
        self._heir: object = None
        #: States of the process, by device, while the generators hold the states of a call.
        self._put_aside: dict[torch.device, Tensor] = {}

    @property
    def locks(self) -> Sequence[Lock]:
        """The locks that are free while no call runs, in the order in which they are taken."""
        return self._next, self._turn

    @property
    def is_held_here(self) -> bool:
        """Whether this thread runs a call that has the turn."""
        return self._holder == get_ident()

    def take(
        self, device: torch.device, states: Sequence[Tensor] | None, num_turns: int | None = None
    ) -> None:
        """Wait for the turn, then set the generators that calls on a device draw from.

        Args:
            device: of the model.
            states: of the call; None for the states of the process.
            num_turns: as `lend` returned it; if no call had a turn since, the generators stay.
        """
        with self._next:  # else a thread that has just left would return before others wake up
            self._turn.acquire()
        self._holder = get_ident()
        self._num_turns += 1
        if num_turns is not None and self._num_turns == num_turns + 1:
            return
        try:
            found = dict(zip((_CPU, device), random_states(device), strict=False))
            self._put_aside = {**found, **self._put_aside}
            put_back(device, states or [self._put_aside[each] for each in found])
        except BaseException:
            self._end()
            raise

    def leave(self, device: torch.device, call: object = None) -> list[Tensor]:
        """End the turn and restore the states of the process; return the states of the call.

        Args:
            device: as for `take`.
            call: the call, if it has ended; the process continues its states if it was the heir.
        """
        try:
            states = random_states(device)
            if call is not None and self._heir is call:
                self._heir = None
                self._put_aside.update(zip((_CPU, device), states, strict=False))
            self.restore()
        finally:
            self._end()
        return states

    def lend(self, device: torch.device) -> tuple[list[Tensor], int]:
        """End the turn, but leave the generators to the call until others take a turn."""
        states = random_states(device)
        num_turns = self._num_turns
        self._end()
        return states, num_turns

    def restore(self) -> None:
        """Set the generators to the states of the process."""
        put_aside, self._put_aside = self._put_aside, {}
        for device, state in put_aside.items():
            put_back(device, [state] if device == _CPU else [put_aside[_CPU], state])

    def inherits(self, call: object) -> bool:
        """Return whether a call continues the states of the process: one at a time does."""
        self._heir = self._heir or call
        return self._heir is call

    def disinherit(self, calls: set[object]) -> None:
        """Forget calls that ended by a defect."""
        if self._heir in calls:
            self._heir = None

    def _end(self) -> None:
        self._holder = None
        self._turn.release()


#: The turns of this process.
TURNS = Turns()
