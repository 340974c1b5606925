"""`Merged`: several drafters as one, whose drafts become one tree.

What it does in a call is in `merging.py`; which drafters are asked is decided in
`lade/budget/sources.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lade.budget.sources import SourceCosts
from lade.drafters.merging import MergedDrafter, Part, guard_of
from lade.drafting.drafter import Abilities, Drafter, DraftingCall
from lade.drafting.guard import Guard, may
from lade.drafting.pool_drafter import PoolDrafter
from lade.errors import UnsupportedOptionError
from ngram_pool import NGramPool


class CallPool(Drafter):
    """The pool of the call, as a part of `Merged`: the argument `pool`, or the call's own."""

    name = "pool"
    takes_pool = True  # so that `pool` and `drafter` may both be given

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return the drafter that the call would have without another."""
        return call.make_pool_drafter()


class Merged(Drafter):
    """Drafter out of several: their drafts are joined to one tree, and only those asked that pay.

        assistant = lade.drafters.AssistantModel(small_model)
        both = lade.drafters.Merged([lade.drafters.CallPool(), assistant])
        lade.generate(model, input_ids, drafter=both)

    Drafters are asked in the order of their cost. Tokens on the same path become one node, whose
    probability is learned from what became of each drafter's nodes. An expensive drafter is asked
    where the tokens that it adds are worth its time, which is measured: at each level of how sure
    the cheaper ones are. Where it does not pay, it is tried again for at most half a percent of the
    time; a few trials of each call, no longer than a step in all, come on top. Pools are always
    asked. A part that fails is dropped with one `lade.DrafterWarning`.

    Where drafts are drawn (`Config(acceptance="rejection")`), one drafter alone drafts a step. It
    is chosen before anything is drawn; choosing among draws would favour some tokens, and joining
    them would change what each was drawn from.

    Where several processes run one model together, all drafters are asked at every step: what is
    measured differs between processes, and a drafter that runs the model must be asked in all of
    them or in none.

    What drafts cost is kept for later calls, also of other threads; what depends on texts, as what
    drafters add, begins anew with each call. Statistics of a call by drafter are in
    `DecodeStats.sources`, by the drafter's attribute `name` or its class.

    Args:
        drafters: drafters or pools. Those of a `Merged` among them are taken one by one.

    Raises:
        TypeError: one of them is no drafter.
        ValueError: there are none.
    """

    _costs: list[SourceCosts]

    def __init__(self, drafters: Sequence[Drafter | NGramPool]) -> None:
        parts: list[Drafter | NGramPool] = []
        costs: list[SourceCosts] = []
        for drafter in drafters:
            parts += drafter.parts if isinstance(drafter, Merged) else [drafter]
            costs += drafter._costs if isinstance(drafter, Merged) else [_costs_of(drafter)]
        for part in parts:
            if not isinstance(part, Drafter | NGramPool):
                raise TypeError(f"expected drafters or pools, got {part!r}")
        if not parts:
            raise ValueError("expected at least one drafter, got none")
        self.parts: tuple[Drafter | NGramPool, ...] = tuple(parts)
        self.names = _distinct([_name_of(part) for part in parts])
        # Whether the pool of a call is among the parts.
        self.takes_pool = any(may(partial(_takes_pool, part)) for part in parts)
        self._costs = costs

    def for_call(self, call: DraftingCall) -> MergedDrafter:
        """Return a drafter for one call, which shares what drafts cost with those of others.

        Raises:
            LadeError: a part cannot draft for this call.
        """
        parts = []
        for name, part in zip(self.names, self.parts, strict=True):
            guard = guard_of(name, part, call)
            make = partial(_made, name, part, replace(call, is_part=True), guard)
            parts.append(guard.ask(make, Part(name, Drafter(), guard), may_refuse=True))
        return MergedDrafter(parts, self._costs, call)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was measured on this machine."""
        return {name: value for name, value in vars(self).items() if name != "_costs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _costs=[SourceCosts() for _ in state["parts"]])


def _costs_of(drafter: object) -> SourceCosts:
    """Return what a drafter's drafts cost in earlier calls, if it knows."""
    known = getattr(drafter, "__dict__", {}).get("_costs")  # runs no code of the user's
    return known if isinstance(known, SourceCosts) else SourceCosts()


def _made(name: str, part: Drafter | NGramPool, call: DraftingCall, guard: Guard) -> Part:
    """Return what a part drafts by in a call, or raise what it raises."""
    _takes_pool(part)  # which could not be told if it raised before
    drafter = _pool_drafter(part, call) if isinstance(part, NGramPool) else part.for_call(call)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"expected for_call to return a lade.Drafter, got {drafter!r}")
    guard.asks(drafter)
    is_pool = isinstance(drafter, PoolDrafter)
    makes = isinstance(part, Drafter) and type(part).for_call is not Drafter.for_call
    made = Part(name, drafter, guard, Abilities.of(drafter), is_made=makes and not is_pool)
    if (
        made.able.draws
        and call.rngs is not None
        and call.max_candidates is not None
        and not is_pool
    ):
        raise UnsupportedOptionError(
            f"lade does not support the drafter {name!r}, which draws its drafts, where "
            f"only {call.max_candidates} of their paths can be verified"
        )
    return made


def _takes_pool(part: Drafter | NGramPool) -> bool:
    return isinstance(part, Drafter) and bool(part.takes_pool)


def _pool_drafter(pool: NGramPool, call: DraftingCall) -> Drafter:
    if pool.is_read_only:
        return PoolDrafter(NGramPool(), call.max_candidates, layers=(pool,))
    return PoolDrafter(pool, call.max_candidates)


def _name_of(part: object) -> str:
    if isinstance(part, NGramPool | PoolDrafter):
        return "pool"
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
