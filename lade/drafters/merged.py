"""`Merged`: several drafters as one, whose drafts become one tree.

What it does in a call is in `merging.py`; how drafts are joined in `joining.py`, and which drafters
are asked in `payoffs.py`.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from lade.compat import mesh_of
from lade.drafters.joining import Joining
from lade.drafters.merging import MergedDrafter, Part
from lade.drafters.payoffs import Payoffs
from lade.drafting.drafter import CallDrafter, Drafter, DraftingCall, SamplingDrafter
from lade.drafting.pool_drafter import PoolDrafter
from lade.errors import UnsupportedOptionError
from ngram_pool import NGramPool

_MOST_PARTS = 8  # of so many, the sets that may agree are few enough to count


class CallPool:
    """The pool of the call, as a part of `Merged`: the argument `pool`, or the call's own."""

    name = "pool"
    takes_pool = True  # so that `pool` and `drafter` may both be given

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return the drafter that the call would have without another."""
        return call.make_pool_drafter()


class Merged:
    """Drafter out of several: their drafts are joined to one tree, and only those asked that pay.

        assistant = lade.drafters.AssistantModel(small_model)
        both = lade.drafters.Merged([lade.drafters.CallPool(), assistant])
        lade.generate(model, input_ids, drafter=both)

    Drafters are asked in the order of their cost. Tokens on the same path become one node, whose
    probability is learned from what became of each drafter's nodes, and of those that several agree
    on. An expensive drafter is asked where the tokens that it adds are worth its time, which is
    measured: at each level of how sure the cheaper ones are. Where it does not pay, it is tried
    again at growing intervals, for at most half a percent of the time; the first few trials of a
    new object come on top. Pools are always asked. What makes a drafter for each call, as a model
    does, is not even opened before it is asked. A part that fails is dropped with one
    `lade.DrafterWarning`.

    Where drafts are drawn (`Config(acceptance="rejection")`), one drafter alone drafts a step: that
    which is expected to save most time. It is chosen before anything is drawn; choosing among draws
    would favour some tokens, and joining them would change what each was drawn from.

    Where several processes run one model together, all drafters are asked at every step: what is
    measured differs between processes, and a drafter that runs the model must be asked in all of
    them or in none.

    What is learned of costs and of trust is kept for later calls; it holds no text, and may be used
    by several threads. Statistics of a call by drafter are in `DecodeStats.sources`, by the
    drafter's attribute `name` or its class.

    Args:
        drafters: from 1 to 8 drafters, objects that make one for each call, or pools. Those of a
            `Merged` among them are taken one by one.

    Raises:
        TypeError: one of them is no drafter.
        ValueError: there are none, or more than 8.
    """

    def __init__(self, drafters: Sequence[Drafter | CallDrafter | NGramPool]) -> None:
        parts: list[Any] = []
        for drafter in drafters:
            parts += drafter.parts if isinstance(drafter, Merged) else [drafter]
        for part in parts:
            _check_part(part)
        if not 1 <= len(parts) <= _MOST_PARTS:
            raise ValueError(f"expected from 1 to {_MOST_PARTS} drafters, got {len(parts)}")
        self.parts: tuple[Any, ...] = tuple(parts)
        self.names = _distinct([_name_of(part) for part in parts])
        self._reset()

    def _reset(self) -> None:
        self._joining = Joining(len(self.parts))
        self._payoffs = Payoffs(len(self.parts))
        self._lock = Lock()

    @property
    def takes_pool(self) -> bool:
        """Whether the pool of a call is among the parts."""
        return any(getattr(part, "takes_pool", False) for part in self.parts)

    def for_call(self, call: DraftingCall) -> "MergedDrafter":
        """Return a drafter for one call, which shares what is learned with those of others.

        Raises:
            LadeError, TypeError, ValueError: a part cannot draft for this call.
        """
        parts = []
        for name, part in zip(self.names, self.parts, strict=True):
            is_made = isinstance(part, CallDrafter)
            drafter = part.for_call(call) if is_made else _drafter_of(part, call)
            draws = call.rngs is not None and isinstance(drafter, SamplingDrafter)
            if draws and call.max_candidates is not None and not isinstance(drafter, PoolDrafter):
                raise UnsupportedOptionError(
                    f"lade does not support the drafter {name!r}, which draws its drafts, where "
                    f"only {call.max_candidates} of their paths can be verified"
                )
            opens_late = is_made and not getattr(part, "takes_pool", False)
            parts.append(Part(name, drafter, opens_late))
        return MergedDrafter(
            parts,
            self._joining,
            self._payoffs,
            self._lock,
            draws=call.rngs is not None,
            asks_all=mesh_of(call.model) is not None,
            max_length=call.max_length,
            is_strict=call.is_strict,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was measured on this machine."""
        return {"parts": self.parts, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()


def _check_part(part: object) -> None:
    methods = ("open", "draft", "observe", "close")
    is_drafter = callable(getattr(part, "for_call", None)) or all(
        callable(getattr(part, name, None)) for name in methods
    )
    if isinstance(part, type) or not (isinstance(part, NGramPool) or is_drafter):
        raise TypeError(f"expected drafters or pools, got {part!r}")


def _drafter_of(part: Drafter | NGramPool, call: DraftingCall) -> Drafter:
    """Return a part that is a drafter, or the drafter of one that is a pool."""
    if not isinstance(part, NGramPool):
        return part
    if part.is_read_only:
        return PoolDrafter(NGramPool(), call.max_candidates, layers=(part,))
    return PoolDrafter(part, call.max_candidates)


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
