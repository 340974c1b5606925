"""Checks of the arguments that lade takes besides those of `generate`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lade.config import Config
from lade.drafters.merged import takes_pool
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedOptionError
from lade.hf.pools import Pools, pools_of
from lade.hf.predictions import Predicted, predicted_ids
from lade.stats import Step

OnStep = Callable[[Step], None]


class Arguments(NamedTuple):
    """The arguments that `generate` itself does not take."""

    pool: Pools | None = None
    drafter: Drafter | None = None
    config: Config | None = None
    on_step: OnStep | None = None
    prediction: Predicted | None = None

    def check(self) -> None:
        """Raise if an argument has a wrong type, or if arguments contradict each other.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: arguments contradict each other, or more than one pool would learn.
        """
        pool, drafter, config, on_step, _ = self
        pools_of(pool)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"expected config to be a lade.Config, got {config!r}")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"expected on_step to be callable, got {on_step!r}")
        if drafter is not None:
            self._check_drafter(drafter, config or Config())

    def with_ids(self, tokenizer: Any = None) -> "Arguments":
        """Return the same with the prediction as token ids, None if it is empty.

        Raises:
            TypeError, ValueError: as for `predicted_ids`.
        """
        if self.prediction is None:
            return self
        return self._replace(prediction=predicted_ids(self.prediction, tokenizer) or None)

    def _check_drafter(self, drafter: Drafter, config: Config) -> None:
        if not isinstance(drafter, Drafter):
            raise TypeError(
                f"expected drafter to be an object of a subclass of lade.Drafter, got {drafter!r}"
            )
        if not takes_pool(drafter):
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


def refuse_lookahead(drafter: Drafter) -> None:
    """Raise because a drafter would make nothing of a lookahead window."""
    raise UnsupportedOptionError(
        "lade does not support Config(lookahead=…) beside a drafter that learns no n-grams: "
        f"{type(drafter).__name__} has learns_ngrams = False"
    )
