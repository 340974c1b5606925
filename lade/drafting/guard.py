"""The one place where a user's drafter or grammar is asked: no call fails, and no text changes."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lade.attempts import Attempt
from lade.captures import apart_from_captures
from lade.drafting.drafts import checked, checked_ids, checked_tokens
from lade.errors import DrafterWarning, LadeError, in_one_line
from ngram_pool import Draft

_T = TypeVar("_T")
_CPU = torch.device("cpu")


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
        self._device = device or _CPU
        self.asks(drafter)

    def asks(self, drafter: object) -> None:
        """Ask another drafter from now on: the one that was made for the call."""
        self._drafter: Any = drafter
        # Whether it is one of lade's own, and no subclass of a user's.
        self._is_own = type(drafter).__module__.startswith("lade.")

    def ask(
        self,
        ask: Callable[[], _T],
        instead: _T,
        *,
        even_if_failed: bool = False,
        may_refuse: bool = False,
    ) -> _T:
        """Return what `ask` returns, or `instead` where the drafter fails or has failed.

        Args:
            ask: touches the drafter; also looking at an attribute may raise.
            instead: what to return then.
            even_if_failed: whether to ask one that has failed; it is not told again.
            may_refuse: whether a `LadeError` ends the call.
        """
        if self.has_failed and not even_if_failed:
            return instead
        try:
            if self._is_own:
                return ask()
            with unchanged_generators(self._device):
                return ask()
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

    # --- what drafters are asked --------------------------------------------------------------

    def tell(self, method: str, *args: object, even_if_failed: bool = False) -> None:
        """Call a method of the drafter that returns nothing."""
        self.ask(lambda: getattr(self._drafter, method)(*args), None, even_if_failed=even_if_failed)

    def draft(
        self,
        sequence: int | None,
        committed: Sequence[int],
        max_draft_tokens: int,
        check: Callable[[Draft], None] = lambda draft: None,
    ) -> Draft | None:
        """Return a valid draft, or None where the drafter fails; `check` may raise, too."""

        def ask() -> Draft:
            draft = self._drafter.draft(sequence, committed, max_draft_tokens)
            draft = self._valid(draft, max_draft_tokens)
            check(draft)
            return draft

        return self.ask(ask, None)

    def sample(
        self,
        sequence: int | None,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> Draft:
        """Return a valid draft that is drawn, or an empty one where the drafter fails."""

        def ask() -> Draft:
            draft = self._drafter.sample(sequence, committed, max_draft_tokens, rng)
            return self._valid(draft, max_draft_tokens)

        return self.ask(ask, Draft.empty())

    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that a grammar forces, none where it fails to say."""

        def ask() -> list[int]:
            forced = self._drafter.forced_tokens(row, committed, max_tokens)
            return forced if self._is_own else checked_ids(forced)[:max_tokens]

        return self.ask(ask, [])

    def _valid(self, draft: Any, max_draft_tokens: int) -> Draft:
        return draft if self._is_own else checked(draft, max_draft_tokens)

    def explore(
        self, sequence: int | None, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Return valid tokens to explore and what they are worth; none where the drafter fails."""

        def ask() -> tuple[NDArray[np.int32], NDArray[np.float64]]:
            token_ids, worths = self._drafter.explore(sequence, excluded, max_tokens)
            return (token_ids, worths) if self._is_own else checked_tokens(token_ids, worths)

        return self.ask(ask, (np.empty(0, np.int32), np.empty(0)))


def may(look: Callable[[], bool]) -> bool:
    """Return what is seen of a drafter before its call; True where looking at it raises.

    The call looks again, and goes on without the drafter.
    """
    with Attempt(even_memory=True), unchanged_generators(_CPU):
        return look()
    return True


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Put torch's random state back afterwards, on the CPU and, if it is a GPU, on a device."""
    state = torch.default_generator.get_state()
    if device.type != "cuda":
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
        return
    with apart_from_captures(device):
        of_device = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        with apart_from_captures(device):
            torch.cuda.set_rng_state(of_device, device)
