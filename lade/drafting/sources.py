"""The sources of a call's drafts, each asked through one guard; `speculator.py` joins them.

Nowhere else is a user's drafter or grammar asked: no call fails, and no text changes.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lade.budget.asking import SourceCosts
from lade.budget.calibration import Calibration
from lade.captures import put_back, random_states
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import checked
from lade.drafting.pool_drafter import PoolDrafter
from lade.errors import DrafterWarning, LadeError, in_one_line
from lade.stats import SourceStats
from ngram_pool import Draft, NGramPool


class Guard:
    """Asks one drafter, in one call.

    The first exception becomes a warning, and the drafter is not asked again. After each answer,
    torch's global random state is what it was before, on the CPU and on the target's device: text
    is drawn from it. That takes 5 µs; looking whether the state has changed took 8 µs more.

    The state is that of all threads, and what others draw in between is undone as well. So it is
    left alone for drafters of lade's own, which draw nothing there. Neither are their drafts
    checked: that took as long as half of drafting.

    Args:
        drafter: is asked, or makes what is.
        what: is done without where the drafter fails, for the warning.
        is_strict: let exceptions through, for authors of drafters.
        device: of the target; None for the CPU.
    """

    def __init__(
        self,
        drafter: object,
        what: str,
        is_strict: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.has_failed = False
        self._what = what
        self._is_strict = is_strict
        self._device = device or torch.device("cpu")
        self.asks(drafter)

    def asks(self, drafter: object) -> None:
        """Ask another drafter from now on: the one that was made for the call."""
        self.drafter: Any = drafter
        # Whether it is one of lade's own, and no subclass of a user's.
        self.is_own = type(drafter).__module__.startswith("lade.")

    def ask(
        self,
        what: str | Callable[..., Any],
        instead: Any,
        *args: Any,
        even_if_failed: bool = False,
        may_refuse: bool = False,
    ) -> Any:
        """Return what a method of the drafter returns, or `instead` where it fails or has failed.

        Args:
            what: name of the method, as looking at it may raise, too; or what calls the drafter.
            instead: what to return then.
            args: of the method.
            even_if_failed: whether to ask one that has failed; it is not told again.
            may_refuse: whether a `LadeError` ends the call.
        """
        if self.has_failed and not even_if_failed:
            return instead
        try:
            with nullcontext() if self.is_own else unchanged_generators(self._device):
                return (getattr(self.drafter, what) if isinstance(what, str) else what)(*args)
        except Exception as failure:  # the drafter may be the user's
            if self._is_strict or (may_refuse and isinstance(failure, LadeError)):
                raise
            if not self.has_failed:
                self.has_failed = True
                warnings.warn(
                    f"lade goes on without {self._what} failed ({in_one_line(failure)}); "
                    "Config(strict_drafter=True) raises it",
                    DrafterWarning,
                    stacklevel=2,
                )
            return instead


class Source(Guard):
    """One drafter in a call: what it can do, what it did, and its handles of the rows.

    Args:
        drafter: what the user gave, or a pool.
        name: in statistics; its class if it is none of several.
        is_part: whether it is one of several.
        is_strict, device: see `Guard`.
    """

    def __init__(
        self,
        drafter: Drafter | NGramPool,
        name: str = "",
        *,
        is_part: bool = False,
        is_strict: bool = False,
        device: torch.device | None = None,
    ) -> None:
        kind = type(drafter).__name__
        is_named = is_part or name not in ("", kind)
        what = f"the drafter {name!r}: it" if is_named else f"drafts: {kind}"
        super().__init__(drafter, what, is_strict, device)
        self.name = name
        self.is_part = is_part
        self.stats = SourceStats()
        self.calibration = Calibration()
        # Of its drafts, in earlier calls, too: they are kept with the drafter.
        kept = getattr(drafter, "__dict__", {})  # runs no code of the user's
        self.costs: SourceCosts = kept.setdefault("_lade_costs", SourceCosts())
        self.num_successors = 0
        self.learns_ngrams = self.is_free = False
        # Whether it draws when it is told how much, or at once, where drafts are drawn.
        self.is_pool = self.is_made = False
        #: Whether it is a model that is asked only where that pays; None for no model.
        self.is_measured: bool | None = None
        self.handles: dict[int, Any] = {}  # by row
        self.num_run: dict[int, int] = {}  # tokens of the text at its last draft, by row

    def make(self, call: DraftingCall) -> "Source":
        """Make what drafts for a call, and look at it.

        Raises:
            LadeError: it cannot draft for this call.
        """
        self.ask(self._make, None, call, may_refuse=True)
        return self

    def _make(self, call: DraftingCall) -> None:
        given = self.drafter
        if isinstance(given, NGramPool):
            pools = (NGramPool(), (given,)) if given.is_read_only else (given, ())
            made: Any = PoolDrafter(pools[0], call.max_candidates, layers=pools[1])
        else:
            made = given.for_call(call)
        if not isinstance(made, Drafter):
            raise TypeError(f"expected for_call to return a lade.Drafter, got {made!r}")
        self.asks(made)
        self.is_pool = isinstance(made, PoolDrafter)
        self.is_made = not self.is_pool and type(given).for_call is not Drafter.for_call
        wanted: Any = made.num_successors
        if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer):
            raise TypeError(f"expected num_successors to be an int, got {wanted!r}")
        if wanted < 0:
            raise ValueError(f"expected num_successors of at least 0, got {wanted}")
        self.learns_ngrams, self.is_free = bool(made.learns_ngrams), bool(made.is_free)
        self.is_measured = getattr(made, "is_measured", None)
        self.num_successors = int(wanted)

    def open(self, row: int, context: Sequence[int]) -> None:
        """Begin a row; called by `ask`."""
        self.handles[row] = self.drafter.open([*context])

    def draft(
        self,
        row: int,
        committed: Sequence[int],
        most: int,
        rng: np.random.Generator | None = None,
    ) -> Draft:
        """Return a valid draft, drawn by a pool if there is an `rng`; called by `ask`."""
        handle = self.handles.get(row)
        if rng is None:
            draft: Draft = self.drafter.draft(handle, committed, most)
        else:
            draft = self.drafter.sample(handle, committed, most, rng)
        # What lade's own drafters return is not checked: that took as long as half of drafting.
        return draft if self.is_own else checked(draft, most)

    def close(self, row: int) -> None:
        """End a row."""
        self.num_run.pop(row, None)
        if row in self.handles:
            self.ask("close", None, self.handles.pop(row), even_if_failed=True)


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Put torch's random state back afterwards, on the CPU and, if it is a GPU, on a device."""
    states = random_states(device)
    try:
        yield
    finally:
        put_back(device, states)
