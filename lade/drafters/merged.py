"""`Merged` and `CallPool`: lists of sources for `drafter=`.

`lade/drafting/sources.py` runs the sources of a call.
"""

from collections.abc import Sequence

from lade.compat.attempts import Attempt
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.sources import Source
from ngram_pool import NGramPool


class CallPool(Drafter):
    """The pool of the call, as a part of `Merged`: the argument `pool`, or the call's own."""

    name = "pool"

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return the drafter that the call would have without another."""
        return call.make_pool_drafter()


class Merged(Drafter):
    """Several drafters, whose drafts are joined into one tree; only drafters that pay are asked.

        assistant = lade.drafters.AssistantModel(small_model)
        both = lade.drafters.Merged([lade.drafters.CallPool(), assistant])
        lade.generate(model, input_ids, drafter=both)

    Pools are asked first, and always; then other drafters, and models last. Tokens on the same path
    become one node, whose probability is learned from how often each drafter's nodes were right.
    An expensive drafter is asked if the tokens that it adds to the drafts before are worth its
    measured time; otherwise it is tried again for about half a percent of the time. A drafter that
    fails is dropped with one `lade.DrafterWarning`.

    With `Config(acceptance="rejection")` one drafter drafts each step. If several processes run the
    model together, all drafters are asked at every step.

    Measured times are kept for later calls; everything that depends on a text begins anew with each
    call. `DecodeStats.sources` has a call's statistics by drafter (`name`, or the class).

    Args:
        drafters: drafters or pools; a `Merged` among them stands for its drafters.

    Raises:
        TypeError: an item is no drafter and no pool.
        ValueError: the list is empty.
    """

    def __init__(self, drafters: Sequence[Drafter | NGramPool]) -> None:
        parts: list[Drafter | NGramPool] = []
        for drafter in drafters:
            parts += drafter.parts if isinstance(drafter, Merged) else [drafter]
        for part in parts:
            if not isinstance(part, Drafter | NGramPool):
                raise TypeError(f"expected drafters or pools, got {part!r}")
        if not parts:
            raise ValueError("expected at least one drafter, got none")
        self.parts: tuple[Drafter | NGramPool, ...] = tuple(parts)
        self.names = _distinct([_name_of(part) for part in parts])


def takes_pool(drafter: Drafter) -> bool:
    """Return whether a drafter also drafts by the pool of its call."""
    return any(isinstance(part, CallPool) for part in Merged([drafter]).parts)


def sources_of(drafter: Drafter, call: DraftingCall, is_strict: bool) -> list[Source]:
    """Return the sources of a call, one for each drafter.

    Raises:
        LadeError: one cannot draft for this call.
    """
    merged = Merged([drafter])  # whose parts it has, if it is one
    parts = zip(merged.parts, merged.names, strict=True)
    return [Source(part, name, call, is_strict) for part, name in parts]


def _name_of(part: object) -> str:
    if isinstance(part, NGramPool):
        return "pool"
    name = None
    with Attempt(even_memory=True):
        name = getattr(part, "name", None)
    return name if isinstance(name, str) and name else type(part).__name__


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names with the second, third, … of equal ones numbered."""
    taken: list[str] = []
    for name in names:
        number, distinct = 2, name
        while distinct in taken:
            distinct, number = f"{name}_{number}", number + 1
        taken.append(distinct)
    return tuple(taken)
