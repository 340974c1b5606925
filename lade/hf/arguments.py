"""Checks of the arguments that lade takes besides those of `generate`."""

from collections.abc import Callable
from typing import NamedTuple

from lade.config import Config
from lade.drafting.drafter import CallDrafter, Drafter, NgramDrafter
from lade.errors import UnsupportedOptionError
from lade.hf.pools import Pools, pools_of
from lade.stats import Step

OnStep = Callable[[Step], None]


class Arguments(NamedTuple):
    """The arguments that `generate` itself does not take."""

    pool: Pools | None = None
    drafter: Drafter | CallDrafter | None = None
    config: Config | None = None
    on_step: OnStep | None = None

    def check(self) -> None:
        """Raise if an argument has a wrong type, or if arguments contradict each other.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: arguments contradict each other, or more than one pool would learn.
            UnsupportedOptionError: the drafter cannot do what the config asks for.
        """
        pool, drafter, config, on_step = self
        pools_of(pool)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"expected config to be a lade.Config, got {config!r}")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"expected on_step to be callable, got {on_step!r}")
        if drafter is not None:
            self._check_drafter(drafter, config or Config())

    def _check_drafter(self, drafter: Drafter | CallDrafter, config: Config) -> None:
        methods = ("open", "draft", "observe", "close")
        lacking = [name for name in methods if not hasattr(drafter, name)]
        makes = callable(getattr(drafter, "for_call", None))
        if (lacking and not makes) or isinstance(drafter, type):
            raise TypeError(
                f"expected drafter to be a lade.Drafter, got {drafter!r}"
                + (f", which has no {lacking[0]}" if lacking else "")
            )
        if not getattr(drafter, "takes_pool", False):
            if self.pool is not None:
                raise ValueError(
                    "expected pool or drafter, got both; to draft by both, pass "
                    "drafter=lade.drafters.Merged([lade.drafters.CallPool(), drafter])"
                )
            if config.max_candidates:
                raise ValueError(
                    "expected no Config(max_candidates=…) beside a drafter: it is a setting of the "
                    "pool"
                )
        if config.lookahead is not None and not makes:
            refuse_lookahead(drafter)


def refuse_lookahead(drafter: Drafter | CallDrafter) -> None:
    """Raise if a drafter would make nothing of a lookahead window."""
    if not isinstance(drafter, NgramDrafter):
        raise UnsupportedOptionError(
            "lade does not support Config(lookahead=…) beside a drafter that learns no "
            f"n-grams: {type(drafter).__name__} has no method observe_ngrams"
        )
