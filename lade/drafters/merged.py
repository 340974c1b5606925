"""`Merged` and `CallPool`: lists of sources for `drafter=`, which a call takes apart.

What a call does with them is in `lade/drafting/sources.py`.
"""

from collections.abc import Sequence
from typing import Any

from lade.attempts import Attempt
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
    """Several drafters: their drafts are joined to one tree, and only those asked that pay.

        assistant = lade.drafters.AssistantModel(small_model)
        both = lade.drafters.Merged([lade.drafters.CallPool(), assistant])
        lade.generate(model, input_ids, drafter=both)

    Drafters are asked in the order of their cost. Tokens on the same path become one node, whose
    probability is learned from what became of each drafter's nodes. An expensive drafter is asked
    where the tokens that it adds are worth its time, which is measured: at each level of how sure
    the cheaper ones are. Where it does not pay, it is tried again for at most half a percent of the
    time; a few trials of each call, no longer than a step in all, come on top. Pools are always
    asked. A part that fails is dropped with one `lade.DrafterWarning`.

    Where drafts are drawn (`Config(acceptance="rejection")`), one drafter alone drafts a step.
    Where several processes run one model together, all drafters are asked at every step.

    What drafts cost is kept for later calls, also of other threads; what depends on texts, as what
    drafters add, begins anew with each call. Statistics of a call by drafter are in
    `DecodeStats.sources`, by the drafter's attribute `name` or its class.

    Args:
        drafters: drafters or pools. Those of a `Merged` among them are taken one by one.

    Raises:
        TypeError: one of them is no drafter.
        ValueError: there are none.
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
    parts = drafter.parts if isinstance(drafter, Merged) else (drafter,)
    return any(isinstance(part, CallPool) for part in parts)


def sources_of(drafter: Drafter, call: DraftingCall, is_strict: bool) -> list[Source]:
    """Return the sources of a call, one for each drafter.

    Raises:
        LadeError: one cannot draft for this call.
    """
    merged = drafter if isinstance(drafter, Merged) else Merged([drafter])
    guards: Any = {"is_part": merged is drafter, "is_strict": is_strict, "device": call.device}
    parts = zip(merged.parts, merged.names, strict=True)
    return [Source(part, name, **guards).make(call) for part, name in parts]


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
