"""The one place where a user's drafter or grammar is asked: no call fails, and no text changes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lade.captures import apart_from_captures
from lade.errors import DrafterWarning, LadeError, in_one_line

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
